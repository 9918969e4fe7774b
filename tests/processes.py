"""What tests ask about processes by their ids."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

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


def stop(pid: int) -> None:
    """Stop a process with SIGSTOP, and wait until all of its threads have stopped: on a busy machine one may still
    answer until another is given a CPU to see the signal."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10.0
    while any(state_of(task) not in "Tt" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.005)


def state_of(task: Path) -> str:
    """Return the state of a thread as the kernel writes it, `T` if it is stopped."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
