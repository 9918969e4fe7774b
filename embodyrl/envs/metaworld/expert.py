"""MetaWorld's scripted policies as demonstrators."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.metaworld.tasks import PROPRIO_DIM
from embodyrl.envs.mujoco.rendering import import_mujoco
from embodyrl.envs.options import MetaWorldConfig, Proprio


class MetaWorldExpert:
    """Plays MetaWorld's tasks with the policies of `metaworld.policies`.

    These policies read all 39 numbers of the state, so the simulator runs with `proprio: full`. The numbers of the
    config's `env.proprio` are the first of them.
    """

    def __init__(self, env: MetaWorldConfig) -> None:
        import_mujoco()
        from metaworld.policies import ENV_POLICY_MAP

        self.env = dataclasses.replace(env, proprio=Proprio.full)
        self._policies: dict[str, Any] = dict(ENV_POLICY_MAP)
        self._shown = PROPRIO_DIM[env.proprio]
        self._playing: dict[int, Any] = {}

    def begin(self, slot: int, episode: EpisodeSpec) -> None:
        """See `Demonstrator`."""
        self._playing[slot] = self._policies[episode.task]()

    def act(self, slots: NDArray[np.int64], observation: Observation) -> NDArray[np.float32]:
        """See `Demonstrator`; actions may go beyond -1 .. 1."""
        assert observation.proprio is not None, "MetaWorld always has a state"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about clipped actions, which the recorder handles
            actions = [
                self._playing[slot].get_action(state)
                for slot, state in zip(slots.tolist(), observation.proprio.astype(np.float64), strict=True)
            ]
        return np.stack(actions).astype(np.float32)

    def recorded(self, observation: Observation) -> Observation:
        """See `Demonstrator`."""
        assert observation.proprio is not None, "MetaWorld always has a state"
        return dataclasses.replace(observation, proprio=observation.proprio[:, : self._shown])
