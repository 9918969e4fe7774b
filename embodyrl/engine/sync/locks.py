"""Locks between processes on bytes of a file; the kernel releases those of a process that ends."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from embodyrl.engine.sync.errors import SyncTimeout

_FLOCK = "hhqqi4x"
_POLL_S = 0.0005


class ByteLock:
    """A lock on one byte, held by an open file (not by a process: two objects of one process exclude each other, too).

    Args:
        fd: the file, opened for this object alone.
        byte: which one.
    """

    def __init__(self, fd: int, byte: int) -> None:
        self._fd = fd
        self._byte = byte

    def try_acquire(self, *, exclusive: bool) -> bool:
        """Take it if it is free."""
        kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._flock(kind))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self) -> None:
        """Let go of it; harmless when it is not held."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._flock(fcntl.F_UNLCK))

    def held_elsewhere(self) -> bool:
        """Return whether another open file holds it."""
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, self._flock(fcntl.F_WRLCK))
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)

    @contextmanager
    def held(self, timeout_s: float, why_not: str, *, exclusive: bool) -> Iterator[None]:
        """Hold it for the length of a block.

        Raises:
            SyncTimeout: it was not free in time; the text is `why_not`.
        """
        wait_until(lambda: self.try_acquire(exclusive=exclusive), timeout_s, lambda: why_not)
        try:
            yield
        finally:
            self.release()

    def _flock(self, kind: int) -> bytes:
        return struct.pack(_FLOCK, kind, os.SEEK_SET, self._byte, 1, 0)


def wait_until(condition: Callable[[], bool], timeout_s: float, describe: Callable[[], str]) -> None:
    """Look again and again.

    Raises:
        SyncTimeout: the condition did not come true in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SyncTimeout(f"{describe()}; waited {timeout_s:g} s")
        time.sleep(_POLL_S)
