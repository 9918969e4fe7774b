"""Workers that start together take turns at what must not happen in several processes at once.

Graphics drivers deadlock silently when many processes initialise them at the same moment. The launcher hands all of
them the same nameless file; a turn is a record lock on it, which the kernel gives back however its holder ends.
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
"""After so long a worker that waits says who has the turn, since it may well be killed for being late [s]."""

_file: int | None = None


def make_startup_lock() -> int:
    """A file for the workers to take turns with; the caller owns the descriptor."""
    return os.memfd_create("embodyrl-startup-lock", os.MFD_CLOEXEC)


def use_startup_lock(fd: int) -> None:
    """Take turns with the workers that have the same file; this process owns the descriptor from now on."""
    global _file
    _file = fd


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Do something while no worker that was started together with this one does it; outside workers, simply do it.

    There is no deadline of its own: waiting counts towards the call that the parent waits for.

    Args:
        what: for the log of a worker that waits for long, such as `initialise OpenGL`.
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
    """Id of the process that has the turn; 0 if it has just ended."""
    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    return int(struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, question)[: len(question)])[4])
