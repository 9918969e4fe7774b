"""Episodes: their order in training and evaluation, their totals, and the rollouts of all ranks as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.engine.parallel import Ranks
from embodyrl.envs import EpisodeSpec
from embodyrl.envs.manager import StepResult
from embodyrl.rollout.batch import BatchError, TrajectoryBatch, concat, leaves, type_name
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

    def update(self, slots: NDArray[np.int64], result: StepResult) -> list[FinishedEpisode]:
        """Add the results of a chunk; returns the episodes that ended in it, in the order of `slots`, without those
        that were lost."""
        self._returns[slots] += result.rewards.sum(1, dtype=np.float64)
        self._lengths[slots] += result.steps
        self._success[slots] |= result.success.any(1)
        ended = slots[result.ended]
        finished = [
            FinishedEpisode(
                slot=int(slot),
                total_reward=float(self._returns[slot]),
                length=int(self._lengths[slot]),
                success=bool(self._success[slot]),
            )
            for slot in ended
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


# ---- the rollouts of all ranks as one, which every rank gets whole


@dataclass(kw_only=True)
class Rollout:
    """Result of a collection."""

    batch: TrajectoryBatch
    finished: list[FinishedEpisode]
    """Episodes that ended, sorted by the chunk in which they did, then by slot; with several ranks, by rank first."""
    env_steps: int
    """Control steps executed."""


def gather_rollouts(own: Rollout, ranks: Ranks, episodes_per_slot: int) -> Rollout:
    """Join the rollouts of all ranks into what a single rank with all slots would have collected.

    Args:
        own: the rollout of this rank.
        ranks: all of them.
        episodes_per_slot: the columns of a batch are the first episodes of all slots, then their second ones, ...

    Raises:
        BatchError: the ranks have different columns.
    """
    if ranks.size == 1:
        return own
    # The barrier can name a rank that hangs; the exchanges below would only time out.
    ranks.barrier()
    slots = own.batch.size[1] // episodes_per_slot
    own_header = {
        "chunks": own.batch.size[0],
        "env_steps": own.env_steps,
        "finished": [dataclasses.asdict(episode) for episode in own.finished],
        "columns": {name: [type_name(leaf.dtype), *leaf.shape[1:]] for name, leaf in leaves(own.batch).items()},
    }
    # Headers first: tensors are exchanged without shape and type, so all ranks must agree on them before.
    every = ranks.gather_values(own_header)
    if any(each["columns"] != own_header["columns"] for each in every):
        raise BatchError(f"the ranks have collected different columns: {[each['columns'] for each in every]}")
    batches = _gather_batches(own.batch.pad(max(each["chunks"] for each in every), "K"), ranks)
    rounds = [batch.chunk(episodes_per_slot, "B") for batch in batches]
    finished = [
        FinishedEpisode(**episode | {"slot": episode["slot"] + rank * slots})
        for rank, each in enumerate(every)
        for episode in each["finished"]
    ]
    return Rollout(
        batch=concat([parts[index] for index in range(episodes_per_slot) for parts in rounds], "B"),
        finished=finished,
        env_steps=sum(each["env_steps"] for each in every),
    )


def _gather_batches(own: TrajectoryBatch, ranks: Ranks) -> list[TrajectoryBatch]:
    """Gather the batches of all ranks, which have the same size."""
    columns = {name: ranks.gather(leaf) for name, leaf in leaves(own).items()}
    return [
        TrajectoryBatch.from_leaves(
            {name: found[rank] for name, found in columns.items()}, own.size, own.task_descriptions
        )
        for rank in range(ranks.size)
    ]
