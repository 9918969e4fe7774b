"""Observations of demonstrations, each with the answer to the question whether the task is solved there.

Shapes: `N` observations, `M` of a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import Config
from embodyrl.data.batch import Batch
from embodyrl.data.batches import held_out
from embodyrl.data.layout import DatasetError, Episode
from embodyrl.data.reader import Dataset
from embodyrl.data.transitions import require_memory
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
        dataset: the demonstrations, with failures among them.
        config: of the run: cameras, frames, minibatches, memory for demonstrations.
        held_out: share of the episodes that are not learned from; at least one.

    Raises:
        DatasetError: they do not say what is solved, are too large, or give one answer only.
    """

    def __init__(self, dataset: Dataset, config: Config, held_out: float) -> None:
        self.dataset, self._config = dataset, config
        self._cameras = [dataset.spec.cameras.index(camera) for camera in config.env.cameras]
        self._ages = config.rollout.chunk_size * np.arange(config.env.frames)
        self._check()
        states, images, answers, begins, of_episode = [], [], [], [], []
        total = 0
        for number in range(len(dataset.episodes)):
            episode = dataset.read(number, with_images=bool(self._cameras))
            found = _answers(episode)
            if episode.proprio is not None:
                states.append(_with_last(episode.proprio, episode.last_proprio))
            if self._cameras:
                assert episode.images is not None, "read with images"
                images.append(_with_last(episode.images, episode.last_images)[:, self._cameras])
            answers.append(found)
            begins.append(np.full(len(found), total))
            of_episode.append(np.full(len(found), number))
            total += len(found)
        self.answers = np.concatenate(answers)
        """bool `[N]`"""
        self._begins, self._of_episode = np.concatenate(begins), np.concatenate(of_episode)
        self._states = np.concatenate(states) if states else None
        self._images = np.concatenate(images) if images else None
        self.episodes_held_out = self._choose(held_out)
        away = np.isin(self._of_episode, self.episodes_held_out)
        self._learned, self._held_out = self._places(~away, "learned from"), self._places(away, "held out")

    def _check(self) -> None:
        spec, folder = self.dataset.spec, self.dataset.folder
        if not spec.outcome:
            raise DatasetError(
                f"{folder} does not say after which actions the task was solved (next.success): record it anew with "
                "embodyrl collect"
            )
        require_memory(self.dataset, self._config.data.memory_mib)

    def _choose(self, share: float) -> NDArray[np.int64]:
        """Draw the episodes that are held out."""
        count = len(self.dataset.episodes)
        if count < 2:
            raise DatasetError(
                f"{self.dataset.folder} has {count} episode: some are needed to learn from, and others to see how "
                "often the classifier is right; record more"
            )
        return held_out(count, share, np.random.default_rng(derive_seed(self._config.seed, "held out")))

    def _places(self, mask: NDArray[np.bool_], what: str) -> _Places:
        found = _Places(np.flatnonzero(mask & self.answers), np.flatnonzero(mask & ~self.answers))
        for name, places in (("solved", found.solved), ("unsolved", found.unsolved)):
            if len(places) < LEAST:
                raise DatasetError(
                    f"of the demonstrations in {self.dataset.folder} that are {what}, too few observations are "
                    f"{name}: {len(places)}, and {LEAST} are needed. Record more with embodyrl collect --keep all "
                    "--pushes 4 --after-success 5 (and env.end_at_success=false, so that episodes continue after a "
                    "success), or change algorithm.held_out"
                )
        return found

    def describe(self) -> str:
        """Return what there is, for people."""
        learned, held = self._learned, self._held_out
        return (
            f"{counted(len(self.dataset.episodes) - len(self.episodes_held_out), 'demonstration')} to learn from "
            f"({len(learned.solved)} solved and {len(learned.unsolved)} other observations), "
            f"{len(self.episodes_held_out)} held out ({len(held.solved)} and {len(held.unsolved)})"
        )

    def batches(self, first: int, count: int) -> Iterator[Batch]:
        """Yield minibatches number `first` .. `first + count - 1`; half of each is solved. A minibatch depends on the
        dataset, the seed and its number alone."""
        size = self._config.data.batch_size
        for number in range(first, first + count):
            rng = np.random.default_rng(derive_seed(self._config.seed, "judgements", number))
            solved = rng.choice(self._learned.solved, size // 2)
            chosen = np.concatenate([solved, rng.choice(self._learned.unsolved, size - size // 2)])
            yield Batch(observation=self._observation(chosen), actions=self._asked(chosen))

    def held_out(self) -> tuple[Iterator[Observation], NDArray[np.bool_]]:
        """Return the observations that are not learned from, a minibatch at a time, and their answers `[N]`."""
        places = np.sort(np.concatenate([self._held_out.solved, self._held_out.unsolved]))
        size = self._config.data.batch_size
        parts = (places[start : start + size] for start in range(0, len(places), size))
        return (self._observation(part) for part in parts), self.answers[places]

    def _asked(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return answers as actions `[M, 1, 1]`."""
        return self.answers[places].astype(np.float32)[:, None, None]

    def _observation(self, places: NDArray[np.int64]) -> Observation:
        images = None
        if self._images is not None:  # of earlier decisions, too; an episode repeats its first one
            shown = np.maximum(places[:, None] - self._ages, self._begins[places][:, None])
            images = self._images[shown].reshape(len(places), -1, *self._images.shape[2:])
        proprio = None if self._states is None else self._states[places]
        return Observation(images=images, proprio=proprio, task_descriptions=[""] * len(places))


def _answers(episode: Episode) -> NDArray[np.bool_]:
    """Return the answer at every observation of an episode: at its first, and after each action whose observation is
    known."""
    assert episode.success is not None, "checked before"
    after = episode.success if episode.has_last else episode.success[:-1]
    return np.concatenate([[False], after])


def _with_last(observed: NDArray[np.generic], last: NDArray[np.generic] | None) -> NDArray[np.generic]:
    """Return the observations of an episode, with that after its last action if it is known."""
    return observed if last is None else np.concatenate([observed, last[None]])
