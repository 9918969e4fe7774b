"""Memory and files of a process, lent to processes of other machines, which read from them over lines.

What is written meanwhile is not locked: whoever lends sees to it that what others read stays as it is.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.files import Closing, files_in, is_inside, replacing, require_room
from embodyrl.placement.transport.line import Address, LineError, Listener, Service, connect, understood

_PIECE = 64 << 20
"""Bytes of a file that are asked for at once."""
_PATIENCE_S = 600.0
"""Longest time for a client to take what it has asked for [s]; one whose machine is gone is noticed much earlier."""


@dataclass(frozen=True)
class RemoteMemory:
    """Memory or a file that a process lends; plain data that may be given to others."""

    line: Address
    number: int
    size: int
    """[bytes]"""

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> RemoteMemory:
        """Return what `dataclasses.asdict` made plain.

        Raises:
            LineError: that is something else.
        """
        with understood("what is lent"):
            number, size = fields["number"], fields["size"]
            if type(number) is not int or type(size) is not int or size < 0:
                raise ValueError(f"number {number!r} of size {size!r}")
            return cls(line=Address(**fields["line"]), number=number, size=size)


@dataclass(frozen=True)
class RemoteFolder:
    """Files that a process lends."""

    line: Address
    files: Mapping[str, RemoteMemory]
    """By their paths in the folder."""

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> RemoteFolder:
        """Return what `dataclasses.asdict` made plain.

        Raises:
            LineError: that is something else.
        """
        with understood("the folder that is lent"):
            files = {str(name): RemoteMemory.from_plain(each) for name, each in fields["files"].items()}
            return cls(line=Address(**fields["line"]), files=files)


class MemoryServer(Closing):
    """Lends memory and files of this process to whoever has been given their `RemoteMemory`."""

    def __init__(self, host: str) -> None:
        self._lent: dict[int, mmap.mmap | bytes] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._service = Service(Listener(host), self._answer, timeout_s=_PATIENCE_S)

    def lend(self, fd: int) -> RemoteMemory:
        """Lend all that a file descriptor of memory or of a file holds now, until `withdraw`."""
        size = os.fstat(fd).st_size
        content = mmap.mmap(fd, size, access=mmap.ACCESS_READ) if size else b""  # nothing cannot be mapped
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._lent[number] = content
        return RemoteMemory(self._service.address, number, size)

    def lend_file(self, path: Path) -> RemoteMemory:
        """Lend what a file holds now; a link is refused."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return self.lend(fd)
        finally:
            os.close(fd)

    def withdraw(self, lent: RemoteMemory) -> None:
        """Lend something no more. Whoever is reading it may finish."""
        with self._lock:
            self._lent.pop(lent.number, None)

    @contextmanager
    def folder(self, folder: Path) -> Iterator[RemoteFolder]:
        """Lend the files of a folder, which do not change, for the length of a block. Links are left out: they may lead
        anywhere."""
        files: dict[str, RemoteMemory] = {}
        try:
            for path in files_in(folder):
                files[str(path.relative_to(folder))] = self.lend_file(path)
            yield RemoteFolder(self._service.address, files)
        finally:
            for lent in files.values():
                self.withdraw(lent)

    def _answer(self, wanted: Mapping[str, Any], _: Sequence[memoryview]) -> tuple[dict[str, Any], list[memoryview]]:
        """Return parts of something that is lent."""
        with understood("the request"), self._lock:
            content = self._lent.get(wanted["number"])
        if content is None:
            raise LookupError("that is not lent any more")
        view = memoryview(content)
        with understood("the request"):
            return {}, [view[start : start + length] for start, length in wanted["parts"]]

    def close(self) -> None:
        """Lend nothing any more. May be called again."""
        self._service.close()
        self._lent.clear()


class MemoryClient(Closing):
    """A line to a process that lends.

    Args:
        line: `RemoteMemory.line`.
        timeout_s: longest time for it to answer, and between two pieces of its answer [s].
    """

    def __init__(self, line: Address, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._line = connect(line, timeout_s)

    def read(self, lent: RemoteMemory, starts: Sequence[int], rooms: Sequence[memoryview]) -> None:
        """Read parts of something that is lent.

        Args:
            lent: of this line.
            starts: where each part begins.
            rooms: writable bytes, as many for each part as are wanted of it.

        Raises:
            LineError: the process that lends it is gone, hangs, or lends it no more.
        """
        parts = [[start, room.nbytes] for start, room in zip(starts, rooms, strict=True)]
        wanted = {"number": lent.number, "parts": parts}
        self._line.ask(wanted, timeout_s=self._timeout_s, room=lambda header, sizes: rooms)

    def close(self) -> None:
        """Close the line."""
        self._line.close()


def copy_folder(lent: RemoteFolder, folder: Path, *, timeout_s: float) -> None:
    """Copy the files of another machine's folder.

    Args:
        lent: of `MemoryServer.folder`.
        folder: for the copies; made if it does not exist.
        timeout_s: longest time for an answer [s].

    Raises:
        LineError: see `MemoryClient.read`; or a name leads out of the folder, and nothing was written.
        OSError: there is no room for them.
    """
    if odd := [name for name in lent.files if not is_inside(name) or "\0" in name]:
        raise LineError(f"{lent.line} lends files called {', '.join(map(repr, odd))}, which are no names in a folder")
    folder.mkdir(parents=True, exist_ok=True)
    require_room(folder, sum(file.size for file in lent.files.values()))
    with MemoryClient(lent.line, timeout_s=timeout_s) as client:
        for name, file in lent.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _copy(client, file, folder / name)


def copy_file(lent: RemoteMemory, path: Path, *, timeout_s: float) -> None:
    """Copy a file of another machine; see `copy_folder`."""
    with MemoryClient(lent.line, timeout_s=timeout_s) as client, replacing(path) as temporary:
        _copy(client, lent, temporary)


def _copy(client: MemoryClient, lent: RemoteMemory, path: Path) -> None:
    with path.open("wb") as out:
        for start in range(0, lent.size, _PIECE):
            piece = bytearray(min(_PIECE, lent.size - start))
            client.read(lent, [start], [memoryview(piece)])
            out.write(piece)
