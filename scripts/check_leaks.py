"""Report processes, shared memory and temporary files that finished commands left behind.

    python scripts/check_leaks.py --mark TEXT --shm-before "NAMES" --temporary DIR

`TEXT` is the value of EMBODYRL_CI_MARK that those commands inherited. Nothing is killed or deleted, only reported.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import psutil

PATIENCE_S = 10.0
"""Time that processes have to end [s]."""
OUR_SHARED_MEMORY = ("psm_", "embodyrl", "sem.mp-", "torch_")
OUR_TEMPORARY_FILES = ("embodyrl", "psm_")


def processes(mark: str) -> list[str]:
    """Return the processes with the mark in their environment, except this one and its ancestors."""
    kin = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if process.pid not in kin and process.environ().get("EMBODYRL_CI_MARK") == mark:
                found.append(f"process {process.pid}: {' '.join(process.info['cmdline'] or [])[:150]}")
        except psutil.Error:
            continue
    return found


def shared_memory(before: set[str]) -> list[str]:
    """Return new entries of /dev/shm with the name prefixes of this project."""
    folder = Path("/dev/shm")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return [f"/dev/shm/{name}" for name in sorted(names - before) if name.startswith(OUR_SHARED_MEMORY)]


def temporary_files(folder: Path) -> list[str]:
    """Return entries of the temporary folder with the name prefixes of this project."""
    return [str(path) for path in sorted(folder.iterdir()) if path.name.startswith(OUR_TEMPORARY_FILES)]


def main() -> int:
    """Read the command line and report."""
    parser = argparse.ArgumentParser(description="Report what finished commands left behind.")
    parser.add_argument("--mark", required=True)
    parser.add_argument("--shm-before", default="", help="names in /dev/shm before the commands, separated by space")
    parser.add_argument("--temporary", type=Path, required=True)
    arguments = parser.parse_args()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        left = processes(arguments.mark) + shared_memory(set(arguments.shm_before.split()))
        left += temporary_files(arguments.temporary)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    for each in left:
        print(f"left behind: {each}", file=sys.stderr)
    print("nothing left behind" if not left else f"{len(left)} left behind")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
