"""Files that are whole or not there: written beside their place, synced, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write a file to, which takes its place when the block ends without an exception. Whoever
    looks meanwhile finds the old file, or none; a process that is killed leaves a `.tmp`, no half of a file."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file, in place of one that may be there."""
    with replacing(path) as temporary:
        temporary.write_text(text)
