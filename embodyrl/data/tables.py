"""Parquet tables, and the one place that knows pyarrow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.data.layout import DatasetError
from embodyrl.errors import MissingPackageError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError as error:
    raise MissingPackageError(
        "demonstrations are kept in Parquet files, which need pyarrow: pip install 'embodyrl[data]'"
    ) from error

PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""A picture in a table."""

KEPT_GROUPS = 4
"""Pieces of files that stay in memory: neighbouring episodes may share one."""


def column(values: Any) -> pa.Array:
    """Numbers `[T]`, or rows of numbers `[T, n]` as lists of fixed length (a plain column if n is 1)."""
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] > 1:
        return pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])
    return pa.array(array.reshape(len(array)))


def picture_column(files: Sequence[bytes]) -> pa.Array:
    """Pictures, as PNG files."""
    return pa.array([{"bytes": file, "path": None} for file in files], PICTURE)


def numbers(array: pa.ChunkedArray) -> NDArray[Any]:
    """What `column` made a column of: `[T]`, or `[T, n]`."""
    array = array.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no chunks
        return np.zeros(0)
    if pa.types.is_fixed_size_list(array.type) or pa.types.is_list(array.type):
        flat = array.flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(len(array), -1)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def write_tasks(path: Path, sentences: Sequence[str]) -> None:
    """Write the sentences by number. They are the table's index, in the words of pandas."""
    table = pa.table({"task_index": pa.array(range(len(sentences)), pa.int64()), "task": pa.array(sentences)})
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    described = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(described)}), path)


def read_tasks(path: Path) -> list[str]:
    """The sentences by number; in some datasets their column has no name of its own."""
    table = read_table(path)
    sentences = next((name for name in table.column_names if pa.types.is_string(table.schema.field(name).type)), None)
    if sentences is None or "task_index" not in table.column_names:
        raise DatasetError(f"{path} has columns {', '.join(table.column_names)}; expected task and task_index")
    found = dict(zip(table["task_index"].to_pylist(), table[sentences].to_pylist(), strict=True))
    if sorted(found) != list(range(len(found))):
        raise DatasetError(f"{path} numbers its tasks {sorted(found)}; expected 0 .. {len(found) - 1}")
    return [found[number] for number in range(len(found))]


class TableWriter:
    """A Parquet file that grows by tables of the same columns; each is a piece that can be read by itself."""

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
    """A whole file.

    Raises:
        DatasetError: it is missing or damaged, or lacks a column.
    """
    file = _open(path)
    _check_columns(path, file, columns or ())
    return file.read(columns=None if columns is None else list(columns))


def read_rows(path: Path, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
    """Rows start .. stop-1 of a file, without reading much else.

    Raises:
        DatasetError: see `read_table`; or the file is too short.
    """
    changed = path.stat().st_mtime_ns if path.exists() else 0
    bounds = _bounds(path, changed)
    if stop > bounds[-1]:
        raise DatasetError(f"{path} has {bounds[-1]} rows, but an episode is said to end at {stop}: it is incomplete")
    first = int(np.searchsorted(bounds, start, "right")) - 1
    last = int(np.searchsorted(bounds, stop, "left"))
    pieces = [_piece(path, changed, number, tuple(columns)) for number in range(first, last)]
    return pa.concat_tables(pieces).slice(start - int(bounds[first]), stop - start)


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing: the dataset is incomplete; record or download it anew") from error
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{path} is damaged ({error}): record or download the dataset anew") from error


def _check_columns(path: Path, file: pq.ParquetFile, columns: Sequence[str]) -> None:
    known = file.schema_arrow.names
    missing = [name for name in columns if name not in known]
    if missing:
        raise DatasetError(f"{path} has no column {', '.join(map(repr, missing))} (there are: {', '.join(known)})")


@lru_cache(maxsize=4096)
def _bounds(path: Path, changed: int) -> NDArray[np.int64]:
    """Row numbers at which the pieces of a file begin, and its number of rows."""
    metadata = _open(path).metadata
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@lru_cache(maxsize=KEPT_GROUPS)
def _piece(path: Path, changed: int, number: int, columns: tuple[str, ...]) -> pa.Table:
    file = _open(path)
    _check_columns(path, file, columns)
    return file.read_row_group(number, columns=list(columns))
