"""A scripted expert for those of LIBERO's tasks in which an object is picked up and placed."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.libero.pick_and_place import PickAndPlace
from embodyrl.envs.libero.scene import Scene, read_scene
from embodyrl.envs.libero.task_files import files_of
from embodyrl.envs.libero.tasks import ROBOT_STATE
from embodyrl.envs.options import LiberoConfig, Proprio


class LiberoExpert:
    """Plays LIBERO's tasks with `PickAndPlace`.

    It reads the poses of all objects, so the simulator runs with `proprio: full`. The state of the robot, `proprio:
    robot`, is its first numbers.
    """

    def __init__(self, env: LiberoConfig) -> None:
        self.env = dataclasses.replace(env, proprio=Proprio.full)
        self._shown = ROBOT_STATE if env.proprio is Proprio.robot else None
        self._scene = lru_cache(maxsize=None)(self._read)
        self._playing: dict[int, PickAndPlace] = {}

    def begin(self, slot: int, episode: EpisodeSpec) -> None:
        """See `Demonstrator`."""
        self._playing[slot] = PickAndPlace(self._scene(episode.task))

    def act(self, slots: NDArray[np.int64], observation: Observation) -> NDArray[np.float32]:
        """See `Demonstrator`."""
        assert observation.proprio is not None, "LIBERO always has a state"
        states = observation.proprio.astype(np.float64)
        actions = [self._playing[slot].act(state) for slot, state in zip(slots.tolist(), states, strict=True)]
        return np.stack(actions).astype(np.float32)

    def recorded(self, observation: Observation) -> Observation:
        """See `Demonstrator`."""
        assert observation.proprio is not None, "LIBERO always has a state"
        return dataclasses.replace(observation, proprio=observation.proprio[:, : self._shown])

    def memory(self, slot: int) -> str:
        """See `Remembering`: the height at which the object stood [m]."""
        stood = self._playing[slot].stood
        return "" if stood is None else stood.hex()

    def remember(self, slot: int, memory: str) -> None:
        """See `Remembering`."""
        self._playing[slot].stood = float.fromhex(memory) if memory else None

    def _read(self, task: str) -> Scene:
        return read_scene(files_of(task, self.env).scene)
