"""Episodes: their order in training and evaluation, their totals, and what a collection of them returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.manager import StepResult
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.seeding import derive_seed


class EpisodeSource:
    """Training episodes. Episode `e` of group `g` depends only on (seed, g, e), so schedule, number of processes and
    number of ranks change no episode.

    Args:
        tasks: task names to draw from.
        start_states: start-state ids are drawn from 0 .. start_states-1.
        group_size: consecutive slots that play the same episodes.
        seed: the run's seed.
        first_slot: number in the run of this rank's slot 0.
    """

    def __init__(
        self, *, tasks: Sequence[str], start_states: int, group_size: int, seed: int, first_slot: int = 0
    ) -> None:
        self._tasks = list(tasks)
        self._start_states = start_states
        self._group_size = group_size
        self._seed = seed
        self._first_slot = first_slot
        # The collector asks for a slot's next episode at every step.
        self._of_group = lru_cache(maxsize=4096)(self._draw)

    def episode(self, slot: int, number: int) -> EpisodeSpec:
        """Return episode `number` (0, 1, ...) of a slot."""
        return self._of_group((self._first_slot + slot) // self._group_size, number)

    def _draw(self, group: int, number: int) -> EpisodeSpec:
        draw = np.random.default_rng(derive_seed(self._seed, "train", group, number))
        return EpisodeSpec(
            task=self._tasks[int(draw.integers(len(self._tasks)))],
            start_state=int(draw.integers(self._start_states)),
            seed=int(draw.integers(2**63 - 1)),
            group=group,
        )


def evaluation_episodes(*, tasks: Sequence[str], first_start_state: int, count: int, seed: int) -> list[EpisodeSpec]:
    """Return the evaluation episodes, the same for every evaluation of a run: tasks in turn, each of them from start
    states `first_start_state`, `first_start_state + 1`, ..."""
    return [
        EpisodeSpec(
            task=tasks[number % len(tasks)],
            start_state=first_start_state + number // len(tasks),
            seed=derive_seed(seed, "eval", number),
            group=number,
        )
        for number in range(count)
    ]


@dataclass(frozen=True, kw_only=True)
class FinishedEpisode:
    """An episode that ended."""

    slot: int
    total_reward: float
    length: int
    """Control steps."""
    success: bool
    """The success condition held at least once."""
    success_at_end: bool = False
    """The success condition held after the last control step."""
    row: int = 0
    """Row of the rollout's batch in which it ended."""
    number: int = 0
    """Number of the episode in an evaluation, from 0."""


class EpisodeTracker:
    """Adds up rewards, steps and success of the episodes in progress in `num_envs` slots."""

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._success = np.zeros(num_envs, np.bool_)

    def begin(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Start new episodes in these slots."""
        self._returns[slots] = 0.0
        self._lengths[slots] = 0
        self._success[slots] = False

    def progress(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the control steps of the episodes in these slots so far, and whether they have been solved."""
        return self._lengths[slots], self._success[slots]

    def update(self, slots: NDArray[np.int64], result: StepResult) -> list[FinishedEpisode]:
        """Add the results of a chunk; returns the episodes that ended in it, in the order of `slots`, without those
        that were lost."""
        self._returns[slots] += result.rewards.sum(1, dtype=np.float64)
        self._lengths[slots] += result.steps
        self._success[slots] |= result.success.any(1)
        finished = [
            FinishedEpisode(
                slot=int(slots[row]),
                total_reward=float(self._returns[slots[row]]),
                length=int(self._lengths[slots[row]]),
                success=bool(self._success[slots[row]]),
                success_at_end=bool(result.success[row, result.steps[row] - 1]),
            )
            for row in np.flatnonzero(result.ended)
        ]
        if finished or result.lost.any():
            self.begin(slots[result.ended | result.lost])
        return finished

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of the episodes in progress."""
        return {
            "returns": self._returns.tolist(),
            "lengths": self._lengths.tolist(),
            "success": self._success.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._returns[:] = state["returns"]
        self._lengths[:] = state["lengths"]
        self._success[:] = state["success"]


@dataclass(kw_only=True)
class Following:
    """Observations that followed chunks and are in no row of a batch: those before a reset at the time limit, and those
    at which a rollout ended. Of this process's slots, in the order of rows, then slots."""

    rows: NDArray[np.int64]
    """`[M]`, row of the chunk before."""
    slots: NDArray[np.int64]
    """`[M]`, its slot, as this process numbers them."""
    observation: Observation
    """`[M]`"""
    features: NDArray[np.float16] | None = None
    """`[M, F]`, what a policy that keeps features instead of observations made of them."""

    def column(self, name: str) -> NDArray[Any]:
        """Return a part of the observations, or their features."""
        found: NDArray[Any] = getattr(self if name == "features" else self.observation, name)
        return found


@dataclass(kw_only=True)
class Rollout:
    """Result of a collection."""

    batch: TrajectoryBatch
    finished: list[FinishedEpisode]
    """Episodes that ended, sorted by the chunk in which they did, then by slot."""
    env_steps: int
    """Control steps executed."""
    following: Following | None = None
    """What followed chunks of this process's slots, for algorithms that keep it."""
