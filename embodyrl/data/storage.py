"""Files of a dataset: Parquet tables, and images as PNG in a table or as lossless H.264 in an MP4. Images are read back
bit for bit. The only module that uses pyarrow and FFmpeg.

Videos are stored as RGB, which every FFmpeg decodes, but browsers do not.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from embodyrl.data.layout import ANEW, DatasetError
from embodyrl.errors import MissingPackageError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError as error:
    raise MissingPackageError(
        "demonstrations are kept in Parquet files, which need pyarrow: pip install 'embodyrl[data]'"
    ) from error

# --------------------------------------------------------------------------------------------------------------- tables

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""Type of an image in a table."""

KEPT_GROUPS = 4
"""Row groups that stay in memory: neighbouring episodes may share one."""


def column(values: Any) -> pa.Array:
    """Return a column of numbers `[T]`, or of lists of fixed length for `[T, n]` (numbers if n is 1)."""
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] > 1:
        return pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])
    return pa.array(array.reshape(len(array)))


def image_column(files: Sequence[bytes]) -> pa.Array:
    """Return a column of images, given as PNG files."""
    return pa.array([{"bytes": file, "path": None} for file in files], IMAGE)


def numbers(array: pa.ChunkedArray) -> NDArray[Any]:
    """Return the numbers `[T]` or `[T, n]` of a column; the inverse of `column`."""
    array = array.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no chunks
        return np.zeros(0)
    if pa.types.is_fixed_size_list(array.type) or pa.types.is_list(array.type):
        flat: NDArray[Any] = array.flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(len(array), -1)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def write_tasks(path: Path, task_descriptions: Sequence[str]) -> None:
    """Write the task descriptions by number, as the index of a pandas table."""
    table = pa.table(
        {"task_index": pa.array(range(len(task_descriptions)), pa.int64()), "task": pa.array(task_descriptions)}
    )
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    described = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(described)}), path)


def read_tasks(path: Path) -> list[str]:
    """Read the task descriptions by number; the name of their column differs between datasets."""
    table = read_table(path)
    task_descriptions = next(
        (name for name in table.column_names if pa.types.is_string(table.schema.field(name).type)), None
    )
    if task_descriptions is None or "task_index" not in table.column_names:
        raise DatasetError(f"{path} has columns {', '.join(table.column_names)}; expected task and task_index", ANEW)
    found = dict(zip(table["task_index"].to_pylist(), table[task_descriptions].to_pylist(), strict=True))
    if sorted(found) != list(range(len(found))):
        raise DatasetError(f"{path} numbers its tasks {sorted(found)}; expected 0 .. {len(found) - 1}", ANEW)
    return [found[number] for number in range(len(found))]


class TableWriter:
    """Writes a Parquet file table by table; each table becomes a row group that can be read separately."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer: pq.ParquetWriter | None = None

    def add(self, columns: Mapping[str, pa.Array]) -> None:
        """Append rows."""
        table = pa.table(dict(columns))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.path, table.schema, compression="snappy")
        self._writer.write_table(table)

    @property
    def size_mb(self) -> float:
        """Size of the file so far [MB]."""
        return self.path.stat().st_size / 2**20 if self.path.exists() else 0.0

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a whole file.

    Raises:
        DatasetError: the file is missing or damaged, or lacks a column.
    """
    file = _open(path)
    _check_columns(path, file, columns or ())
    try:
        return file.read(columns=None if columns is None else list(columns))
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from error


def read_rows(path: Path, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
    """Read rows start .. stop-1 of a file; only the row groups that contain them are read.

    Raises:
        DatasetError: see `read_table`; or the file is too short.
    """
    changed = path.stat().st_mtime_ns if path.exists() else 0
    bounds = _bounds(path, changed)
    if stop > bounds[-1]:
        raise DatasetError(
            f"{path} has {bounds[-1]} rows, but an episode is said to end at {stop}: it is incomplete", ANEW
        )
    first = int(np.searchsorted(bounds, start, "right")) - 1
    last = int(np.searchsorted(bounds, stop, "left"))
    pieces = [_piece(path, changed, number, tuple(columns)) for number in range(first, last)]
    return pa.concat_tables(pieces).slice(start - int(bounds[first]), stop - start)


def _open(path: Path, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, metadata=metadata)
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing: the dataset is incomplete", ANEW) from error
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DatasetError:
    why = " ".join(str(error).split())  # in one line
    return DatasetError(f"{path} is damaged ({why})", ANEW)


def _check_columns(path: Path, file: pq.ParquetFile, columns: Sequence[str]) -> None:
    known = file.schema_arrow.names
    missing = [name for name in columns if name not in known]
    if missing:
        raise DatasetError(
            f"{path} has no column {', '.join(map(repr, missing))} (there are: {', '.join(known)})", ANEW
        )


@lru_cache(maxsize=64)
def _metadata(path: Path, changed: int) -> pq.FileMetaData:
    """Return what a file says of its row groups, which takes longer to read than one of them."""
    return _open(path).metadata


@lru_cache(maxsize=4096)
def _bounds(path: Path, changed: int) -> NDArray[np.int64]:
    """Return the first rows of a file's row groups, followed by its number of rows."""
    metadata = _metadata(path, changed)
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@lru_cache(maxsize=KEPT_GROUPS)
def _piece(path: Path, changed: int, number: int, columns: tuple[str, ...]) -> pa.Table:
    file = _open(path, _metadata(path, changed))
    _check_columns(path, file, columns)
    try:
        return file.read_row_group(number, columns=list(columns))
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from error


# --------------------------------------------------------------------------------------------------------------- images

KEY_FRAME_EVERY = 12
"""Frames from one key frame to the next."""


def to_png(image: NDArray[np.uint8]) -> bytes:
    """Encode an image `[H, W, 3]` as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=3)
    return buffer.getvalue()


def from_png(data: bytes) -> NDArray[np.uint8]:
    """Decode a PNG or JPEG file to an image `[H, W, 3]`."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


class VideoWriter:
    """Writes an MP4 episode by episode.

    Args:
        path: path of the file.
        fps: images per second.
        size: `(H, W)` [pixels].
    """

    def __init__(self, path: Path, *, fps: int, size: tuple[int, int]) -> None:
        self.path = path
        self.frames = 0
        self._bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w")
        self._stream = self._container.add_stream("libx264rgb", rate=fps)
        self._stream.height, self._stream.width = size
        self._stream.pix_fmt = "rgb24"
        self._stream.options = {"qp": "0", "preset": "veryfast", "bf": "0", "g": str(KEY_FRAME_EVERY)}

    def add(self, images: NDArray[np.uint8]) -> None:
        """Append images `[T, H, W, 3]`."""
        for image in images:
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = self.frames
            self._mux(self._stream.encode(frame))
            self.frames += 1

    @property
    def size_mb(self) -> float:
        """Compressed size so far [MB], without the last few images that are still in the encoder."""
        return self._bytes / 2**20

    def _mux(self, packets: list[av.Packet[Any]]) -> None:
        self._container.mux(packets)
        self._bytes += sum(packet.size for packet in packets)

    def close(self) -> None:
        """Finish the file."""
        self._mux(self._stream.encode(None))
        self._container.close()


def read_video(path: Path, start_s: float, count: int, fps: int) -> NDArray[np.uint8]:
    """Read consecutive images of a video.

    Args:
        path: an MP4 file.
        start_s: time of the first image [s].
        count: `T`, number of images.
        fps: images per second.

    Returns:
        `[T, H, W, 3]`

    Raises:
        DatasetError: the video cannot be read, or is too short.
    """
    images: list[NDArray[np.uint8]] = []
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            container.seek(int(start_s * av.time_base))  # to a key frame before it
            for frame in container.decode(stream):
                if frame.time < start_s - 0.5 / fps:
                    continue
                images.append(np.asarray(frame.to_ndarray(format="rgb24"), np.uint8))
                if len(images) == count:
                    break
    except (OSError, av.FFmpegError) as error:
        raise DatasetError(f"{path} cannot be read ({error})", ANEW) from error
    if len(images) < count:
        raise DatasetError(
            f"{path} ends {count - len(images)} images before the episode at {start_s:.2f} s does: the dataset is "
            "incomplete",
            ANEW,
        )
    return np.stack(images)
