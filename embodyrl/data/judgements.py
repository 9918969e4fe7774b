"""Observations of demonstrations, each with what is to be said of it: whether the task is solved, or how far it is.

Shapes: `N` observations, `M` of a minibatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from embodyrl.data.batches import shifted_images
from embodyrl.data.layout import Batch, DatasetError, Episode
from embodyrl.data.store import EpisodeStore
from embodyrl.envs import Observation
from embodyrl.screen import counted
from embodyrl.seeding import derive_seed

LEAST = 2
"""Fewest observations of each answer, among those that are learned from and among the others."""
ANEW = "record it anew with embodyrl collect"


class Judged(ABC):
    """All observations of a dataset, in memory, with the answers that a small network learns to give.

    Args:
        store: the demonstrations.
        held_out: share of the episodes that are not learned from; at least one.

    Raises:
        DatasetError: they do not say what is solved, are too large, or too few.
    """

    answers: NDArray[np.float32] | NDArray[np.bool_]
    """`[N]`"""

    def __init__(self, store: EpisodeStore, held_out: float) -> None:
        self.store = store
        self._size, self._seed = store.config.data.batch_size, store.config.seed
        folder = store.dataset.folder
        if not store.dataset.spec.outcome:
            raise DatasetError(f"{folder} does not say after which actions the task was solved (next.success): {ANEW}")
        store.require_all()
        if len(store) < 2:
            raise DatasetError(
                f"{folder} has {len(store)} episode: some are needed to learn from, and others to see how "
                "often what was learned is right; record more"
            )
        self._frames, episodes = store.read(range(len(store)), with_last=True)
        solved = [_solved(episode) for episode in episodes]
        self.episodes_held_out = store.draw(held_out, "held out")
        self._label(solved, np.isin(self._frames.episode, self.episodes_held_out))

    @abstractmethod
    def _label(self, solved: list[NDArray[np.bool_]], away: NDArray[np.bool_]) -> None:
        """Set `answers`, given whether the task is solved at each observation of every episode, and which observations
        `[N]` are held out."""

    @abstractmethod
    def describe(self) -> str:
        """Return what there is, for people."""

    @abstractmethod
    def _draw(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw the observations of a minibatch, `[M]`."""

    @abstractmethod
    def _places_held_out(self) -> NDArray[np.int64]:
        """Return the observations that are not learned from, ascending."""

    def batches(self, first: int, count: int) -> Iterator[Batch]:
        """Yield minibatches number `first` .. `first + count - 1`. A minibatch depends on the dataset, the seed and its
        number alone."""
        for number in range(first, first + count):
            rng = np.random.default_rng(derive_seed(self._seed, "judgements", number))
            chosen = self._draw(rng)
            answers = self.answers[chosen].astype(np.float32)[:, None, None]  # as actions [M, 1, 1]
            seen = self._observation(chosen)
            if seen.images is not None:
                seen = replace(seen, images=shifted_images(seen.images, self.store.config.data.shift_pixels, rng))
            yield Batch(observation=seen, actions=answers)

    def held_out(self) -> tuple[Iterator[Observation], NDArray[np.float32] | NDArray[np.bool_]]:
        """Return the observations that are not learned from, a minibatch at a time, and their answers `[N]`."""
        places = self._places_held_out()
        parts = (places[start : start + self._size] for start in range(0, len(places), self._size))
        return (self._observation(part) for part in parts), self.answers[places]

    def _observation(self, places: NDArray[np.int64]) -> Observation:
        return Observation(**self._frames.observed(places), task_descriptions=[""] * len(places))


@dataclass(frozen=True)
class _Places:
    """Numbers of observations, by the answer."""

    solved: NDArray[np.int64]
    unsolved: NDArray[np.int64]


class Judgements(Judged):
    """Whether the task is solved. The first observation of an episode is not solved, and of each other the column
    `next.success` of the action before says whether it is. Half of each minibatch is solved."""

    answers: NDArray[np.bool_]

    def _label(self, solved: list[NDArray[np.bool_]], away: NDArray[np.bool_]) -> None:
        self.answers = np.concatenate(solved)
        self._learned, self._held_out = self._places(~away, "learned from"), self._places(away, "held out")

    def _places(self, mask: NDArray[np.bool_], what: str) -> _Places:
        found = _Places(np.flatnonzero(mask & self.answers), np.flatnonzero(mask & ~self.answers))
        for name, places in (("solved", found.solved), ("unsolved", found.unsolved)):
            if len(places) < LEAST:
                raise DatasetError(
                    f"of the demonstrations in {self.store.dataset.folder} that are {what}, too few observations are "
                    f"{name}: {len(places)}, and {LEAST} are needed. Record more with embodyrl collect --keep all "
                    "--pushes 4 --after-success 5 (and env.end_at_success=false, so that episodes continue after a "
                    "success), or change algorithm.held_out"
                )
        return found

    def describe(self) -> str:
        """See `Judged`."""
        learned, held = self._learned, self._held_out
        return (
            f"{counted(len(self.store) - len(self.episodes_held_out), 'demonstration')} to learn from "
            f"({len(learned.solved)} solved and {len(learned.unsolved)} other observations), "
            f"{len(self.episodes_held_out)} held out ({len(held.solved)} and {len(held.unsolved)})"
        )

    def _draw(self, rng: np.random.Generator) -> NDArray[np.int64]:
        solved = rng.choice(self._learned.solved, self._size // 2)
        return np.concatenate([solved, rng.choice(self._learned.unsolved, self._size - self._size // 2)])

    def _places_held_out(self) -> NDArray[np.int64]:
        return np.sort(np.concatenate([self._held_out.solved, self._held_out.unsolved]))


class ProgressLabels(Judged):
    """How far the task is, 0 .. 1: 1 where it is solved, and 1 - t / `horizon` where its next success is t actions
    away. What no success follows is not learned from, so that failed episodes do not count.

    The time that is left, and not the share of the episode that is over: that would call all beginnings equally far,
    and depend on what an observation does not show.
    """

    answers: NDArray[np.float32]
    horizon: int
    """Longest time to success in the demonstrations [actions]."""

    def _label(self, solved: list[NDArray[np.bool_]], away: NDArray[np.bool_]) -> None:
        left = np.concatenate([_time_left(each) for each in solved])
        known = np.isfinite(left)
        self.horizon = int(left[known].max(initial=1.0))
        self.answers = (1.0 - left / self.horizon).astype(np.float32)
        self._learned, self._away = np.flatnonzero(known & ~away), np.flatnonzero(known & away)
        self._successful = sum(bool(each.any()) for each in solved)
        for what, places in (("learned from", self._learned), ("held out", self._away)):
            if len(places) < LEAST:
                raise DatasetError(
                    f"of the demonstrations in {self.store.dataset.folder} that are {what}, a success follows "
                    f"{counted(len(places), 'observation')}, and {LEAST} are needed: record more that succeed, or "
                    "change algorithm.held_out"
                )

    def describe(self) -> str:
        """See `Judged`."""
        return (
            f"{counted(len(self.store), 'demonstration')}, {self._successful} of which succeed, within up to "
            f"{counted(self.horizon, 'action')}; {len(self._learned)} observations to learn from, {len(self._away)} "
            f"held out ({counted(len(self.episodes_held_out), 'demonstration')})"
        )

    def _draw(self, rng: np.random.Generator) -> NDArray[np.int64]:
        return rng.choice(self._learned, self._size)

    def _places_held_out(self) -> NDArray[np.int64]:
        return self._away


def _solved(episode: Episode) -> NDArray[np.bool_]:
    """Return whether the task is solved at every observation of an episode: not at its first, and after each action
    whose observation is known, as its success says."""
    assert episode.success is not None, "checked before"
    after = episode.success if episode.has_last else episode.success[:-1]
    return np.concatenate([[False], after])


def _time_left(solved: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the actions until the next observation that is solved; infinite where none follows."""
    places = np.arange(len(solved))
    following = np.minimum.accumulate(np.where(solved, places, np.inf)[::-1])[::-1]
    return following - places
