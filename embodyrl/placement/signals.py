"""Signals by which people, terminals and clusters ask a program to stop, and their handling in its processes.

A terminal, GNU timeout, a batch system or a service manager signals a whole process group, a session, or every process
that it finds. Only the program's first process reacts: the others ignore such a signal, and end on its request or with
it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C; the usual one; a terminal that is closed; what clusters send some time before they take a machine back."""
STOPPED_CODES = tuple(128 + number for number in STOPPING)
"""Exit codes of a program that one of them has stopped."""


def heard() -> list[Signals]:
    """Return the signals that this process handles: not SIGHUP and SIGUSR1 if its parent had them ignored (nohup)."""
    optional = (signal.SIGHUP, signal.SIGUSR1)
    return [each for each in STOPPING if each not in optional or signal.getsignal(each) is not signal.SIG_IGN]


def leave_to_parent() -> None:
    """Ignore all of them, as every process except the first does. Programs that it starts ignore only Ctrl-C: a
    handler, unlike SIG_IGN, does not survive exec, so that a simulator can terminate a server of its own."""
    for each in heard():
        signal.signal(each, signal.SIG_IGN if each is signal.SIGINT else _do_nothing)
        signal.siginterrupt(each, False)  # native code need not know that a system call can be cut short
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def ignore_from_now_on() -> None:
    """Ignore all of them until the process has ended. An interpreter that shuts down restores the system's default for
    signals with a handler, so that one would kill it; ignored signals stay ignored."""
    for each in heard():
        signal.signal(each, signal.SIG_IGN)


@contextmanager
def kept_waiting() -> Iterator[None]:
    """Block the signals for processes that start in this block until they call `leave_to_parent`, so that none dies of
    one while its interpreter starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal that is the parent's business."""
