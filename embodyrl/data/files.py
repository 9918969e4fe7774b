"""Files of a dataset that others may have written: each is a regular one of the dataset's own, and none is read that is
larger than its kind can be."""

from __future__ import annotations

import json
import os
import re
import reprlib
import stat
import string
from pathlib import Path
from typing import Any

from embodyrl.data.layout import ANEW, DatasetError
from embodyrl.files import own_folders

MIB = 2**20
LARGEST_JSON = 16 * MIB
"""Largest description [bytes]; those of published datasets have some 10 kB."""
MOST_FILES = 10**6
"""Highest number of a chunk or a file, plus 1."""

_NUMBER = re.compile(r"0?\d{0,2}d?")
"""Formats of a number in a file's name: `03d`."""


def regular_file(folder: Path, name: str | Path) -> Path:
    """Return the path of a file of a dataset, which exists and can be opened without waiting.

    Args:
        folder: the dataset.
        name: path below `folder`.

    Raises:
        DatasetError: there is no such file, it is no regular one (such as a pipe), or it is outside of the dataset.
    """
    path = folder / name
    try:
        real = Path(os.path.realpath(path))
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DatasetError(f"{path} is missing: the dataset is incomplete", ANEW) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DatasetError(f"{shown(str(path))} cannot be read ({why})", ANEW) from error
    if not any(real.is_relative_to(each) for each in own_folders(folder)):
        raise DatasetError(
            f"{path} leads to {real}, outside of the dataset", "copy the file into the dataset, or remove it"
        )
    if not stat.S_ISREG(mode):
        raise DatasetError(f"{path} is no regular file", ANEW)
    return path


def read_bytes(folder: Path, name: str | Path, most: int) -> bytes:
    """Return the contents of a file of a dataset.

    Raises:
        DatasetError: see `regular_file`; or it has more than `most` bytes, or cannot be read.
    """
    path = regular_file(folder, name)
    if path.stat().st_size > most:
        raise DatasetError(f"{path} has {path.stat().st_size / MIB:,.0f} MiB, more than {most // MIB}", ANEW)
    try:
        return path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error.strerror})", ANEW) from error


def read_json(folder: Path, name: str | Path) -> dict[str, Any]:
    """Return the contents of a JSON file with a mapping.

    Raises:
        DatasetError: see `read_bytes`; or it is damaged.
    """
    data = read_bytes(folder, name, LARGEST_JSON)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{folder / name} is damaged ({error})", ANEW) from error
    if not isinstance(content, dict):
        raise DatasetError(f"{folder / name} holds {shown(content)}, expected a mapping", ANEW)
    return content


def shown(value: object) -> str:
    """Return a value as in a message, however large it is."""
    return reprlib.repr(value)


def template_fault(template: str, fields: set[str]) -> str | None:
    """Return what is wrong with the template of file names such as `data/chunk-{chunk_index:03d}/...`; None if it is
    fine.

    Args:
        template: the text.
        fields: names that may stand in braces.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        return f"is no template ({error})"
    for _, name, form, conversion in pieces:
        if name is None:
            continue
        if name not in fields:
            return f"has the field {shown(name)}, expected {', '.join(sorted(fields))}"
        if conversion or (form and (not name.endswith("_index") or not _NUMBER.fullmatch(form))):
            return f"has the format {shown(form or conversion)} for {name}, expected one like 03d"
    return path_fault("".join(text + (name or "") for text, name, *_ in pieces))


def path_fault(path: str) -> str | None:
    """Return why a path cannot be one of a file in the dataset; None if it can."""
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts or "\\" in path or not path.isprintable():
        return "is no path inside of the dataset"
    return None
