"""A lock for workers that start together, around steps that must not run in several processes at once.

Graphics drivers deadlock silently when many processes initialise them at the same moment. The launcher passes the same
nameless file to all workers; the lock is a record lock on it, which the kernel releases however its holder ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import time
from collections.abc import Iterator

_FLOCK = "hhqqi"  # struct flock: type, whence, start, length, pid
_POLL_S = 0.02
_PATIENCE_S = 3.0
"""Time after which a waiting worker logs who holds the lock, since it may soon be killed for being late [s]."""

_file: int | None = None


def make_startup_lock() -> int:
    """Create the lock's file; the caller owns the descriptor."""
    return os.memfd_create("embodyrl-startup-lock", os.MFD_CLOEXEC)


def use_startup_lock(fd: int) -> None:
    """Use the lock of this file; this process owns the descriptor from now on."""
    global _file
    _file = fd


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Hold the lock for the length of a block; outside of workers there is none, and the block just runs.

    It has no deadline: waiting counts towards the call that the parent waits for.

    Args:
        what: name of the step for the log, such as `initialise OpenGL`.
    """
    if _file is None:
        yield
        return
    _take_turn(_file, what)
    try:
        yield
    finally:
        fcntl.lockf(_file, fcntl.LOCK_UN)


def _take_turn(fd: int, what: str) -> None:
    complain_at = time.monotonic() + _PATIENCE_S
    while not _try_lock(fd):
        if time.monotonic() > complain_at:
            print(f"waiting for process {_holder(fd)} to {what}, then it is this process's turn", file=sys.stderr)
            complain_at = float("inf")
        time.sleep(_POLL_S)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _holder(fd: int) -> int:
    """Return the id of the process that holds the lock; 0 if it has just ended."""
    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    return int(struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, question)[: len(question)])[4])
