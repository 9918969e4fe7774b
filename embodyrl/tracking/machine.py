"""Facts about the machine and the memory of a run, for its summary."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from types import ModuleType

import psutil

MIB = 2**20


def machine_facts() -> dict[str, str]:
    """Return operating system, processor, usable cores, memory and GPUs, by name."""
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    facts = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": _processor(),
        "cores, memory": f"{cores} usable cores, {memory:.0f} GiB",
    }
    if gpus := _gpus():
        facts["GPUs"] = ", ".join(gpus)
    return facts


def memory_mib() -> dict[str, float]:
    """Return what this process has used at most, what its simulators and other processes use now (memory that several
    share is divided among them), and what tensors have used at most on its GPU [MiB]."""
    found = {"main process, largest": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0}
    others = [size for each in psutil.Process().children(recursive=True) if (size := _own_memory(each)) is not None]
    if others:
        found[f"{len(others)} other processes, at the end"] = sum(others) / MIB
    if (torch := _torch_on_gpu()) is not None:
        found["tensors on the GPU, largest"] = torch.cuda.max_memory_allocated() / MIB
    return {name: round(size, 1) for name, size in found.items()}


def _processor() -> str:
    """Return the processor's name as Linux shows it, else the architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _gpus() -> list[str]:
    torch = _torch_on_gpu()
    if torch is None:
        return []
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _torch_on_gpu() -> ModuleType | None:
    import torch

    return torch if torch.cuda.is_available() else None


def _own_memory(process: psutil.Process) -> int | None:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it has ended meanwhile, or may not be looked at
        return None
