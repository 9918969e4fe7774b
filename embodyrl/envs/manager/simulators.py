"""The simulators of a process that plays, on this machine (`EnvManager`) or on another one (`RemoteManager`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodyrl.envs.manager.memory import Slots, StepResult, Work
from embodyrl.envs.types import EpisodeSpec, Observation, SimulatorSpec
from embodyrl.placement.launcher import WorkerError


class EpisodePlayer(Protocol):
    """Slots that play episodes from their start: what an evaluation needs. `EnvManager` describes every method, and how
    long images stay valid."""

    spec: SimulatorSpec
    num_envs: int
    chunk_size: int

    def reset(self, slots: Slots, episodes: Sequence[EpisodeSpec]) -> Observation:
        """Start an episode in each slot."""
        ...

    def step(
        self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> StepResult:
        """Execute a chunk in each slot and wait for the result."""
        ...

    def step_recorded(
        self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> tuple[StepResult, list[NDArray[np.uint8]]]:
        """Step, and record a video."""
        ...


class Simulators(EpisodePlayer, Protocol):
    """All that can be done with slots."""

    def send(self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None) -> None:
        """Start executing a chunk in each slot."""
        ...

    def receive(self, slots: Slots) -> StepResult:
        """Wait for the chunks of these slots."""
        ...

    def receive_ready(self, at_least: int) -> tuple[NDArray[np.int64], StepResult]:
        """Wait until so many slots have executed their chunks, and receive all that have."""
        ...

    def get_state(self, slots: Slots) -> list[bytes]:
        """Return a state per slot."""
        ...

    def set_state(self, slots: Slots, states: Sequence[bytes]) -> list[int]:
        """Continue slots from states; returns those that were not restored bit for bit."""
        ...

    def observe(self, slots: Slots) -> Observation:
        """Return the current observations of slots."""
        ...

    def render(self, slots: Slots) -> NDArray[np.uint8]:
        """Return images of slots for people."""
        ...

    def offload(self) -> int:
        """End the processes until they are needed; returns the bytes that this frees."""
        ...

    def onload(self) -> None:
        """Start the processes again."""
        ...

    def take_deaths(self) -> list[WorkerError]:
        """Return the errors of processes that were replaced since the last call."""
        ...

    def take_mismatches(self) -> list[int]:
        """Return the slots that were not restored bit for bit since the last call."""
        ...

    def count_restarts(self, restarts: int) -> None:
        """Set how many processes were replaced in the run so far."""
        ...

    def take_work(self) -> Work:
        """Return the processes' working time since the last call."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
