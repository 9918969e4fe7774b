"""Tables of a dataset, as Parquet files. The only module that uses pyarrow.

What others wrote is read as what the type of its column says, after that type and the size were checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.data.files import MIB, shown
from embodyrl.data.layout import ANEW, DatasetError
from embodyrl.errors import MissingPackageError

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
except ModuleNotFoundError as error:
    raise MissingPackageError(
        "demonstrations are kept in Parquet files, which need pyarrow: pip install 'embodyrl[data]'"
    ) from error

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""Type of an image in a table."""

KEPT_GROUPS = 4
"""Row groups that stay in memory: neighbouring episodes may share one."""
LARGEST_GROUP = 512 * MIB
"""Most memory of a row group's columns that are read [bytes]: files are read in such pieces."""
LONGEST_TEXT = 10_000
"""Most characters of a task description."""


class Kind(StrEnum):
    """Contents of a column that is read, in words."""

    number = "numbers"
    whole = "whole numbers"
    flag = "true or false"
    text = "texts"
    image = "images"


def column(values: Any) -> pa.Array:
    """Return a column of numbers `[T]`, or of lists of fixed length for `[T, n]` (numbers if n is 1)."""
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] > 1:
        return pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])
    return pa.array(array.reshape(len(array)))


def image_column(files: Sequence[bytes]) -> pa.Array:
    """Return a column of images, given as PNG files."""
    return pa.array([{"bytes": file, "path": None} for file in files], IMAGE)


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


def read_tasks(path: Path, count: int) -> list[str]:
    """Read the task descriptions by number; the name of their column differs between datasets.

    Args:
        path: the file.
        count: their number by `meta/info.json`.

    Raises:
        DatasetError: the file is damaged, or has other contents.
    """
    schema = _open(path).schema_arrow
    name = next((each.name for each in schema if _fits(each.type, Kind.text)), None)
    if name is None or "task_index" not in schema.names:
        raise DatasetError(
            f"{path} has columns {', '.join(map(shown, schema.names))}; expected a text and task_index", ANEW
        )
    table = read_table(path, {"task_index": Kind.whole, name: Kind.text}, count)
    found = dict(zip(table["task_index"].tolist(), table[name], strict=True))
    if sorted(found) != list(range(count)):
        raise DatasetError(f"{path} numbers its tasks {shown(sorted(found))}; expected 0 .. {count - 1}", ANEW)
    return [found[number] for number in range(count)]


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


Columns = Mapping[str, Kind]
"""Names of columns, and what each holds."""


def read_table(path: Path, columns: Columns, count: int) -> dict[str, Any]:
    """Read a whole file.

    Args:
        path: the file.
        columns: columns that are read.
        count: number of rows that it must have.

    Returns:
        The columns: arrays `[T]` or `[T, n]`, and lists of texts or images.

    Raises:
        DatasetError: the file is missing or damaged, or lacks a column, or one has another type.
    """
    rows = check_table(path, columns)
    if rows != count:
        raise DatasetError(f"{path} has {rows} rows, expected {count}", ANEW)
    return read_rows(path, 0, count, columns)


def check_table(path: Path, columns: Columns) -> int:
    """Return the number of rows of a file, without reading any.

    Raises:
        DatasetError: see `read_table`; or a row group is too large.
    """
    changed = _changed(path)
    metadata = _metadata(path, changed)
    _check_columns(path, _open(path, metadata).schema_arrow, columns)
    for number in range(metadata.num_row_groups):
        _check_size(path, metadata, number, columns)
    return int(_bounds(path, changed)[-1])


def _check_size(path: Path, metadata: pq.FileMetaData, number: int, columns: Columns) -> None:
    """Raise `DatasetError` if columns of a row group are too large. Texts and images are in memory once, however often
    they are repeated."""
    group, size = metadata.row_group(number), 0
    for column in map(group.column, range(group.num_columns)):
        if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in columns):
            size += max(column.num_values, group.num_rows) * 8
            size += column.total_uncompressed_size if column.physical_type == "BYTE_ARRAY" else 0
    if size > LARGEST_GROUP:
        raise DatasetError(
            f"row group {number} of {path} takes {size / MIB:,.0f} MiB, and at most {LARGEST_GROUP // MIB} are read",
            "write the file again with smaller row groups",
        )


def read_rows(path: Path, start: int, stop: int, columns: Columns, what: str = "") -> dict[str, Any]:
    """Read rows start .. stop-1 of a file; only the row groups that contain them are read.

    Args:
        path: the file.
        start: the first row.
        stop: the last row, plus 1.
        columns: columns that are read.
        what: name of these rows in messages.

    Returns:
        See `read_table`.

    Raises:
        DatasetError: see `read_table`; or the file is too short.
    """
    changed = _changed(path)
    bounds = _bounds(path, changed)
    if stop > bounds[-1]:
        raise DatasetError(
            f"{path} has {bounds[-1]} rows, but an episode is said to end at {stop}: it is incomplete", ANEW
        )
    first = int(np.searchsorted(bounds, start, "right")) - 1
    last = int(np.searchsorted(bounds, stop, "left"))
    pieces = [_piece(path, changed, number, tuple(columns.items())) for number in range(first, last)]
    offset, found = start - int(bounds[first]), {}
    for name, kind in columns.items():
        joined = pa.chunked_array([chunk for piece in pieces for chunk in piece[name].chunks])
        try:
            found[name] = _values(joined.slice(offset, stop - start), kind)
        except _CellError as error:
            where = what or f"rows {start} .. {stop - 1}"
            raise DatasetError(f"column {name!r} in {path} cannot be used: {error} in {where}", ANEW) from error
    return found


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _open(path: Path, metadata: pq.FileMetaData | None = None, texts: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a file; columns in `texts` are read as dictionaries."""
    try:
        file = pq.ParquetFile(path, metadata=metadata, read_dictionary=list(texts))
        file.schema_arrow.names  # noqa: B018  (decodes them)
        return file
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing: the dataset is incomplete", ANEW) from error
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DatasetError:
    why = " ".join(str(error).split())  # in one line
    return DatasetError(f"{path} is damaged ({why})", ANEW)


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
def _piece(path: Path, changed: int, number: int, columns: tuple[tuple[str, Kind], ...]) -> dict[str, pa.ChunkedArray]:
    """Return columns of a row group. Texts and images are read as dictionaries, so that what is repeated in a file is
    in memory once."""
    metadata = _metadata(path, changed)
    _check_size(path, metadata, number, dict(columns))
    texts = [name for name, kind in columns if kind is Kind.text]
    texts += [f"{name}.{part}" for name, kind in columns if kind is Kind.image for part in ("bytes", "path")]
    file = _open(path, metadata, texts)
    _check_columns(path, file.schema_arrow, dict(columns))
    try:
        table = file.read_row_group(number, columns=[name for name, _ in columns])
        return {name: table[name] for name, _ in columns}
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from error


# ---------------------------------------------------------------------------------------------------------- cells


def _check_columns(path: Path, schema: pa.Schema, columns: Columns) -> None:
    missing = [name for name in columns if schema.names.count(name) != 1]
    if missing:
        known = ", ".join(map(shown, schema.names))
        raise DatasetError(f"{path} has no column {', '.join(map(repr, missing))} (there are: {known})", ANEW)
    for name, kind in columns.items():
        if not _fits(schema.field(name).type, kind):
            raise DatasetError(
                f"column {name!r} in {path} holds {shown(str(schema.field(name).type))}, expected {kind.value}", ANEW
            )


def _fits(type_: pa.DataType, kind: Kind) -> bool:
    """Return whether a column of a type can hold such contents."""
    types = pa.types
    if kind is Kind.image:
        parts = {each.name: each.type for each in type_} if types.is_struct(type_) else {}
        return {"bytes", "path"} <= parts.keys() and all(  # one of them may be empty in all rows
            holds(parts[name]) or types.is_null(parts[name])
            for name, holds in (("bytes", _is_binary), ("path", _is_text))
        )
    if kind is Kind.text:
        return _is_text(type_)
    if kind is Kind.whole:
        return bool(types.is_integer(type_))
    if _is_list(type_):
        type_ = type_.value_type
    if kind is Kind.flag and types.is_boolean(type_):
        return True
    return bool(types.is_integer(type_) or types.is_floating(type_))


def _is_list(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def _plain(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _is_text(type_: pa.DataType) -> bool:
    types, type_ = pa.types, _plain(type_)
    return bool(types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_))


def _is_binary(type_: pa.DataType) -> bool:
    types, type_ = pa.types, _plain(type_)
    return bool(types.is_binary(type_) or types.is_large_binary(type_) or types.is_binary_view(type_))


class _CellError(ValueError):
    """Raised when a cell does not hold what its column should; the text says why."""


def _values(array: pa.ChunkedArray, kind: Kind) -> Any:
    """Return the contents of a column: an array, or a list of texts or of images."""
    if kind is Kind.image:
        return ImageCells(array)
    if array.null_count:
        raise _CellError("a cell is empty")
    if kind is Kind.text:
        return _texts(array)
    found = _numbers(array)
    if kind is Kind.flag and found.dtype != np.bool_:
        if not np.isin(found, (0, 1)).all():
            raise _CellError(f"{found[~np.isin(found, (0, 1))][0].item()} is neither true nor false")
        return found.astype(np.bool_)
    return found.astype(np.int64) if kind is Kind.whole else found


def _numbers(array: pa.ChunkedArray) -> NDArray[Any]:
    """Return the numbers `[T]` or `[T, n]` of a column; the inverse of `column`."""
    joined = array.combine_chunks()
    if not len(joined):
        return np.zeros(0)
    if not _is_list(joined.type):
        return np.asarray(joined.to_numpy(zero_copy_only=False))
    flat, lengths = joined.flatten(), pc.list_value_length(joined).unique()
    if flat.null_count:
        raise _CellError("a number is missing")
    if len(lengths) > 1:
        raise _CellError("cells have different numbers of numbers")
    values: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    return values.reshape(len(joined), -1)


def _texts(array: pa.ChunkedArray) -> list[str]:
    """Return texts that all differ."""
    if len(array.unique()) < len(array):
        raise _CellError("a text occurs twice")
    try:
        texts: list[str] = array.to_pylist()
    except UnicodeDecodeError as error:
        raise _CellError(f"a text is none ({error})") from error
    if longest := [each for each in texts if len(each) > LONGEST_TEXT]:
        raise _CellError(f"a text has {len(longest[0]):,} characters, at most {LONGEST_TEXT:,} are read")
    return texts


class ImageCells:
    """Images of a column, each read when it is asked for.

    Args:
        array: the column, of bytes and paths.
    """

    def __init__(self, array: pa.ChunkedArray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, row: int) -> tuple[bytes | None, str | None]:
        """Return the contents of a file, if they are in the table; otherwise its path, if that is.

        Raises:
            UnicodeDecodeError: the path is no text.
        """
        cell = self._array[row]
        if not cell.is_valid:
            return None, None
        data = cell["bytes"].as_py()
        return data, None if data is not None else cell["path"].as_py()
