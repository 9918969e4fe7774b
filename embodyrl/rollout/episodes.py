"""Episodes: their order in training and evaluation, their totals, and what a collection of them returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.config.schema import EnvConfig, EnvSource, PerturbationLevels
from embodyrl.envs import EpisodeSpec
from embodyrl.envs.manager import StepResult
from embodyrl.envs.perturb.kinds import Perturbation, drawn_levels, drawn_perturbation
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.seeding import derive_seed
from embodyrl.tracking.intervals import outcomes


class EpisodeSource:
    """Training episodes. Episode `e` of group `g` depends only on (seed, g, e), so schedule, number of processes and
    number of ranks change no episode. Levels of perturbation that still grow depend on the iteration as well.

    Args:
        sources: simulators, of which each episode draws one by its share; then it draws one of its tasks, a start state
            0 .. `start_states - 1`, and its perturbations.
        group_size: consecutive slots that play the same episodes.
        seed: the run's seed.
        first_slot: number in the run of this rank's slot 0.
    """

    def __init__(self, sources: Sequence[EnvSource], *, group_size: int, seed: int, first_slot: int = 0) -> None:
        self._sources = tuple(sources)
        self._up_to = np.cumsum([each.share for each in sources])
        """Sum of the shares up to each source."""
        self._group_size = group_size
        self._seed = seed
        self._first_slot = first_slot
        self._ramp = max(each.env.perturb.ramp if each.env.perturb else 0 for each in sources)
        self._grown = 0
        """Iterations over which levels have grown, at most the longest `env.perturb.ramp`."""
        # The collector asks for a slot's next episode at every step.
        self._of_group = lru_cache(maxsize=4096)(self._draw)

    def episode(self, slot: int, number: int) -> EpisodeSpec:
        """Return episode `number` (0, 1, ...) of a slot."""
        return self._of_group((self._first_slot + slot) // self._group_size, number, self._grown)

    def begin(self, iteration: int | None) -> None:
        """Let episodes that begin from now on have the levels of an iteration, 0, 1, ...; None: those at the end."""
        self._grown = self._ramp if iteration is None else min(iteration, self._ramp)

    def _draw(self, group: int, number: int, grown: int) -> EpisodeSpec:
        source = self._source(group, number)
        env = source.env
        draw = np.random.default_rng(derive_seed(self._seed, "train", group, number))
        return EpisodeSpec(
            task=source.task(env.tasks[int(draw.integers(len(env.tasks)))]),
            start_state=int(draw.integers(env.start_states)),
            seed=int(draw.integers(2**63 - 1)),
            group=group,
            perturb=self._perturbation(env, group, number, grown),
            source=source.name,
        )

    def _source(self, group: int, number: int) -> EnvSource:
        """Return the source of an episode."""
        if len(self._sources) == 1:
            return self._sources[0]
        # A number of its own: what a source plays is what it would play alone.
        drawn = np.random.default_rng(derive_seed(self._seed, "train/source", group, number)).random()
        at = int(np.searchsorted(self._up_to, drawn * self._up_to[-1], side="right"))
        return self._sources[min(at, len(self._sources) - 1)]

    def _perturbation(self, env: EnvConfig, group: int, number: int, grown: int) -> tuple[tuple[str, int], ...]:
        settings = env.perturb
        if settings is None:
            return ()
        # Numbers of its own: tasks and start states are those of a run without perturbations.
        drawn = drawn_perturbation(settings, derive_seed(self._seed, "train/perturb", group, number))
        share = min(grown, settings.ramp) / settings.ramp if settings.ramp else 1.0
        return tuple((kind, 1 + int((level - 1) * share)) for kind, level in drawn)


def evaluation_episodes(
    sources: Sequence[EnvSource],
    *,
    first_start_state: int,
    count: int,
    seed: int,
    perturb: PerturbationLevels | None = None,
) -> list[EpisodeSpec]:
    """Return the evaluation episodes, the same for every evaluation of a run: the tasks of all sources in turn, however
    large their shares, each of them from start states `first_start_state`, `first_start_state + 1`, ...; all of them
    perturbed, or none."""
    tasks = [(source, source.task(task)) for source in sources for task in source.env.tasks]
    drawn: list[Perturbation] = [()] * count
    if perturb is not None:
        seeds = (derive_seed(seed, "eval/perturb", number) for number in range(count))
        drawn = [drawn_levels(perturb, np.random.default_rng(each)) for each in seeds]
    return [
        EpisodeSpec(
            task=tasks[number % len(tasks)][1],
            start_state=first_start_state + number // len(tasks),
            seed=derive_seed(seed, "eval", number),
            group=number,
            perturb=drawn[number],
            source=tasks[number % len(tasks)][0].name,
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
    success: bool | None
    """The success condition held at least once; None: the simulator never said."""
    success_at_end: bool | None = False
    """The success condition held after the last control step; None: the simulator never said."""
    success_at_once: bool = False
    """The success condition held after the first control step, before a policy could have done much."""
    row: int = 0
    """Row of the rollout's batch in which it ended."""
    number: int = 0
    """Number of the episode in an evaluation, from 0."""
    source: str = ""
    """Simulator of a mix that played it, see `EpisodeSpec.source`."""


NEWEST = 100
"""Training episodes that means over the newest are of."""


def newest_means(newest: Mapping[str, list[Any]], finished: Sequence[FinishedEpisode]) -> dict[str, float]:
    """Return mean return and success of the newest episodes of a run as metrics; none before the first has ended.

    Args:
        newest: of earlier iterations, see `newest_with`.
        finished: those that ended in this iteration; if they are more than `NEWEST`, the means are over all of them.
    """
    episodes = _joined(newest, finished, max(NEWEST, len(finished)))
    if not episodes["returns"]:
        return {}
    means = {"env/return_recent": float(np.mean(episodes["returns"]))}
    for source in ("", *_names(episodes["sources"])):
        own = [
            success
            for success, of in zip(episodes["successes"], episodes["sources"], strict=True)
            if source in ("", of)
        ]
        if solved := outcomes(own):
            means[of_source("env/success_recent", source)] = sum(solved) / len(solved)
    return means


def newest_with(newest: Mapping[str, list[Any]], finished: Sequence[FinishedEpisode]) -> dict[str, list[Any]]:
    """Return the `returns`, `successes` and `sources` of the newest episodes, once these have ended, too."""
    return _joined(newest, finished, NEWEST)


def _joined(newest: Mapping[str, list[Any]], finished: Sequence[FinishedEpisode], most: int) -> dict[str, list[Any]]:
    returns = [*newest.get("returns", ()), *(each.total_reward for each in finished)]
    successes = [*newest.get("successes", ()), *(each.success for each in finished)]
    # Checkpoints of earlier versions have no sources: there was one.
    sources = [*newest.get("sources", [""] * len(newest.get("returns", ()))), *(each.source for each in finished)]
    return {"returns": returns[-most:], "successes": successes[-most:], "sources": sources[-most:]}


def of_source(metric: str, source: str) -> str:
    """Return the name of a metric of the episodes of one simulator of a mix; empty: of all episodes."""
    return f"{metric}/{source}" if source else metric


class Sourced(Protocol):
    """An episode, or a record of one."""

    @property
    def source(self) -> str:
        """Simulator of a mix that played it; empty in a run with one."""
        ...


AnyEpisode = TypeVar("AnyEpisode", bound=Sourced)


def by_source(episodes: Sequence[AnyEpisode]) -> dict[str, list[AnyEpisode]]:
    """Return the episodes of each simulator of a mix, by its name; empty in a run with one."""
    return {name: [each for each in episodes if each.source == name] for name in _names(e.source for e in episodes)}


def _names(sources: Iterable[str]) -> list[str]:
    """Return the names that occur, sorted."""
    return sorted({each for each in sources if each})


def success_rate(episodes: Sequence[FinishedEpisode]) -> float | None:
    """Return the share of episodes that were solved, 0 .. 1; None if the simulator said of none whether it was."""
    solved = outcomes(each.success for each in episodes)
    return sum(solved) / len(solved) if solved else None


EARLY_SUCCESS = "early_success"
"""Kind of the warning with a `success_doubt`."""


def success_doubt(episodes: Sequence[FinishedEpisode]) -> str | None:
    """Return what makes the success of these episodes doubtful: in most of them it held after the first action; None
    without such a doubt."""
    early = sum(each.success_at_once for each in episodes)
    if 2 * early <= len(episodes):
        return None
    return (
        f"success held after the first action already in {early} of {len(episodes)} episodes: if it holds at reset, it "
        "says nothing about the policy. Check what the simulator reports as success, or choose other tasks or "
        "start states"
    )


class EpisodeTracker:
    """Adds up rewards, steps and success of the episodes in progress in `num_envs` slots."""

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._success = np.zeros(num_envs, np.bool_)
        self._known = np.zeros(num_envs, np.bool_)
        self._at_once = np.zeros(num_envs, np.bool_)

    def begin(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Start new episodes in these slots."""
        self._returns[slots] = 0.0
        self._lengths[slots] = 0
        self._success[slots] = self._known[slots] = self._at_once[slots] = False

    def progress(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the control steps of the episodes in these slots so far, and whether they have been solved."""
        return self._lengths[slots], self._success[slots]

    def update(self, slots: NDArray[np.int64], result: StepResult) -> list[FinishedEpisode]:
        """Add the results of a chunk; returns the episodes that ended in it, in the order of `slots`, without those
        that were lost."""
        self._returns[slots] += result.rewards.sum(1, dtype=np.float64)
        self._at_once[slots] |= (self._lengths[slots] == 0) & result.success[:, 0]
        self._lengths[slots] += result.steps
        self._success[slots] |= result.success.any(1)
        self._known[slots] |= True if result.success_known is None else result.success_known
        finished = [self._finished(int(slots[row]), result, row) for row in np.flatnonzero(result.ended).tolist()]
        if finished or result.lost.any():
            self.begin(slots[result.ended | result.lost])
        return finished

    def _finished(self, slot: int, result: StepResult, row: int) -> FinishedEpisode:
        known = bool(self._known[slot])
        return FinishedEpisode(
            slot=slot,
            total_reward=float(self._returns[slot]),
            length=int(self._lengths[slot]),
            success=bool(self._success[slot]) if known else None,
            success_at_end=bool(result.success[row, result.steps[row] - 1]) if known else None,
            success_at_once=bool(self._at_once[slot]),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of the episodes in progress."""
        return {
            "returns": self._returns.tolist(),
            "lengths": self._lengths.tolist(),
            "success": self._success.tolist(),
            "success_known": self._known.tolist(),
            "success_at_once": self._at_once.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._returns[:] = state["returns"]
        self._lengths[:] = state["lengths"]
        self._success[:] = state["success"]
        # Checkpoints of earlier versions have neither: success was always said.
        self._known[:] = state.get("success_known", True)
        self._at_once[:] = state.get("success_at_once", False)


@dataclass(kw_only=True)
class FinalObservations:
    """Observations that followed chunks and are in no row of a batch: those before a reset at the time limit, and those
    at which a rollout ended."""

    rows: NDArray[np.int64]
    """`[M]`, row of the chunk before."""
    slots: NDArray[np.int64]
    """`[M]`, its slot in the batch."""
    columns: Mapping[str, NDArray[Any]]
    """`[M, ...]`: `images` and `proprio` as in `Observation`, or `features` if the policy keeps these instead."""

    def leaves(self) -> dict[str, Tensor]:
        """Return all numbers by name, to be written or mapped."""
        found = {"rows": self.rows, "slots": self.slots, **self.columns}
        return {name: torch.from_numpy(column) for name, column in found.items()}

    @classmethod
    def from_leaves(cls, found: Mapping[str, Tensor]) -> FinalObservations | None:
        """Return the observations with these `leaves`; None if there are none."""
        if not found:
            return None
        columns = {name: column.numpy() for name, column in found.items()}
        return cls(rows=columns.pop("rows"), slots=columns.pop("slots"), columns=columns)

    @staticmethod
    def join(parts: Sequence[FinalObservations | None], sizes: Sequence[int]) -> FinalObservations | None:
        """Join those of neighbouring batches with so many slots each; None if none has any."""
        firsts = np.cumsum([0, *sizes])
        there = [(part, first) for part, first in zip(parts, firsts, strict=False) if part is not None]
        if not there:
            return None
        return FinalObservations(
            rows=np.concatenate([part.rows for part, _ in there]),
            slots=np.concatenate([first + part.slots for part, first in there]),
            columns={name: np.concatenate([part.columns[name] for part, _ in there]) for name in there[0][0].columns},
        )


@dataclass(kw_only=True)
class Rollout:
    """Result of a collection."""

    batch: TrajectoryBatch
    finished: list[FinishedEpisode]
    """Episodes that ended, sorted by the chunk in which they did, then by slot."""
    env_steps: int
    """Control steps executed."""
    following: FinalObservations | None = None
    """What followed chunks, for algorithms that keep it; of several ranks that play themselves, each has its own."""
