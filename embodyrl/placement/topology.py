"""NUMA nodes, CPUs and NVIDIA GPUs as the kernel shows them, read from files alone: no torch, no driver call.

Every function takes the folders it reads, so that another machine's tree can be planned for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

SYSFS = Path("/sys")
PROCFS = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One NUMA node."""

    id: int
    cpus: tuple[int, ...]
    """Its CPUs that are online and allowed, ascending; none where it is memory only, or outside the allowed set."""
    memory: bool
    """Whether it has memory that this process may use."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU."""

    index: int
    """Its number among all GPUs of the machine in the order of their addresses."""
    address: str
    """PCI address with its domain, lower-case: `0000:3b:00.0`."""
    uuid: str
    """`GPU-...`, as the driver names it; empty where it does not say."""
    node: int | None
    """NUMA node it is attached to; None where the machine does not say."""


def parse_ids(text: str) -> tuple[int, ...]:
    """Ids in the kernel's list format: `0-3,8` -> (0, 1, 2, 3, 8); an empty text -> ().

    Raises:
        ValueError: it is not in that format.
    """
    ids: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        ids.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(ids))


def format_ids(ids: Iterable[int]) -> str:
    """The inverse of `parse_ids`: (0, 1, 2, 3, 8) -> `0-3,8`."""
    spans: list[list[int]] = []
    for number in sorted(ids):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def read_nodes(sysfs: Path, allowed_cpus: Iterable[int], allowed_memory: Iterable[int] | None = None) -> list[Node]:
    """The online NUMA nodes, by id; [] where the kernel shows none.

    Args:
        sysfs: where sysfs is mounted.
        allowed_cpus: CPUs this process may use.
        allowed_memory: ids of the nodes whose memory it may use; None: all.
    """
    folder = sysfs / "devices/system/node"
    usable = set(allowed_cpus)
    online_cpus = _read_ids(sysfs / "devices/system/cpu/online")
    if online_cpus is not None:
        usable &= set(online_cpus)
    ids = _read_ids(folder / "online") or ()
    memory = set(ids if allowed_memory is None else allowed_memory)
    return [
        Node(
            id=number,
            cpus=tuple(cpu for cpu in _read_ids(folder / f"node{number}/cpulist") or () if cpu in usable),
            memory=number in memory and _has_memory(folder / f"node{number}/meminfo"),
        )
        for number in ids
    ]


def read_gpus(sysfs: Path, procfs: Path, environment: Mapping[str, str]) -> list[Gpu]:
    """The NVIDIA GPUs that CUDA shows this process, in CUDA's order on a machine whose GPUs are alike.

    CUDA sorts unlike GPUs by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID, which cannot be seen from here.

    Args:
        sysfs: where sysfs is mounted.
        procfs: where procfs is mounted.
        environment: the process's variables; CUDA_VISIBLE_DEVICES selects by number or by (the start of) the UUID.
    """
    folder = procfs / "driver/nvidia/gpus"
    by_address = {path.name.lower(): path for path in folder.iterdir()} if folder.is_dir() else {}
    every = [
        Gpu(index=index, address=address, uuid=_gpu_uuid(by_address[address]), node=_pci_node(sysfs, address))
        for index, address in enumerate(sorted(by_address))
    ]
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    return every if chosen is None else _visible(every, chosen)


def _visible(gpus: list[Gpu], chosen: str) -> list[Gpu]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES names. As in CUDA, the first word that names none ends the list."""
    found: list[Gpu] = []
    for word in (word.strip() for word in chosen.split(",")):
        if word.isdigit():
            matches = gpus[int(word) : int(word) + 1]
        else:
            matches = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(matches) != 1:
            break
        found += matches
    return found


def _gpu_uuid(folder: Path) -> str:
    for line in _read(folder / "information").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "GPU UUID":
            return value.strip()
    return ""


def _pci_node(sysfs: Path, address: str) -> int | None:
    """The node of a PCI device; the kernel writes -1 where the firmware does not say."""
    try:
        node = int(_read(sysfs / "bus/pci/devices" / address / "numa_node"))
    except ValueError:
        return None
    return node if node >= 0 else None


def _has_memory(meminfo: Path) -> bool:
    """Whether a line `Node 0 MemTotal: 1024 kB` says more than nothing."""
    for line in _read(meminfo).splitlines():
        words = line.split()
        if "MemTotal:" in words:
            return int(words[words.index("MemTotal:") + 1]) > 0
    return False


def allowed_memory_nodes(procfs: Path = PROCFS) -> tuple[int, ...] | None:
    """Ids of the nodes whose memory this process may use (its cpuset); None where the kernel does not say."""
    for line in _read(procfs / "self/status").splitlines():
        if line.startswith("Mems_allowed_list:"):
            return parse_ids(line.partition(":")[2])
    return None


def cpu_limit(cgroup: Path = SYSFS / "fs/cgroup") -> int | None:
    """CPUs' worth of time that this process's control group may use, rounded up; None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else max(1, ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return None


def allowed_cpus() -> tuple[int, ...]:
    """CPUs that this process may use, which can be fewer than the machine has."""
    return tuple(sorted(os.sched_getaffinity(0)))


def _read_ids(path: Path) -> tuple[int, ...] | None:
    """The ids that a file lists; None if there is no such file."""
    return parse_ids(path.read_text()) if path.is_file() else None


def _read(path: Path) -> str:
    """The text of a file; nothing if there is no such file."""
    return path.read_text() if path.is_file() else ""
