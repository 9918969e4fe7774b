"""Minibatches of demonstrations for supervised learning.

Shapes: `M` samples of a minibatch, `C` actions in a chunk, `D` action dims, `V` cameras, `H, W` pixels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import AtEnd, DataConfig
from embodyrl.data.batch import Batch
from embodyrl.data.layout import DatasetError
from embodyrl.data.reader import Dataset, require_episodes
from embodyrl.envs import Observation
from embodyrl.seeding import derive_seed


class Demonstrations:
    """An endless sequence of minibatches. Each depends only on the dataset, the settings, the seed and its number, so
    that a resumed run continues with the same ones.

    Every epoch shuffles the episodes, reads as many as fit into memory, yields their chunks in random order, and then
    continues with the next episodes. A minibatch has fewer than `batch_size` chunks only if the episodes in memory have
    fewer; an incomplete minibatch at the end is dropped for this epoch.

    Args:
        dataset: the demonstrations.
        config: batch size, memory, and treatment of the ends of episodes.
        cameras: cameras whose images are returned, in this order.
        chunk_size: `C`.
        frames: images of every camera, one chunk from each other (`env.frames`).
        seed: the run's seed.

    Raises:
        DatasetError: the dataset contains no complete chunk, lacks a camera, or has an episode that does not fit into
            memory.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        *,
        cameras: Sequence[str],
        chunk_size: int,
        seed: int,
        frames: int,
    ) -> None:
        self.dataset = dataset
        self._config = config
        self._chunk_size = chunk_size
        self._seed = seed
        self._ages = chunk_size * np.arange(frames)
        known = dataset.spec.cameras
        if missing := [camera for camera in cameras if camera not in known]:
            raise DatasetError(f"{dataset.folder} has no camera {missing[0]!r} (cameras: {', '.join(known) or 'none'})")
        self._cameras = [known.index(camera) for camera in cameras]
        require_episodes(dataset, config.memory_mib)
        self._starts = [self._chunk_starts(number) for number in range(len(dataset.episodes))]
        if not any(len(starts) for starts in self._starts):
            raise DatasetError(
                f"no episode of {dataset.folder} has {chunk_size} undisturbed actions in a row: set data.at_end=repeat "
                f"or a smaller rollout.chunk_size"
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
        count = len(self._starts)
        rng = np.random.default_rng(derive_seed(self._seed, "held out demonstrations"))
        chosen = np.isin(np.arange(count), held_out(count, share, rng))
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
        length, size = self.dataset.episodes[number].length, self._chunk_size
        last = length if self._config.at_end is AtEnd.repeat else length - size + 1
        starts: NDArray[np.int64] = np.arange(max(last, 0))
        if not self.dataset.spec.perturbed or size == 1:
            return starts
        perturbed = self.dataset.read(number, with_images=False).perturbed
        assert perturbed is not None, "the dataset says that it is there"
        until = np.minimum(starts + size - 1, length)
        before = np.concatenate([[0], np.cumsum(perturbed)])
        undisturbed: NDArray[np.bool_] = before[until] == before[starts]
        return starts[undisturbed]

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
        most = self._config.memory_mib * 2**20 // self.dataset.spec.frame_bytes
        groups: list[list[int]] = [[]]
        frames = 0
        for episode in order:
            length = self.dataset.episodes[episode].length
            if groups[-1] and frames + length > most:
                groups.append([])
                frames = 0
            groups[-1].append(episode)
            frames += length
        return [sorted(group) for group in groups]

    def _window(self, episodes: list[int]) -> _Window:
        if self._loaded is None or self._loaded.episodes != episodes:
            self._loaded = None  # frees its memory first
            self._loaded = _Window(self.dataset, episodes, self._cameras)
        return self._loaded

    def _batch(self, window: _Window, chosen: NDArray[np.int64], number: int) -> Batch:
        episode, frame = chosen.T
        begin, end = window.begin[episode], window.end[episode]
        row = begin + frame
        wanted = row[:, None] + np.arange(self._chunk_size)
        following = np.minimum(wanted, end[:, None] - 1)
        images = None
        if window.images is not None:
            shown = np.maximum(row[:, None] - self._ages, begin[:, None])  # an episode repeats its first image
            frames = window.images[shown]
            images = self._shifted(frames.reshape(len(row), -1, *frames.shape[3:]), number)
        return Batch(
            observation=Observation(
                images=images,
                proprio=None if window.proprio is None else window.proprio[row],
                task_descriptions=[window.tasks[each] for each in episode.tolist()],
            ),
            actions=window.actions[following],
            repeated=wanted > following,
        )

    def _shifted(self, images: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
        """Shift all images `[M, V, H, W, 3]` of a minibatch by the same random number of pixels; edges are repeated."""
        most = self._config.shift_pixels
        if not most:
            return images
        rng = np.random.default_rng(derive_seed(self._seed, "shifts", number))
        down, right = rng.integers(-most, most + 1, 2)
        height, width = images.shape[2:4]
        rows = np.clip(np.arange(height) - down, 0, height - 1)
        columns = np.clip(np.arange(width) - right, 0, width - 1)
        return np.ascontiguousarray(images[:, :, rows[:, None], columns])


def held_out(count: int, share: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the numbers of a share of `count` episodes, drawn at random: at least one and at most all but one."""
    return np.sort(rng.permutation(count)[: min(max(1, round(share * count)), count - 1)])


class _Window:
    """Episodes in memory, concatenated."""

    def __init__(self, dataset: Dataset, episodes: list[int], cameras: list[int]) -> None:
        self.episodes = episodes
        self.tasks: dict[int, str] = {}
        lengths = np.array([dataset.episodes[number].length for number in episodes])
        ends = np.cumsum(lengths)
        self.begin = np.zeros(len(dataset.episodes), np.int64)
        self.end = np.zeros(len(dataset.episodes), np.int64)
        self.begin[episodes], self.end[episodes] = ends - lengths, ends
        frames, spec = int(ends[-1]), dataset.spec
        self.actions = np.empty((frames, spec.action_dim), np.float32)
        self.proprio = np.empty((frames, spec.state_dim), np.float32) if spec.state_dim else None
        self.images = np.empty((frames, len(cameras), *spec.image_size, 3), np.uint8) if cameras else None
        for number in episodes:
            episode = dataset.read(number, with_images=bool(cameras))
            rows = slice(self.begin[number], self.end[number])
            self.tasks[number] = episode.task
            self.actions[rows] = episode.actions
            if self.proprio is not None:
                self.proprio[rows] = episode.proprio
            if self.images is not None:
                assert episode.images is not None, "read with images"
                self.images[rows] = episode.images[:, cameras]
