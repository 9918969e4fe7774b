"""Atomic writes of files: written beside their place, synced, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to; the file replaces `path` when the block ends without an exception. Readers
    find the old file or the new one, never a part; a killed process leaves a `.tmp`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically, replacing an existing one."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def link_or_copy(file: Path, place: Path) -> None:
    """Let a file appear at another place, too: as a link to the same contents where the disk can have it, else as a
    copy. Nobody ever writes to it again."""
    try:
        os.link(file, place)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(file, place)


def require_room(place: Path | int, size: int) -> None:
    """Refuse to take more of a disk than it has free [bytes]; `place` is a path or an open file.

    Raises:
        OSError: there is no room.
    """
    disk = os.statvfs(place)
    if size > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def reserve(file: int, size: int) -> None:
    """Give an open file this size [bytes] and room on its disk, now: a hole that the full disk cannot fill later would
    end a process that has mapped it.

    Raises:
        OSError: there is no room. Nothing was taken, then: others who write there at that moment would miss it.
    """
    require_room(file, size)
    os.posix_fallocate(file, 0, size)
