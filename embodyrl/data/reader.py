"""Read a LeRobotDataset episode by episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import FeatureNames
from embodyrl.data import image_files, storage
from embodyrl.data.files import MIB, MOST_FILES, read_bytes, regular_file
from embodyrl.data.info import Info
from embodyrl.data.layout import (
    ANEW,
    ENDS,
    EPISODES,
    EXECUTED,
    FRAME,
    PERTURBED,
    REWARD,
    STATE,
    SUCCESS,
    TASKS,
    TERMINATED,
    DatasetError,
    DatasetSpec,
    Episode,
    Images,
)
from embodyrl.data.storage import Kind

PLACES = ("episode_index", "length", "data/chunk_index", "data/file_index", "dataset_from_index", "dataset_to_index")
CHECKED_IMAGES = 64 * MIB
"""Memory of the images that are read to check a dataset [bytes]: about a second."""
LARGEST_IMAGE = 64 * MIB
"""Largest file with one image [bytes]."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Position of an episode in the files."""

    number: int
    length: int
    """`T`"""
    path: Path
    """File of its table."""
    first_row: int
    """Its first row in that table."""
    videos: dict[str, tuple[Path, int]]
    """By feature: the file, and the number of the episode's first image in it."""

    @property
    def last_row(self) -> int:
        """Its last row in that table, plus 1."""
        return self.first_row + self.length


class Dataset:
    """Demonstrations on disk.

    Args:
        folder: folder of a LeRobotDataset v3.0.
        names: names of its features; None: LeRobot's.
        cameras: cameras whose images are read, in this order, of those that there are; None: all.

    Raises:
        DatasetError: the folder contains no such dataset, or it is incomplete or inconsistent.
    """

    def __init__(self, folder: Path, names: FeatureNames | None = None, cameras: Sequence[str] | None = None) -> None:
        self.folder = folder
        self.info = Info.read(folder, names, cameras)
        self.tasks = storage.read_tasks(self._own(folder / TASKS), self.info.tasks)
        self.episodes = self._find_episodes()
        self._check_files()

    @property
    def spec(self) -> DatasetSpec:
        """Features of its frames."""
        return self.info.spec

    def read(self, number: int, *, with_images: bool = True) -> Episode:
        """Read one episode, with or without its images.

        Raises:
            DatasetError: a file is missing or damaged, or has other contents than expected.
        """
        where, spec = self.episodes[number], self.spec
        rows = storage.read_rows(
            where.path,
            where.first_row,
            where.last_row,
            self._columns | (self._in_tables if with_images else {}),
            f"episode {number}",
        )
        columns = {name: self._sized(where, rows[name], name) for name in self._columns}
        self._check_rows(where, columns)
        with np.errstate(over="ignore"):  # what is infinite as float32 is reported as not finite
            floats = {
                name: columns[name].astype(np.float32) for name, kind in self._columns.items() if kind is Kind.number
            }
        return Episode(
            task=self.tasks[int(columns["task_index"][0])],
            actions=floats[spec.names.action],
            proprio=floats[spec.names.state] if spec.state_dim else None,
            images=self._images(where, rows) if with_images and spec.cameras else None,
            rewards=floats[REWARD] if spec.outcome else None,
            success=columns[SUCCESS] if spec.outcome else None,
            perturbed=columns[PERTURBED] if spec.perturbed else None,
            executed=floats[EXECUTED] if spec.executed else None,
            **(self._end(number, with_images=with_images) if spec.ends else {}),
        )

    def not_finite(self) -> dict[str, list[int]]:
        """Return the episodes with numbers that are not finite, by column. Everything but images is read.

        Raises:
            DatasetError: see `read`.
        """
        found: dict[str, list[int]] = {}
        for number in range(len(self.episodes)):
            episode = self.read(number, with_images=False)
            columns = {
                self.spec.names.action: episode.actions,
                self.spec.names.state: episode.proprio,
                REWARD: episode.rewards,
                EXECUTED: episode.executed,
                f"{ENDS}:{STATE}": episode.last_proprio,
            }
            for name, values in columns.items():
                if values is not None and not np.isfinite(values).all():
                    found.setdefault(name, []).append(number)
        return found

    def check_images(self) -> None:
        """Read the images of all episodes, or of some of them if they are many.

        Raises:
            DatasetError: see `read`.
        """
        if self.spec.cameras:
            step = 1 + self.info.frames * self.spec.frame_bytes // CHECKED_IMAGES
            for number in range(0, len(self.episodes), step):
                self.read(number)

    # ---- columns

    @cached_property
    def _columns(self) -> dict[str, Kind]:
        """Columns that are read, without images."""
        spec = self.spec
        optional = {
            spec.names.state: (Kind.number, spec.state_dim),
            REWARD: (Kind.number, spec.outcome),
            SUCCESS: (Kind.flag, spec.outcome),
            PERTURBED: (Kind.flag, spec.perturbed),
            EXECUTED: (Kind.number, spec.executed),
            FRAME: (Kind.whole, spec.counted),
        }
        needed = {spec.names.action: Kind.number, "episode_index": Kind.whole, "task_index": Kind.whole}
        return needed | {name: kind for name, (kind, is_there) in optional.items() if is_there}

    @cached_property
    def _in_tables(self) -> dict[str, Kind]:
        """Columns with images."""
        return dict.fromkeys(self.spec.image_keys, Kind.image) if self.spec.images is Images.image else {}

    def _sized(self, where: Where, values: NDArray[Any], name: str) -> NDArray[Any]:
        """Return a column of an episode as `[T]`, or `[T, n]` if it holds `n` numbers."""
        spec = self.spec
        sizes = {spec.names.action: spec.action_dim, EXECUTED: spec.action_dim, spec.names.state: spec.state_dim}
        size = sizes.get(name)
        try:
            return values.reshape(where.length, *([] if size is None else [size]))
        except ValueError as error:
            raise DatasetError(
                f"column {name!r} in {where.path} does not hold {size or 1} numbers in every frame of episode "
                f"{where.number}, as meta/info.json says",
                ANEW,
            ) from error

    def _check_rows(self, where: Where, columns: Mapping[str, NDArray[Any]]) -> None:
        """Check that rows are those of an episode, in order, and of one known task."""
        if not (columns["episode_index"] == where.number).all():
            raise DatasetError(f"{where.path} holds other rows than episode {where.number} where it should be", ANEW)
        if FRAME in columns and not (np.diff(columns[FRAME]) == 1).all():
            raise DatasetError(f"{where.path} does not hold the frames of episode {where.number} in order", ANEW)
        numbers = np.unique(columns["task_index"])
        if len(numbers) > 1 or not 0 <= numbers[0] < len(self.tasks):
            raise DatasetError(
                f"episode {where.number} of {self.folder} has tasks {numbers[:5].tolist()}, expected a known one", ANEW
            )

    # ---- images

    def _images(self, where: Where, rows: Mapping[str, Any]) -> NDArray[np.uint8]:
        """Read the images of an episode `[T, V, H, W, 3]`."""
        spec = self.spec
        if spec.images is Images.video:
            shown = [
                image_files.read_video(*where.videos[key], where.length, spec.fps, spec.image_size)
                for key in spec.image_keys
            ]
        else:
            shown = [
                np.stack([self._image(where, key, rows[key], frame) for frame in range(where.length)])
                for key in spec.image_keys
            ]
        return np.stack(shown, 1)

    def _image(self, where: Where, key: str, cells: storage.ImageCells, frame: int) -> NDArray[np.uint8]:
        """Read the image in a cell, or in the file that it names."""
        what = f"image {frame} of {key!r} in episode {where.number} of {self.folder}"
        try:
            data, path = cells[frame]
            if data is None and path is None:
                raise DatasetError(f"{what} is missing", ANEW)
            if data is None:
                data = read_bytes(self.folder, str(path), LARGEST_IMAGE)
            return image_files.decode_image(data, self.spec.image_size)
        except (UnicodeDecodeError, image_files.ImageError) as error:
            raise DatasetError(f"{what} cannot be read: {error}", ANEW) from error

    def _end(self, number: int, *, with_images: bool) -> dict[str, Any]:
        """Read what followed the last action of an episode."""
        spec, where, path = self.spec, self.episodes[number], self._own(self.folder / ENDS)
        keys = spec.image_keys if with_images else []
        row = storage.read_rows(path, number, number + 1, self._end_columns(keys))
        if row["episode_index"].tolist() != [number]:
            raise DatasetError(f"{path} holds other rows than that of episode {number} where it should be", ANEW)
        found: dict[str, Any] = {"terminated": bool(row[TERMINATED].ravel()[0])}
        if spec.state_dim:
            found["last_proprio"] = row[STATE].reshape(-1).astype(np.float32)
            if len(found["last_proprio"]) != spec.state_dim:
                raise DatasetError(f"{path} has no state of {spec.state_dim} numbers for episode {number}", ANEW)
        if keys:
            found["last_images"] = np.stack([self._image(where, key, row[key], 0) for key in keys])
        return found

    def _end_columns(self, keys: Sequence[str]) -> dict[str, Kind]:
        """Return the columns of what followed last actions, with those images."""
        state = {STATE: Kind.number} if self.spec.state_dim else {}
        return {"episode_index": Kind.whole, TERMINATED: Kind.flag} | state | dict.fromkeys(keys, Kind.image)

    # ---- episodes

    def _find_episodes(self) -> list[Where]:
        """Return the positions of all episodes, by number."""
        columns = self._positions()
        recorded = self.spec.image_keys if self.spec.images is Images.video else []
        begin: dict[Path, int] = {}
        shown: dict[Path, int] = {}
        found = []
        for number in range(self.info.episodes):
            row = {name: values[number] for name, values in columns.items()}
            path = self._numbered(self.info.data_path, row, "data")
            length, first = int(row["length"]), int(row["dataset_from_index"])
            begin.setdefault(path, first)
            videos = {key: self._video_of(row, key, length, shown) for key in recorded}
            found.append(Where(number=number, length=length, path=path, first_row=first - begin[path], videos=videos))
        return found

    def _positions(self) -> dict[str, NDArray[Any]]:
        """Read the tables of episodes, and check that these follow one another."""
        paths = sorted((self.folder / EPISODES).glob("*/*.parquet"))
        if not paths:
            raise DatasetError(f"{self.folder / EPISODES} holds no files: the dataset is incomplete", ANEW)
        in_videos = self.spec.image_keys if self.spec.images is Images.video else []
        kinds = dict.fromkeys(PLACES, Kind.whole)
        kinds |= {f"videos/{key}/{name}": Kind.whole for key in in_videos for name in ("chunk_index", "file_index")}
        kinds |= {f"videos/{key}/from_timestamp": Kind.number for key in in_videos}
        counts: list[int] = []
        for path in paths:
            counts.append(storage.check_table(self._own(path), kinds))
            if sum(counts) > self.info.episodes:
                break
        self._check_total("episodes", sum(counts), self.info.episodes)
        tables = [storage.read_table(path, kinds, count) for path, count in zip(paths, counts, strict=True)]
        columns = {name: np.concatenate([table[name].ravel() for table in tables]) for name in kinds}
        if wrong := [name for name, values in columns.items() if len(values) != sum(counts)]:
            raise DatasetError(f"column {wrong[0]!r} in {paths[0].parent} does not hold one number in every row", ANEW)
        order = np.argsort(columns["episode_index"], kind="stable")
        columns = {name: values[order] for name, values in columns.items()}
        self._check_positions(columns)
        return columns

    def _check_total(self, what: str, found: int, said: int) -> None:
        if found != said:
            raise DatasetError(
                f"{self.folder} lists {found} {what}, but meta/info.json says {said}: the dataset is incomplete", ANEW
            )

    def _check_positions(self, columns: Mapping[str, NDArray[Any]]) -> None:
        lengths, first, last = (columns[name] for name in ("length", "dataset_from_index", "dataset_to_index"))
        numbers = np.arange(len(lengths))
        if wrong := np.flatnonzero(columns["episode_index"] != numbers).tolist():
            raise DatasetError(f"{self.folder} lists no episode {wrong[0]}, or lists one twice", ANEW)
        if wrong := np.flatnonzero((lengths < 1) | (lengths > self.info.frames)).tolist():
            raise DatasetError(f"episode {wrong[0]} of {self.folder} has length {lengths[wrong[0]]}", ANEW)
        self._check_total("frames", sum(lengths.tolist()), self.info.frames)
        ends = np.cumsum(lengths)
        if wrong := np.flatnonzero((first != ends - lengths) | (last != ends)).tolist():
            number = wrong[0]
            before = ends[number] - lengths[number]
            raise DatasetError(
                f"episode {number} of {self.folder} has length {lengths[number]} and follows {before} frames, but lies "
                f"at {first[number]} .. {last[number]}",
                ANEW,
            )

    def _numbered(self, template: str, row: Mapping[str, Any], prefix: str, **fields: str) -> Path:
        """Return the path of a file whose numbers an episode names."""
        numbers = {name: int(row[f"{prefix}/{name}"]) for name in ("chunk_index", "file_index")}
        if not all(0 <= each < MOST_FILES for each in numbers.values()):
            raise DatasetError(
                f"episode {row['episode_index']} of {self.folder} names chunk {numbers['chunk_index']}, file "
                f"{numbers['file_index']}, which are no numbers of files",
                ANEW,
            )
        return self.folder / template.format(**numbers, **fields)

    def _video_of(self, row: Mapping[str, Any], key: str, length: int, shown: dict[Path, int]) -> tuple[Path, int]:
        """Return the video of an episode, and its first image there: it follows the episodes before, of which `shown`
        has the sums of lengths."""
        path = self._numbered(self.info.video_path, row, f"videos/{key}", video_key=key)
        first = shown.get(path, 0)
        shown[path] = first + length
        start = float(row[f"videos/{key}/from_timestamp"])
        if not abs(start * self.spec.fps - first) <= image_files.DRIFT:
            raise DatasetError(
                f"episode {row['episode_index']} of {self.folder} begins at {start:.4g} s of {path} by its "
                f"from_timestamp, but the episodes before it in that file have {first} images, which take "
                f"{first / self.spec.fps:.4g} s",
                ANEW,
            )
        return path, first

    def _check_files(self) -> None:
        """Check what all files say of themselves, without reading rows or images."""
        for path in dict.fromkeys(where.path for where in self.episodes):
            storage.check_table(self._own(path), self._columns | self._in_tables)
        for path in dict.fromkeys(path for where in self.episodes for path, _ in where.videos.values()):
            image_files.check_video(self._own(path), self.spec.image_size)
        if self.spec.ends:
            storage.check_table(self._own(self.folder / ENDS), self._end_columns(self.spec.image_keys))

    def _own(self, path: Path) -> Path:
        """Return the path of a file after checking that it is one of the dataset's own; see `regular_file`."""
        return regular_file(self.folder, path.relative_to(self.folder))
