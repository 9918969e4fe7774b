"""Write a LeRobotDataset atomically, with the statistics of its features in `meta/stats.json`.

Statistics of numbers are minimum, maximum, mean, standard deviation (of the population) and quantiles per dimension.
Quantiles of a dataset are those of all its frames, not means of the episodes' quantiles. Statistics of images are per
channel, over a sample of frames, with pixels between 0 and 1.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embodyrl.config.schema import TrainingPerturbations
from embodyrl.data import image_files, storage
from embodyrl.data.info import Info
from embodyrl.data.layout import (
    ACTION,
    DATA_FILE_MB,
    DATA_PATH,
    DONE,
    ENDS,
    EPISODES_PATH,
    EXECUTED,
    PERTURB,
    PERTURBED,
    REWARD,
    STATE,
    STATS,
    SUCCESS,
    TASKS,
    TERMINATED,
    VIDEO_FILE_MB,
    VIDEO_PATH,
    DatasetError,
    DatasetSpec,
    Episode,
    FilePosition,
    Images,
)


class DatasetWriter:
    """Writes episodes to a temporary folder beside the dataset's path, and renames it when the dataset is complete.

    Leaving the block with an exception removes all files; so does closing it without an episode.

    Args:
        folder: path of the dataset; must not exist.
        spec: features of its frames.
        perturb: how its episodes are perturbed; None: they are not.

    Raises:
        DatasetError: the path exists already.
    """

    def __init__(self, folder: Path, spec: DatasetSpec, *, perturb: TrainingPerturbations | None = None) -> None:
        if folder.exists():
            raise DatasetError(f"{folder} exists already and is never overwritten", "name another folder, or remove it")
        self.folder = folder
        self.spec = spec
        self._perturb = perturb
        self.episodes = 0
        self.frames = 0
        self._partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
        self._partial.mkdir(parents=True)
        self._task_descriptions: dict[str, int] = {}
        self._place = FilePosition()
        self._table = storage.TableWriter(self._partial / DATA_PATH.format(**self._place._asdict()))
        self._videos = {key: _VideoFile(self._partial, key, spec) for key in spec.image_keys if self._in_videos}
        self._ends = storage.TableWriter(self._partial / ENDS)
        self._rows: list[dict[str, Any]] = []
        self._numbers: dict[str, list[NDArray[Any]]] = {}
        self._images: dict[str, list[Statistics]] = {}

    @property
    def _in_videos(self) -> bool:
        return self.spec.images is Images.video

    def add(self, episode: Episode) -> None:
        """Append an episode.

        Raises:
            ValueError: the episode does not fit `spec`.
        """
        episode.check(self.spec)
        if self._table.size_mb >= DATA_FILE_MB:
            self._table.close()
            self._place = self._place.following()
            self._table = storage.TableWriter(self._partial / DATA_PATH.format(**self._place._asdict()))
        found = self._numeric_columns(episode)
        described = {name: of_numbers(values) for name, values in found.items()}
        columns = {name: storage.column(values) for name, values in found.items()}
        videos: dict[str, Any] = {}
        for camera, key in enumerate(self.spec.image_keys):
            assert episode.images is not None, "checked above"
            shown = episode.images[:, camera]
            described[key] = of_images(shown)
            self._images.setdefault(key, []).append(described[key])
            if self._in_videos:
                videos |= self._videos[key].add(shown)
            else:
                columns[key] = storage.image_column([image_files.to_png(image) for image in shown])
        self._table.add(columns)
        if self.spec.ends:
            self._ends.add(self._end(episode))
        for name, values in found.items():
            self._numbers.setdefault(name, []).append(values)
        self._note(episode, videos, described)

    def _numeric_columns(self, episode: Episode) -> dict[str, NDArray[Any]]:
        """Return the columns of an episode, without its images."""
        length = len(episode)
        done = np.zeros(length, np.bool_)
        done[-1] = True
        optional = {
            STATE: episode.proprio,
            REWARD: episode.rewards,
            SUCCESS: episode.success,
            DONE: done if self.spec.outcome else None,
            PERTURBED: episode.perturbed,
            EXECUTED: episode.executed,
        }
        frame = np.arange(length, dtype=np.int64)
        task = self._task_descriptions.setdefault(episode.task, len(self._task_descriptions))
        return (
            {ACTION: episode.actions}
            | {name: values for name, values in optional.items() if values is not None}
            | {
                "timestamp": (frame / self.spec.fps).astype(np.float32),
                "frame_index": frame,
                "episode_index": np.full(length, self.episodes, np.int64),
                "index": self.frames + frame,
                "task_index": np.full(length, task, np.int64),
            }
        )

    def _end(self, episode: Episode) -> dict[str, Any]:
        """Return a row with what followed the last action."""
        columns = {
            "episode_index": storage.column(np.array([self.episodes])),
            TERMINATED: storage.column(np.array([episode.terminated])),
        }
        if episode.last_proprio is not None:
            columns[STATE] = storage.column(episode.last_proprio[None])
        for camera, key in enumerate(self.spec.image_keys):
            assert episode.last_images is not None, "checked above"
            columns[key] = storage.image_column([image_files.to_png(episode.last_images[camera])])
        return columns

    def _note(self, episode: Episode, videos: dict[str, Any], described: dict[str, Statistics]) -> None:
        """Append the row with the position of the episode."""
        row = {
            "episode_index": self.episodes,
            "tasks": [episode.task],
            "length": len(episode),
            "data/chunk_index": self._place.chunk_index,
            "data/file_index": self._place.file_index,
            "dataset_from_index": self.frames,
            "dataset_to_index": self.frames + len(episode),
            **videos,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        for feature, found in described.items():
            row |= {f"stats/{feature}/{name}": value.tolist() for name, value in found.items()}
        self._rows.append(row)
        self.episodes += 1
        self.frames += len(episode)

    def close(self) -> None:
        """Finish the dataset and rename it to its path."""
        self._finish_files()
        if not self.episodes:
            self.discard()
            return
        index = storage.TableWriter(self._partial / EPISODES_PATH.format(**FilePosition()._asdict()))
        index.add({name: pa.array([row[name] for row in self._rows]) for name in self._rows[0]})
        index.close()
        storage.write_tasks(self._partial / TASKS, list(self._task_descriptions))
        total = {name: of_numbers(np.concatenate(parts)) for name, parts in self._numbers.items()}
        total |= {key: pooled(parts) for key, parts in self._images.items()}
        plain = {key: {name: value.tolist() for name, value in found.items()} for key, found in total.items()}
        (self._partial / STATS).write_text(json.dumps(plain, indent=4) + "\n")
        Info(spec=self.spec, episodes=self.episodes, frames=self.frames, tasks=len(self._task_descriptions)).write(
            self._partial
        )
        if self._perturb is not None:
            (self._partial / PERTURB).write_text(json.dumps(self._perturb.drawn_from, indent=4) + "\n")
        self._partial.rename(self.folder)

    def discard(self) -> None:
        """Remove the unfinished dataset."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def _finish_files(self) -> None:
        self._table.close()
        self._ends.close()
        for video in self._videos.values():
            video.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._finish_files()
            self.discard()


class _VideoFile:
    """Writes the videos of one camera."""

    def __init__(self, folder: Path, key: str, spec: DatasetSpec) -> None:
        self._folder, self._key, self._spec = folder, key, spec
        self._place = FilePosition()
        self._video: image_files.VideoWriter | None = None

    def add(self, images: NDArray[np.uint8]) -> dict[str, Any]:
        """Append an episode; return the columns with its position."""
        if self._video is not None and self._video.size_mb >= VIDEO_FILE_MB:
            self._video.close()
            self._video, self._place = None, self._place.following()
        if self._video is None:
            path = self._folder / VIDEO_PATH.format(video_key=self._key, **self._place._asdict())
            self._video = image_files.VideoWriter(path, fps=self._spec.fps, size=self._spec.image_size)
        start = self._video.frames
        self._video.add(images)
        found = {
            **self._place._asdict(),
            "from_timestamp": start / self._spec.fps,
            "to_timestamp": self._video.frames / self._spec.fps,
        }
        return {f"videos/{self._key}/{name}": value for name, value in found.items()}

    def close(self) -> None:
        """Finish the last file."""
        if self._video is not None:
            self._video.close()


# ----------------------------------------------------------------------------------------------------------- statistics

Statistics = dict[str, NDArray[Any]]
"""`min max mean std count q01 q10 q50 q90 q99`; `count` is `[1]`, others have the feature's shape or `[3, 1, 1]`."""

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
SAMPLED_IMAGES = 32
"""Images per episode that statistics are computed of."""


def of_numbers(values: NDArray[Any]) -> Statistics:
    """Return statistics over `T` of numbers `[T]` or `[T, n]`."""
    table = values.reshape(len(values), -1).astype(np.float64)
    return _of_table(table, len(table))


def of_images(images: NDArray[np.uint8]) -> Statistics:
    """Return statistics per channel of one camera's images `[T, H, W, 3]`."""
    chosen = np.unique(np.linspace(0, len(images) - 1, SAMPLED_IMAGES).round().astype(int))
    table = images[chosen].reshape(-1, 3) / 255.0
    found = _of_table(table, len(chosen))
    return {name: value if name == "count" else value.reshape(3, 1, 1) for name, value in found.items()}


def _of_table(table: NDArray[np.float64], count: int) -> Statistics:
    found = {"min": table.min(0), "max": table.max(0), "mean": table.mean(0), "std": table.std(0)}
    quantiles = np.quantile(table, list(QUANTILES.values()), axis=0)
    return found | {"count": np.array([count])} | dict(zip(QUANTILES, quantiles, strict=True))


def pooled(parts: Sequence[Statistics]) -> Statistics:
    """Combine the statistics of several sets; quantiles are means, weighted by the number of frames."""
    counts = np.array([float(part["count"][0]) for part in parts])
    weights = counts / counts.sum()

    def mean(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.tensordot(weights, np.stack(values), 1)

    centre = mean([part["mean"] for part in parts])
    variance = mean([part["std"] ** 2 + (part["mean"] - centre) ** 2 for part in parts])
    return {
        "min": np.min([part["min"] for part in parts], axis=0),
        "max": np.max([part["max"] for part in parts], axis=0),
        "mean": centre,
        "std": np.sqrt(variance),
        "count": np.array([int(counts.sum())]),
        **{name: mean([part[name] for part in parts]) for name in QUANTILES},
    }
