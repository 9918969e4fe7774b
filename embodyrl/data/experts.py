"""Who demonstrates: a scripted expert, or whatever else decides what to do in simulator slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import EnvConfig
from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.registry import EXPERTS


class Demonstrator(Protocol):
    """Decides what to do, an action at a time, in any number of slots."""

    env: EnvConfig
    """The simulator, run so that it shows what this one needs to see."""

    def begin(self, slot: int, episode: EpisodeSpec) -> None:
        """A new episode starts in a slot."""
        ...

    def act(self, slots: NDArray[np.int64], observation: Observation) -> NDArray[np.float32]:
        """Actions `[B, D]` for these slots, in the simulator's units."""
        ...

    def recorded(self, observation: Observation) -> Observation:
        """Return what the simulator as it was configured would have shown."""
        ...


def scripted_expert(env: EnvConfig) -> Demonstrator:
    """The scripted expert of a simulator.

    Raises:
        UnknownNameError: it has none.
        MissingPackageError: a package is not installed.
    """
    expert: Callable[[EnvConfig], Demonstrator] = EXPERTS.load(env.name)
    return expert(env)
