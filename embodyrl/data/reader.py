"""Read a LeRobotDataset episode by episode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.data import storage
from embodyrl.data.layout import (
    ACTION,
    ANEW,
    ENDS,
    EPISODES,
    EXECUTED,
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
    Info,
)

PLACES = ("episode_index", "length", "data/chunk_index", "data/file_index", "dataset_from_index", "dataset_to_index")


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
    videos: dict[str, tuple[Path, float]]
    """By feature: the file, and the start of the episode in it [s]."""

    @property
    def last_row(self) -> int:
        """Its last row in that table, plus 1."""
        return self.first_row + self.length


class Dataset:
    """Demonstrations on disk.

    Args:
        folder: folder of a LeRobotDataset v3.0.

    Raises:
        DatasetError: the folder contains no such dataset, or it is incomplete or inconsistent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info = Info.read(folder)
        self.tasks = storage.read_tasks(folder / TASKS)
        self.episodes = self._find_episodes()
        self._check_totals()

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
        names = [*self._columns, *(spec.image_keys if with_images and spec.images is Images.image else [])]
        table = storage.read_rows(where.path, where.first_row, where.last_row, names)
        columns = {name: self._numbers(where, table, name) for name in self._columns}
        if not (columns["episode_index"] == number).all():
            raise DatasetError(f"{where.path} holds other rows than episode {number} where it should be", ANEW)
        numbers = set(columns["task_index"].tolist())
        if len(numbers) > 1 or not numbers <= set(range(len(self.tasks))):
            raise DatasetError(
                f"episode {number} of {self.folder} has tasks {sorted(numbers)}, expected a known one", ANEW
            )
        images = self._images(where, table) if with_images and spec.cameras else None
        return Episode(
            task=self.tasks[numbers.pop()],
            actions=columns[ACTION].astype(np.float32),
            proprio=columns[STATE].astype(np.float32) if spec.state_dim else None,
            images=images,
            rewards=columns[REWARD].astype(np.float32) if spec.outcome else None,
            success=columns[SUCCESS].astype(np.bool_) if spec.outcome else None,
            perturbed=columns[PERTURBED].astype(np.bool_) if spec.perturbed else None,
            executed=columns[EXECUTED].astype(np.float32) if spec.executed else None,
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
                ACTION: episode.actions,
                STATE: episode.proprio,
                REWARD: episode.rewards,
                EXECUTED: episode.executed,
                f"{ENDS}:{STATE}": episode.last_proprio,
            }
            for name, values in columns.items():
                if values is not None and not np.isfinite(values).all():
                    found.setdefault(name, []).append(number)
        return found

    def _numbers(self, where: Where, table: Any, name: str) -> NDArray[Any]:
        """Return a column of an episode `[T]`, or `[T, n]` if it holds `n` numbers."""
        spec = self.spec
        size = {ACTION: spec.action_dim, EXECUTED: spec.action_dim, STATE: spec.state_dim}.get(name)
        try:
            return storage.numbers(table[name]).reshape(where.length, *([] if size is None else [size]))
        except ValueError as error:
            raise DatasetError(
                f"column {name!r} in {where.path} does not hold {size or 1} numbers in every frame of episode "
                f"{where.number}, as meta/info.json says",
                ANEW,
            ) from error

    def _end(self, number: int, *, with_images: bool) -> dict[str, Any]:
        """Read what followed the last action of an episode."""
        spec, path = self.spec, self.folder / ENDS
        keys = spec.image_keys if with_images else []
        row = storage.read_rows(
            path, number, number + 1, ["episode_index", TERMINATED, *([STATE] if spec.state_dim else []), *keys]
        )
        if row["episode_index"].to_pylist() != [number]:
            raise DatasetError(f"{path} holds other rows than that of episode {number} where it should be", ANEW)
        found: dict[str, Any] = {"terminated": bool(row[TERMINATED].to_pylist()[0])}
        if spec.state_dim:
            found["last_proprio"] = storage.numbers(row[STATE]).reshape(-1).astype(np.float32)
            if len(found["last_proprio"]) != spec.state_dim:
                raise DatasetError(f"{path} has no state of {spec.state_dim} numbers for episode {number}", ANEW)
        if keys:
            found["last_images"] = np.stack([storage.from_png(row[key].to_pylist()[0]["bytes"]) for key in keys])
        return found

    @cached_property
    def _columns(self) -> list[str]:
        """Numeric columns that are read."""
        spec = self.spec
        optional = {
            STATE: spec.state_dim,
            REWARD: spec.outcome,
            SUCCESS: spec.outcome,
            PERTURBED: spec.perturbed,
            EXECUTED: spec.executed,
        }
        return [ACTION, "episode_index", "task_index", *(name for name, there in optional.items() if there)]

    def _images(self, where: Where, table: Any) -> NDArray[np.uint8]:
        """Read the images of an episode `[T, V, H, W, 3]`."""
        spec = self.spec
        if spec.images is Images.video:
            shown = [storage.read_video(*where.videos[key], where.length, spec.fps) for key in spec.image_keys]
        else:
            shown = [
                np.stack([storage.from_png(cell["bytes"]) for cell in table[key].to_pylist()])
                for key in spec.image_keys
            ]
        images = np.stack(shown, 1)
        if images.shape[2:4] != spec.image_size:
            raise DatasetError(
                f"episode {where.number} of {self.folder} has images of {images.shape[2]}x{images.shape[3]} pixels, "
                f"but the dataset says {spec.image_size[0]}x{spec.image_size[1]}",
                ANEW,
            )
        return images

    def _find_episodes(self) -> list[Where]:
        """Return the positions of all episodes, by number."""
        paths = sorted((self.folder / EPISODES).glob("*/*.parquet"))
        if not paths:
            raise DatasetError(f"{self.folder / EPISODES} holds no files: the dataset is incomplete", ANEW)
        recorded = self.spec.image_keys if self.spec.images is Images.video else []
        in_videos = [
            f"videos/{key}/{name}" for key in recorded for name in ("chunk_index", "file_index", "from_timestamp")
        ]
        rows = [row for path in paths for row in storage.read_table(path, [*PLACES, *in_videos]).to_pylist()]
        rows.sort(key=lambda row: row["episode_index"])
        begin: dict[Path, int] = {}
        found = []
        for row in rows:
            path = self.folder / self.info.data_path.format(
                chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]
            )
            begin.setdefault(path, row["dataset_from_index"])
            found.append(
                Where(
                    number=row["episode_index"],
                    length=row["length"],
                    path=path,
                    first_row=row["dataset_from_index"] - begin[path],
                    videos={key: self._video_of(row, key) for key in recorded},
                )
            )
            if row["dataset_to_index"] - row["dataset_from_index"] != row["length"] or row["length"] < 1:
                raise DatasetError(
                    f"episode {row['episode_index']} of {self.folder} has length {row['length']}, but lies at "
                    f"{row['dataset_from_index']} .. {row['dataset_to_index']}",
                    ANEW,
                )
        return found

    def _video_of(self, row: dict[str, Any], key: str) -> tuple[Path, float]:
        path = self.info.video_path.format(
            video_key=key,
            chunk_index=row[f"videos/{key}/chunk_index"],
            file_index=row[f"videos/{key}/file_index"],
        )
        return self.folder / path, row[f"videos/{key}/from_timestamp"]

    def _check_totals(self) -> None:
        numbers, frames = [where.number for where in self.episodes], sum(where.length for where in self.episodes)
        if numbers != list(range(self.info.episodes)) or frames != self.info.frames:
            raise DatasetError(
                f"{self.folder} lists {len(numbers)} episodes with {frames} frames, but meta/info.json says "
                f"{self.info.episodes} with {self.info.frames}: the dataset is incomplete",
                ANEW,
            )
        if len(self.tasks) != self.info.tasks:
            raise DatasetError(
                f"{self.folder} lists {len(self.tasks)} tasks, but meta/info.json says {self.info.tasks}", ANEW
            )
        missing = sorted({str(where.path) for where in self.episodes if not where.path.is_file()})
        missing += sorted(
            {str(path) for where in self.episodes for path, _ in where.videos.values() if not path.is_file()}
        )
        if missing:
            raise DatasetError(f"{', '.join(missing)}: missing; the dataset is incomplete", ANEW)
