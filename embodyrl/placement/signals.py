"""Signals by which people, terminals and clusters ask a program to stop, and how its processes take them.

A terminal, GNU timeout, a batch system or a service manager signals a whole process group, a session, or every process
that it finds. The program's first process alone decides what follows: the others are deaf to such a signal, and end
when it tells them to, or with it.
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
"""What a program exits with after one of them."""


def heard() -> list[Signals]:
    """Those that this process listens to: not SIGHUP and SIGUSR1 where whoever started it has them ignored (nohup)."""
    optional = (signal.SIGHUP, signal.SIGUSR1)
    return [each for each in STOPPING if each not in optional or signal.getsignal(each) is not signal.SIG_IGN]


def leave_to_parent() -> None:
    """Be deaf to all of them, as every process but the first. Programs that it starts are deaf to Ctrl-C alone: a
    handler, unlike SIG_IGN, does not outlive exec, so that a simulator can terminate a server of its own."""
    for each in heard():
        signal.signal(each, signal.SIG_IGN if each is signal.SIGINT else _do_nothing)
        signal.siginterrupt(each, False)  # native code need not know that a system call can be cut short
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def ignore_from_now_on() -> None:
    """Be deaf to all of them until the process has ended. An interpreter that shuts down gives signals that have a
    handler back to the system, which would end it by one; those that are ignored stay so."""
    for each in heard():
        signal.signal(each, signal.SIG_IGN)


@contextmanager
def kept_waiting() -> Iterator[None]:
    """Processes that start in this block have the signals wait until they `leave_to_parent`, instead of dying of one
    while their interpreter starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """What a process does about a signal that its parent sees to."""
