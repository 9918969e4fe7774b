"""Checks of a machine for `embodyrl doctor`: each reports its finding, with a remedy if something is missing. A driver
that crashes or hangs stops only the process in which it is checked."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from embodyrl.config.infos import simulator_info
from embodyrl.config.schema import Config
from embodyrl.placement.cuda import TorchBuild, driver_version, why_no_cuda
from embodyrl.placement.graphics import RenderingCheck
from embodyrl.placement.plan import Inventory
from embodyrl.placement.process import Probe, ProbeFailed
from embodyrl.placement.ranks import idle_gpus
from embodyrl.registry import SimulatorEntry
from embodyrl.screen import counted

GIB = 2**30
LEAST_MEMORY = 2 * GIB
"""Memory of a run with one simulator process and a small policy [bytes], roughly."""
LEAST_SHM = 64 * 2**20
LEAST_DISK = GIB


class Status(StrEnum):
    """Result of a check."""

    ok = "ok"
    absent = "absent"
    """Missing, but only some runs need it."""
    fault = "FAULT"
    """Missing or broken, and needed."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One line of the doctor's table."""

    subject: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A check in progress: its process, and the function that judges the result."""

    probe: Probe
    judge: Callable[[Any, ProbeFailed | None], CheckResult]
    """Takes the output of the process, or its failure; returns the finding."""


def judged(subject: str, is_fine: bool, found: str, remedy: str, *, needed: bool = True) -> CheckResult:
    """Return a finding; its remedy is kept only if something is wrong."""
    if is_fine:
        return CheckResult(subject=subject, status=Status.ok, found=found)
    return CheckResult(subject=subject, status=Status.fault if needed else Status.absent, found=found, remedy=remedy)


def python() -> CheckResult:
    """Check the interpreter's version."""
    version = sys.version.split()[0]
    return judged(
        "Python", sys.version_info >= (3, 11), f"{version} ({sys.executable})", "use Python 3.11 or newer: make setup"
    )


TORCH = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
gpus = [[gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}"] for gpu in found]
print(json.dumps([torch.__version__, torch.version.cuda, gpus]))
"""
"""Prints torch's version, that of its CUDA, and of each CUDA device name, memory [bytes] and compute capability."""


def start_torch(machine: Inventory, *, needs_cuda: bool) -> Started:
    """Start the check that torch can be imported and matches the GPUs that the kernel reports."""

    def judge(result: Any, failure: ProbeFailed | None) -> CheckResult:
        if failure is not None:
            return judged("torch", False, str(failure), "install it: make setup")
        version, cuda, gpus = result
        build = f"for CUDA {cuda}" if cuda else "for the CPU"
        found = f"{version} ({build}), {describe_gpus(gpus) or 'no CUDA device'}"
        if machine.gpus and not gpus:
            remedy = why_no_cuda(build=TorchBuild(version=version, cuda=cuda)) or "see nvidia-smi"
            found += f", but the kernel shows {len(machine.gpus)} NVIDIA GPUs"
            return judged("torch", False, found, remedy, needed=needs_cuda)
        return judged("torch", bool(gpus) or not needs_cuda, found, "set engine.device to auto or cpu")

    return Started(probe=Probe(TORCH), judge=judge)


def describe_gpus(gpus: Sequence[tuple[str, int, str]]) -> str:
    """Return the GPUs in words, like ones counted: `2 x NVIDIA H200 (139.8 GiB, compute capability 9.0)`."""
    counts = Counter(f"{name} ({size / GIB:.1f} GiB, compute capability {level})" for name, size, level in gpus)
    return ", ".join(f"{count} x {text}" for text, count in counts.items())


def driver(machine: Inventory, config: Config | None) -> CheckResult | None:
    """Report the NVIDIA driver, and GPUs that a config would leave idle; None without a GPU."""
    if not machine.gpus:
        return None
    count = len(machine.gpus)
    found = f"{counted(count, 'GPU')}, driver {driver_version() or 'of unknown version'}"
    idle = None if config is None else idle_gpus(config, count)
    if idle is None:
        return CheckResult(subject="GPUs", status=Status.ok, found=found)
    return judged("GPUs", False, f"{found}; {idle[0]}", idle[1], needed=False)


def cpus(machine: Inventory) -> CheckResult:
    """Report the CPUs of the machine, those allowed to this process, and the control group's limit."""
    total, allowed = os.cpu_count() or 1, len(machine.cpus)
    limits = [f"{allowed} of {total} allowed"] if allowed < total else [f"{total}"]
    if machine.cores < allowed:
        limits.append(f"time for {machine.cores} (control group)")
    nodes = f", {len(machine.usable_nodes)} NUMA nodes" if len(machine.usable_nodes) > 1 else ""
    return CheckResult(subject="CPUs", status=Status.ok, found=f"{', '.join(limits)}{nodes}")


def memory() -> CheckResult:
    """Check the free memory."""
    state = psutil.virtual_memory()
    return judged(
        "memory",
        state.available >= LEAST_MEMORY,
        f"{state.available / GIB:.1f} of {state.total / GIB:.1f} GiB free",
        f"a run needs {LEAST_MEMORY / GIB:.0f} GiB at least: end other programs, or set env.workers to 1",
    )


def shared_memory(place: Path = Path("/dev/shm")) -> CheckResult:
    """Check the folder for shared memory, which torch uses between its processes (simulators do not)."""
    if not place.is_dir():
        return judged("/dev/shm", False, "missing", "mount it: containers have it by default", needed=False)
    size = shutil.disk_usage(place)
    found = f"{size.free / 2**20:.0f} of {size.total / 2**20:.0f} MiB free"
    return judged("/dev/shm", size.free >= LEAST_SHM, found, "docker run --shm-size=1g, or empty it", needed=False)


def disk(folder: Path) -> CheckResult:
    """Check the free space for runs; the folder need not exist yet."""
    place = folder.resolve()
    while not place.is_dir():
        place = place.parent
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        return judged("disk", False, f"{place} is not writable", "set run.dir to a folder that is")
    found = f"{free / GIB:.1f} GiB free for {folder}"
    return judged("disk", free >= LEAST_DISK, found, f"{LEAST_DISK / GIB:.0f} GiB at least: make room, or set run.dir")


def simulator(entry: SimulatorEntry, *, needed: bool) -> CheckResult:
    """Check that a simulator's packages and libraries are installed."""
    missing = entry.missing()
    if missing:
        found = f"lacks {', '.join(requirement.module for requirement in missing)}"
        return judged(entry.name, False, found, missing[0].install, needed=needed)
    return judged(entry.name, True, _versions(entry) or "there", "")


def _versions(entry: SimulatorEntry) -> str:
    """Return the names and versions of the packages that a simulator requires."""
    packages = metadata.packages_distributions()
    names = dict.fromkeys(name for need in entry.requires for name in packages.get(need.module, ())[:1])
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def assets(entry: SimulatorEntry) -> CheckResult | None:
    """Report which of a simulator's downloads are present; None for a simulator without downloads, or not installed.

    The downloads that a config needs are checked by the rules of the config.
    """
    report = simulator_info(entry.name, installed=True).assets()
    if report is None:
        return None
    found, remedy = report
    return judged(f"{entry.name} assets", not remedy, found, remedy, needed=False)


def start_rendering(check: RenderingCheck, *, needed: bool) -> Started:
    """Start a rendering check that a simulator declares."""

    def judge(result: Any, failure: ProbeFailed | None) -> CheckResult:
        if result is not None:
            return judged(check.subject, True, f"renders with {result}{check.note}", "")
        found = "no device that can render" if failure is None else str(failure)
        is_needed = check.required or (needed and check.usual)
        return judged(check.subject, False, found, check.remedy, needed=is_needed)

    return Started(probe=Probe(check.program, env_vars=check.variables), judge=judge)


CODEC = """
import av, json
av.CodecContext.create("libx264", "w")
print(json.dumps(av.__version__))
"""


def start_videos(*, needed: bool) -> Started:
    """Start the check that evaluation videos can be encoded."""

    def judge(result: Any, failure: ProbeFailed | None) -> CheckResult:
        found = f"PyAV {result} writes H.264" if failure is None else str(failure)
        return judged("videos", failure is None, found, "pip install --force-reinstall av", needed=needed)

    return Started(probe=Probe(CODEC), judge=judge)
