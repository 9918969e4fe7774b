"""Observations of demonstrations, each with the answer to the question whether the task is solved there.

Shapes: `N` observations, `M` of a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodyrl.data.layout import Batch, DatasetError, Episode
from embodyrl.data.store import EpisodeStore
from embodyrl.envs import Observation
from embodyrl.screen import counted
from embodyrl.seeding import derive_seed

LEAST = 2
"""Fewest observations of each answer, among those that are learned from and among the others."""


@dataclass(frozen=True)
class _Places:
    """Numbers of observations, by the answer."""

    solved: NDArray[np.int64]
    unsolved: NDArray[np.int64]


class Judgements:
    """All observations of a dataset, in memory. The first of an episode is not solved, and of each other the column
    `next.success` of the action before says whether it is.

    Args:
        store: the demonstrations, with failures among them.
        held_out: share of the episodes that are not learned from; at least one.

    Raises:
        DatasetError: they do not say what is solved, are too large, or give one answer only.
    """

    def __init__(self, store: EpisodeStore, held_out: float) -> None:
        self.store = store
        self._size, self._seed = store.config.data.batch_size, store.config.seed
        folder = store.dataset.folder
        if not store.dataset.spec.outcome:
            raise DatasetError(
                f"{folder} does not say after which actions the task was solved (next.success): record it anew with "
                "embodyrl collect"
            )
        store.require_all()
        if len(store) < 2:
            raise DatasetError(
                f"{folder} has {len(store)} episode: some are needed to learn from, and others to see how "
                "often the classifier is right; record more"
            )
        self._frames, episodes = store.read(range(len(store)), with_last=True)
        self.answers = np.concatenate([_answers(episode) for episode in episodes])
        """bool `[N]`"""
        self.episodes_held_out = store.draw(held_out, "held out")
        away = np.isin(self._frames.episode, self.episodes_held_out)
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
        """Return what there is, for people."""
        learned, held = self._learned, self._held_out
        return (
            f"{counted(len(self.store) - len(self.episodes_held_out), 'demonstration')} to learn from "
            f"({len(learned.solved)} solved and {len(learned.unsolved)} other observations), "
            f"{len(self.episodes_held_out)} held out ({len(held.solved)} and {len(held.unsolved)})"
        )

    def batches(self, first: int, count: int) -> Iterator[Batch]:
        """Yield minibatches number `first` .. `first + count - 1`; half of each is solved. A minibatch depends on the
        dataset, the seed and its number alone."""
        size = self._size
        for number in range(first, first + count):
            rng = np.random.default_rng(derive_seed(self._seed, "judgements", number))
            solved = rng.choice(self._learned.solved, size // 2)
            chosen = np.concatenate([solved, rng.choice(self._learned.unsolved, size - size // 2)])
            answers = self.answers[chosen].astype(np.float32)[:, None, None]  # as actions [M, 1, 1]
            yield Batch(observation=self._observation(chosen), actions=answers)

    def held_out(self) -> tuple[Iterator[Observation], NDArray[np.bool_]]:
        """Return the observations that are not learned from, a minibatch at a time, and their answers `[N]`."""
        places = np.sort(np.concatenate([self._held_out.solved, self._held_out.unsolved]))
        parts = (places[start : start + self._size] for start in range(0, len(places), self._size))
        return (self._observation(part) for part in parts), self.answers[places]

    def _observation(self, places: NDArray[np.int64]) -> Observation:
        return Observation(**self._frames.observed(places), task_descriptions=[""] * len(places))


def _answers(episode: Episode) -> NDArray[np.bool_]:
    """Return the answer at every observation of an episode: at its first, and after each action whose observation is
    known."""
    assert episode.success is not None, "checked before"
    after = episode.success if episode.has_last else episode.success[:-1]
    return np.concatenate([[False], after])
