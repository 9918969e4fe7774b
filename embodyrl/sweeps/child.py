"""A run's process, as a sweep starts it."""

from __future__ import annotations

import json
import os
import signal
import sys

from embodyrl.placement.child import follow_parent

BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from embodyrl.sweeps.child import take_place
take_place()
from embodyrl.cli.main import main
main()
"""
"""Code of the process: this program's module path comes as an argument."""


def command(words: list[str], cpus: tuple[int, ...]) -> list[str]:
    """Return what follows the interpreter on the command line of a run.

    Args:
        words: of `embodyrl`.
        cpus: those that it may use; empty: those of this process.
    """
    return ["-P", "-u", "-c", BOOT, json.dumps(sys.path), json.dumps([os.getpid(), *cpus]), *words]


def take_place() -> None:
    """Take the CPUs that the sweep has given this run, and have it save and end with the sweep's process, also if that
    is killed."""
    parent, *cpus = json.loads(sys.argv.pop(1))
    follow_parent(parent, signal.SIGTERM)
    if cpus:
        os.sched_setaffinity(0, cpus)
