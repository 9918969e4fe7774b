"""Minibatches of demonstrations for supervised learning.

Shapes: `M` samples of a minibatch, `C` actions in a chunk, `D` action dims, `V` cameras, `H, W` pixels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import AtEnd
from embodyrl.data.files import MIB
from embodyrl.data.layout import Batch, DatasetError
from embodyrl.data.store import EpisodeStore, Frames
from embodyrl.envs import Observation
from embodyrl.seeding import derive_seed


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Episodes in memory."""

    numbers: list[int]
    frames: Frames
    actions: NDArray[np.float32]
    """`[F, D]`"""
    tasks: dict[int, str]
    """By episode."""


class Demonstrations:
    """An endless sequence of minibatches. Each depends only on the dataset, the settings, the seed and its number, so
    that a resumed run continues with the same ones.

    Every epoch shuffles the episodes, reads as many as fit into memory, yields their chunks in random order, and then
    continues with the next episodes. A minibatch has fewer than `batch_size` chunks only if the episodes in memory have
    fewer; an incomplete minibatch at the end is dropped for this epoch.

    Args:
        store: the demonstrations.

    Raises:
        DatasetError: they contain no complete chunk, or an episode that does not fit into memory.
    """

    def __init__(self, store: EpisodeStore) -> None:
        self.store, self._config = store, store.config.data
        self._chunk_size, self._seed = store.config.rollout.chunk_size, store.config.seed
        store.require_each()
        self._starts = [self._chunk_starts(number) for number in range(len(store))]
        if not any(len(starts) for starts in self._starts):
            raise DatasetError(
                f"no episode of {store.dataset.folder} has {self._chunk_size} undisturbed actions in a row: set "
                "data.at_end=repeat or a smaller rollout.chunk_size"
            )
        self._only: NDArray[np.bool_] | None = None
        """Episodes that minibatches are drawn from; None: all of them."""
        self._loaded: _Window | None = None
        self._latest = 0, 0
        """An epoch, and the number of its first minibatch: where the search for the next one begins."""

    @property
    def batch_size(self) -> int:
        """Chunks of a minibatch."""
        return self._config.batch_size

    @property
    def chunks(self) -> int:
        """Number of different chunks."""
        return sum(map(len, self._starts))

    @property
    def episodes(self) -> int:
        """Number of episodes that minibatches are drawn from."""
        return len(self._starts) if self._only is None else int(self._only.sum())

    def split(self, share: float) -> tuple[Demonstrations, Demonstrations] | None:
        """Return a share of the episodes, drawn by the seed, at least one and at most all but one, and the others; None
        if there is only one, or one of the two would have no chunk."""
        chosen = np.isin(np.arange(len(self.store)), self.store.draw(share, "held out demonstrations"))
        parts = copy.copy(self), copy.copy(self)
        for part, only in zip(parts, (chosen, ~chosen), strict=True):
            part._only = only
            part._starts = [starts if here else starts[:0] for starts, here in zip(self._starts, only, strict=True)]
        return parts if all(part.chunks for part in parts) else None

    def batches(self, first: int, count: int) -> Iterator[Batch]:
        """Yield minibatches number `first` .. `first + count - 1`."""
        epoch, position = self._latest if self._latest[1] <= first else (0, 0)
        stop = first + count
        while position < stop:
            self._latest = epoch, position
            for episodes, batches in self._plan(epoch):
                for number, chosen in enumerate(batches, position):
                    if first <= number < stop:
                        yield self._batch(self._window(episodes), chosen, number)
                position += len(batches)
            epoch += 1

    def _chunk_starts(self, number: int) -> NDArray[np.int64]:
        """Return the frames of an episode at which chunks begin. Only the last action of a chunk may be perturbed:
        later actions react to the perturbation, which the observation at the beginning of the chunk does not
        contain."""
        dataset, size = self.store.dataset, self._chunk_size
        length = dataset.episodes[number].length
        last = length if self._config.at_end is AtEnd.repeat else length - size + 1
        starts: NDArray[np.int64] = np.arange(max(last, 0))
        if not dataset.spec.perturbed or size == 1:
            return starts
        episode = dataset.read(number, with_images=False)
        return starts[episode.undisturbed(starts, np.minimum(starts + size - 1, length))]

    def _plan(self, epoch: int) -> list[tuple[list[int], list[NDArray[np.int64]]]]:
        """Return an epoch: groups of episodes in memory, and their minibatches `[M, 2]` of (episode, frame)."""
        rng = np.random.default_rng(derive_seed(self._seed, "demonstrations", epoch))
        order = rng.permutation(len(self._starts))
        order = order if self._only is None else order[self._only[order]]
        plan = []
        for episodes in self._fitting(order.tolist()):
            pairs = [
                np.stack([np.full(len(self._starts[episode]), episode), self._starts[episode]], 1)
                for episode in episodes
            ]
            chunks = rng.permutation(np.concatenate(pairs))
            size = self._config.batch_size
            whole = len(chunks) // size * size
            batches = np.split(chunks[:whole], whole // size) if whole else [chunks] * bool(len(chunks))
            plan.append((episodes, batches))
        return plan

    def _fitting(self, order: list[int]) -> list[list[int]]:
        """Split episodes into groups that fit into memory, each in ascending order as on disk."""
        dataset = self.store.dataset
        most = self._config.memory_mib * MIB // dataset.spec.frame_bytes
        groups: list[list[int]] = [[]]
        frames = 0
        for episode in order:
            length = dataset.episodes[episode].length
            if groups[-1] and frames + length > most:
                groups.append([])
                frames = 0
            groups[-1].append(episode)
            frames += length
        return [sorted(group) for group in groups]

    def _window(self, episodes: list[int]) -> _Window:
        if self._loaded is None or self._loaded.numbers != episodes:
            self._loaded = None  # frees its memory first
            frames, found = self.store.read(episodes)
            self._loaded = _Window(
                numbers=episodes,
                frames=frames,
                actions=np.concatenate([each.actions for each in found]),
                tasks={number: each.task for number, each in zip(episodes, found, strict=True)},
            )
        return self._loaded

    def _batch(self, window: _Window, chosen: NDArray[np.int64], number: int) -> Batch:
        episode, frame = chosen.T
        row = window.frames.begin[episode] + frame
        wanted = row[:, None] + np.arange(self._chunk_size)
        following = np.minimum(wanted, window.frames.end[episode][:, None] - 1)
        observed = window.frames.observed(row)
        if "images" in observed:
            observed["images"] = self._shifted(observed["images"], number)
        return Batch(
            observation=Observation(**observed, task_descriptions=[window.tasks[each] for each in episode.tolist()]),
            actions=window.actions[following],
            repeated=wanted > following,
        )

    def _shifted(self, images: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
        """Shift all images `[M, V, H, W, 3]` of a minibatch by the same random number of pixels; edges are repeated."""
        rng = np.random.default_rng(derive_seed(self._seed, "shifts", number))
        return shifted_images(images, self._config.shift_pixels, rng)


def shifted_images(images: NDArray[np.uint8], most: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Shift images `[M, V, H, W, 3]` by the same random number of pixels, at most `most` each way; edges are
    repeated."""
    if not most:
        return images
    down, right = rng.integers(-most, most + 1, 2)
    height, width = images.shape[2:4]
    rows = np.clip(np.arange(height) - down, 0, height - 1)
    columns = np.clip(np.arange(width) - right, 0, width - 1)
    return np.ascontiguousarray(images[:, :, rows[:, None], columns])
