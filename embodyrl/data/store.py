"""The episodes that a run learns from, and what a policy observes in them.

Three views draw from a store: minibatches to imitate (`batches.py`), decisions for critics (`transitions.py`), and
observations with the answer whether the task is solved there (`judgements.py`).

Shapes: `E` episodes, `F` observations in memory, `M` of them, `V` cameras, `H, W` pixels, `S` proprio dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import Config
from embodyrl.data.files import MIB
from embodyrl.data.layout import DatasetError, Episode
from embodyrl.data.reader import Dataset
from embodyrl.envs import SimulatorSpec
from embodyrl.seeding import derive_seed


class EpisodeStore:
    """Demonstrations as a run learns from them: with its cameras, chunks, seed, and memory for demonstrations.

    Args:
        dataset: the demonstrations.
        config: of the run.

    Raises:
        DatasetError: a camera of `env.cameras` has no images there, or those of another size.
    """

    def __init__(self, dataset: Dataset, config: Config) -> None:
        self.dataset, self.config = dataset, config
        env, spec, folder = config.env, dataset.spec, dataset.folder
        if missing := [camera for camera in env.cameras if camera not in spec.cameras]:
            known = ", ".join(dataset.info.cameras) or "none"
            raise DatasetError(f"{folder} has no camera {missing[0]!r} (cameras: {known})", "change env.cameras")
        if env.cameras and list(spec.image_size) != env.image_size:
            raise DatasetError(
                f"{folder} has images of {spec.image_size} pixels, and env.image_size is {env.image_size}",
                "change env.image_size",
            )
        self.cameras = [spec.cameras.index(camera) for camera in env.cameras]
        """Their places in the dataset's images."""

    @classmethod
    def open(cls, config: Config) -> EpisodeStore:
        """Open the demonstrations that a config names.

        Raises:
            DatasetError: see `Dataset` and the class.
        """
        return cls(Dataset(Path(str(config.data.path)), config.data.features, config.env.cameras), config)

    def __len__(self) -> int:
        """Return the number of episodes, `E`."""
        return len(self.dataset.episodes)

    def read(self, numbers: Sequence[int], *, with_last: bool = False) -> tuple[Frames, list[Episode]]:
        """Read episodes: what was observed in them, and them without their images.

        Args:
            numbers: which, ascending.
            with_last: keep what was observed after their last actions, too, where it is known.
        """
        frames, episodes = Frames(self, numbers, with_last=with_last), []
        for number in numbers:
            episode = self.dataset.read(number, with_images=bool(self.cameras))
            frames.keep(number, episode)
            episodes.append(replace(episode, images=None))
        return frames, episodes

    def draw(self, share: float, purpose: str) -> NDArray[np.int64]:
        """Draw the numbers of a share of the episodes, for a purpose: at least one and at most all but one."""
        rng = np.random.default_rng(derive_seed(self.config.seed, purpose))
        return np.sort(rng.permutation(len(self))[: min(max(1, round(share * len(self))), len(self) - 1)])

    # ---- checks

    def require_fit(self, simulator: SimulatorSpec, proprio_dim: int) -> None:
        """Raise `DatasetError` if the numbers of actions or states differ from the simulator's, or from those that the
        policy expects of a state (0: it reads none)."""
        folder, spec = self.dataset.folder, self.dataset.spec
        if spec.action_dim != simulator.action_dim:
            raise DatasetError(
                f"actions of the demonstrations in {folder} have {spec.action_dim} numbers "
                f"({', '.join(spec.action_names)}), the simulator takes {simulator.action_dim}",
                "record them with this simulator and its options",
            )
        if proprio_dim and spec.state_dim != proprio_dim:
            raise DatasetError(
                f"states of the demonstrations in {folder} have {spec.state_dim} numbers, the policy expects "
                f"{proprio_dim}",
                "record them with the env.proprio of this config",
            )

    def require_each(self) -> None:
        """Raise `DatasetError` if an episode alone does not fit into memory."""
        dataset, most = self.dataset, self.config.data.memory_mib
        longest = max(dataset.episodes, key=lambda where: where.length)
        size = longest.length * dataset.spec.frame_bytes
        if size > most * MIB:
            raise DatasetError(
                f"episode {longest.number} of {dataset.folder} takes {size / MIB:,.0f} MiB, more than data.memory_mib "
                f"= {most}",
                f"set data.memory_mib to at least {-(-size // MIB)}",
            )

    def require_all(self) -> None:
        """Raise `DatasetError` if they do not fit into memory together."""
        dataset, most = self.dataset, self.config.data.memory_mib
        size = dataset.info.frames * dataset.spec.frame_bytes
        if size > most * MIB:
            raise DatasetError(
                f"the demonstrations in {dataset.folder} take {size / MIB:,.0f} MiB, and all of them are drawn from at "
                f"once: raise data.memory_mib (now {most}), or record fewer"
            )


class Frames:
    """What was observed in some episodes, in memory one after the other; see `EpisodeStore.read`."""

    def __init__(self, store: EpisodeStore, numbers: Sequence[int], *, with_last: bool) -> None:
        env, spec = store.config.env, store.dataset.spec
        self._cameras = store.cameras
        self._ages = store.config.rollout.chunk_size * np.arange(env.frames)
        self._with_last = with_last and spec.ends and bool(spec.state_dim or self._cameras)
        lengths = np.array([store.dataset.episodes[number].length for number in numbers]) + self._with_last
        ends = np.cumsum(lengths)
        self.begin = np.zeros(len(store), np.int64)
        """Each episode's first observation, `[E]`; 0 if it is not here."""
        self.end = np.zeros(len(store), np.int64)
        """Behind each episode's last one, `[E]`."""
        self.begin[numbers], self.end[numbers] = ends - lengths, ends
        self.episode = np.repeat(np.asarray(numbers, np.int64), lengths)
        """Each observation's episode, `[F]`."""
        count = int(ends[-1])
        self.proprio = np.empty((count, spec.state_dim), np.float32) if spec.state_dim else None
        """`[F, S]`"""
        self.images = np.empty((count, len(self._cameras), *spec.image_size, 3), np.uint8) if self._cameras else None
        """`[F, V, H, W, 3]`"""

    def keep(self, number: int, episode: Episode) -> None:
        """Keep what was observed in an episode."""
        begin, length = self.begin[number], len(episode)
        rows = slice(begin, begin + length)
        if self.proprio is not None:
            self.proprio[rows] = episode.proprio
            if self._with_last:
                self.proprio[begin + length] = episode.last_proprio
        if self.images is not None:
            assert episode.images is not None, "read with images"
            self.images[rows] = episode.images[:, self._cameras]
            if self._with_last:
                assert episode.last_images is not None, "read with images"
                self.images[begin + length] = episode.last_images[self._cameras]

    def observed(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return what a policy observes at some of them: `proprio [M, S]`; `images [M, V, H, W, 3]`, of earlier
        decisions, too, where an episode repeats its first ones."""
        found: dict[str, NDArray[Any]] = {}
        if self.proprio is not None:
            found["proprio"] = self.proprio[rows]
        if self.images is not None:
            shown = np.maximum(rows[:, None] - self._ages, self.begin[self.episode[rows]][:, None])
            found["images"] = self.images[shown].reshape(len(rows), -1, *self.images.shape[2:])
        return found
