"""Atomic writes of files: written beside their place, synced, then renamed. And folders that others made."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Self, TypeGuard


class Closing:
    """Base of what a `with` block closes at its end, whether an exception ends it or not."""

    def close(self) -> None:
        """Release what is held."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_inside(name: str) -> bool:
    """Return whether a name that somebody else gives is that of a file in a folder: relative, and without a way out."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == name


def files_in(folder: Path) -> list[Path]:
    """Return every file below a folder; links are no files, and are not followed."""
    return [path for path in entries_in(folder) if is_file(path)]


def entries_in(folder: Path) -> list[Path]:
    """Return all entries below a folder except folders, without following links."""
    found = [Path(base) / name for base, folders, names in os.walk(folder) for name in (*folders, *names)]
    return sorted(path for path in found if not stat.S_ISDIR(path.lstat().st_mode))


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file and no link."""
    return stat.S_ISREG(path.lstat().st_mode)


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically, replacing an existing one."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def why_no_place(path: Path) -> str | None:
    """Return why nothing can be made at a path that is free, as in `/etc is not writable`; None if something can."""
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        return f"{above} is a file"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"{above} is not writable"
    try:  # a file system may refuse whatever its permissions say, as /proc does
        os.rmdir(tempfile.mkdtemp(prefix=".embodyrl-", dir=above))
    except OSError as error:
        return f"{above} takes no folder ({error.strerror})"
    return None


MOST_ENTRIES = 20_000
"""Entries of a folder made by others that are read."""


LONGEST_NAME = 255
"""Most bytes of the name of a file."""
NO_FOREIGN_ENTRIES = "put the file itself there if it is yours; else take another checkpoint"
"""What to do about an entry that `foreign_entry` describes."""


def own_folders(folder: Path) -> list[Path]:
    """Return the folders that the files of a folder made by others may be in: itself, and for a snapshot in the hub's
    cache that of the contents, to which its files are links."""
    own = folder.resolve()
    return [own, own.parents[1] / "blobs"] if own.parent.name == "snapshots" else [own]


def foreign_entry(folder: Path) -> str | None:
    """Return a description of the first entry of a folder that is no regular file or folder below it, because such a
    link or pipe is not to be read or copied; None if there is none.

    Links within the folder are allowed, and those of a snapshot in the hub's cache to the `blobs` beside it.
    """
    root, allowed, count = folder.resolve(), own_folders(folder), 0
    for base, folders, names in os.walk(root):
        for path in (Path(base, name) for name in (*folders, *names)):
            count += 1
            if count > MOST_ENTRIES:
                return f"{folder} holds more than {MOST_ENTRIES} files"
            if (fault := _foreign(path, allowed)) is not None:
                return f"{folder / path.relative_to(root)} {fault}"
    return None


def _foreign(path: Path, allowed: list[Path]) -> str | None:
    """Return why a path is no regular file or folder below the allowed folders; None if it is one, or leads nowhere."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            target = Path(os.path.realpath(path))
            if not any(target.is_relative_to(each) for each in allowed):
                return f"is a link to {str(path.readlink())!r}, outside of the folder"
            if not target.exists():
                return None
            mode = target.stat().st_mode
    except OSError as error:  # what may not be looked at, or went away meanwhile
        return f"cannot be looked at ({error.strerror})"
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "is neither a file nor a folder"


def is_plain_name(name: object) -> TypeGuard[str]:
    """Return whether something is the name of a file directly in a folder, without a path."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & {"/", "\\", "\0"}:
        return False
    return len(name.encode(errors="replace")) <= LONGEST_NAME


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
