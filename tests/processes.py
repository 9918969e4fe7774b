"""What tests ask about processes by their ids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def living(pids: Iterable[int]) -> list[psutil.Process]:
    """Return those of some processes that have not ended; one that only waits for its parent to reap it has.

    A process may end between any two questions about it, so that `psutil.pid_exists` beforehand does not help.
    """
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
