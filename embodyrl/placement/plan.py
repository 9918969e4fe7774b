"""Which worker processes a run needs and where they go: a pure function of the settings and of what the machine has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from embodyrl.errors import UserError

SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}
"""Environment of a simulator process: there is one process per core already, so libraries must not start threads."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What this machine lets the program use."""

    cpus: tuple[int, ...]
    """Ids of the allowed CPUs, ascending; at least one."""
    cores: int
    """How many of them can be busy at once: fewer than `cpus` where a container limits CPU time. At least 1."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One worker process."""

    role: str
    """What it does: `env`."""
    rank: int
    """Its number among the workers of its role, from 0."""
    slots: range = range(0)
    """The simulator slots it serves, as numbered in the whole run."""
    cpus: tuple[int, ...] = ()
    """CPUs it may run on; empty: those of the parent."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are set before its interpreter starts."""

    @property
    def label(self) -> str:
        """Its name in messages: `env worker 1`."""
        return f"{self.role} worker {self.rank}"


def cpu_limit(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """CPUs' worth of time that this process's control group may use, rounded up; None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else max(1, ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return None


def inventory() -> Inventory:
    """What this machine lets the program use: the CPUs this process is allowed, not those that exist."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    limit = cpu_limit()
    return Inventory(cpus=cpus, cores=len(cpus) if limit is None else min(limit, len(cpus)))


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit` (both >= 1)."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


def plan_env_workers(num_envs: int, workers: int | str, machine: Inventory) -> list[WorkerSpec]:
    """Spread `num_envs` simulator slots evenly over worker processes, in order: worker 0 serves the first slots.

    Args:
        num_envs: simulator slots, >= 1.
        workers: number of processes, or `auto` for the largest divisor of `num_envs` up to the usable cores.
        machine: what the machine has.

    Raises:
        UserError: the slots cannot be spread evenly over that many workers.
    """
    if num_envs < 1:
        raise UserError(f"num_envs must be at least 1, got {num_envs}")
    count = largest_divisor(num_envs, machine.cores) if workers == "auto" else workers
    if isinstance(count, str) or count < 1 or num_envs % count:
        near = f"{largest_divisor(num_envs, count)}" if isinstance(count, int) and count >= 1 else "auto"
        raise UserError(f"num_envs ({num_envs}) must be a multiple of workers, got {workers!r}: use {near}")
    share = num_envs // count
    return [
        WorkerSpec(
            role="env",
            rank=rank,
            slots=range(rank * share, (rank + 1) * share),
            cpus=machine.cpus,
            env_vars=SINGLE_THREADED,
        )
        for rank in range(count)
    ]
