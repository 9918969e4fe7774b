"""NUMA nodes, CPUs and NVIDIA GPUs as the kernel shows them, read from files alone: no torch, no driver call.

Every function that reads takes the root folder under which it finds sys/, proc/ and dev/, so that one can plan for a
copy of another machine's files. At the end stands how a process is bound to CPUs and memory, by the kernel's own calls
(no libnuma, no numactl).
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One NUMA node."""

    id: int
    cpus: tuple[int, ...]
    """Its CPUs that are online and allowed, ascending; none where it is memory only, or outside the allowed set."""
    memory: bool
    """True if it has memory that this process may use."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU."""

    index: int
    """Its number among the machine's GPUs that this container shows, in the order of their addresses."""
    address: str
    """PCI address with its domain, lower-case: `0000:3b:00.0`."""
    uuid: str
    """`GPU-...`, as the driver names it; empty where it does not say."""
    node: int | None
    """NUMA node it is attached to; None where the machine does not say."""


def parse_ids(text: str) -> tuple[int, ...]:
    """Parse ids in the kernel's list format: `0-3,8` -> (0, 1, 2, 3, 8); an empty text -> ().

    Raises:
        ValueError: it is not in that format.
    """
    ids: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        ids.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(ids))


def format_ids(ids: Iterable[int]) -> str:
    """Format ids, the inverse of `parse_ids`: (0, 1, 2, 3, 8) -> `0-3,8`."""
    spans: list[list[int]] = []
    for number in sorted(ids):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def read_nodes(root: Path, allowed_cpus: Iterable[int]) -> list[Node]:
    """Return the online NUMA nodes, by id; [] where the kernel shows none."""
    folder = root / "sys/devices/system/node"
    usable = set(allowed_cpus)
    online_cpus = _read_ids(root / "sys/devices/system/cpu/online")
    if online_cpus is not None:
        usable &= set(online_cpus)
    ids = _read_ids(folder / "online") or ()
    allowed_memory = _allowed_memory(root / "proc/self/status")
    memory = set(ids if allowed_memory is None else allowed_memory)
    return [
        Node(
            id=number,
            cpus=tuple(cpu for cpu in _read_ids(folder / f"node{number}/cpulist") or () if cpu in usable),
            memory=number in memory and _has_memory(folder / f"node{number}/meminfo"),
        )
        for number in ids
    ]


def read_gpus(root: Path, environment: Mapping[str, str]) -> list[Gpu]:
    """Return the NVIDIA GPUs that CUDA shows this process, in CUDA's order on a machine whose GPUs are alike.

    CUDA sorts unlike GPUs by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID, which cannot be seen from here.

    Args:
        root: the root folder.
        environment: the process's variables; CUDA_VISIBLE_DEVICES selects by number or by (the start of) the UUID.
    """
    folder = root / "proc/driver/nvidia/gpus"
    found = {path.name.lower(): _information(path) for path in folder.iterdir()} if folder.is_dir() else {}
    addresses = sorted(address for address, facts in found.items() if _is_open_to_us(root, facts))
    every = [
        Gpu(index=index, address=address, uuid=found[address].get("GPU UUID", ""), node=_pci_node(root, address))
        for index, address in enumerate(addresses)
    ]
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    return every if chosen is None else _visible(every, chosen)


def has_unlisted_gpus(root: Path) -> bool:
    """Return whether the NVIDIA driver has device files but no list of its GPUs, as under WSL and in containers."""
    listed = (root / "proc/driver/nvidia/gpus").is_dir()
    return not listed and any((root / "dev" / name).exists() for name in ("nvidiactl", "dxg"))


def visible_names(environment: Mapping[str, str]) -> list[str]:
    """Return the names of GPUs in CUDA_VISIBLE_DEVICES: numbers, `GPU-...` or `MIG-...`; [] if it is not set. As in
    CUDA, an empty word or a negative number ends the list."""
    words = (word.strip() for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(","))
    return list(takewhile(lambda word: word and not word.startswith("-"), words))


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


def _information(folder: Path) -> dict[str, str]:
    """Return the driver's facts about a GPU: `GPU UUID`, `Device Minor`, ..."""
    rows = (line.partition(":") for line in _read(folder / "information").splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}


def _is_open_to_us(root: Path, information: Mapping[str, str]) -> bool:
    """Return whether a GPU's device file is there: a container may show the driver's whole list and few of the
    devices."""
    minor = information.get("Device Minor")
    return minor is None or (root / f"dev/nvidia{minor}").exists()


def _pci_node(root: Path, address: str) -> int | None:
    """The node of a PCI device; the kernel writes -1 where the firmware does not say."""
    try:
        node = int(_read(root / "sys/bus/pci/devices" / address / "numa_node"))
    except ValueError:
        return None
    return node if node >= 0 else None


def _has_memory(meminfo: Path) -> bool:
    """Return whether a line `Node 0 MemTotal: 1024 kB` says more than nothing."""
    for line in _read(meminfo).splitlines():
        words = line.split()
        if "MemTotal:" in words:
            return int(words[words.index("MemTotal:") + 1]) > 0
    return False


def _allowed_memory(status: Path) -> tuple[int, ...] | None:
    """Ids of the nodes whose memory a process may use (its cpuset); None where its status does not say."""
    for line in _read(status).splitlines():
        if line.startswith("Mems_allowed_list:"):
            return parse_ids(line.partition(":")[2])
    return None


def cpu_limit(root: Path) -> int | None:
    """CPUs' worth of time that this process's control group may use, rounded up; None without a limit."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return None


def allowed_cpus() -> tuple[int, ...]:
    """Return the CPUs that this process may use, which can be fewer than the machine has."""
    return tuple(sorted(os.sched_getaffinity(0)))


def _read_ids(path: Path) -> tuple[int, ...] | None:
    """Return the ids that a file lists; None if there is no such file."""
    return parse_ids(path.read_text()) if path.is_file() else None


def _read(path: Path) -> str:
    """Return the text of a file; empty if there is no such file."""
    return path.read_text() if path.is_file() else ""


_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, for which the C library has no name."""
_MPOL_PREFERRED = 1
_MASK_WORDS = 16
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind(cpus: Sequence[int], memory_node: int | None) -> None:
    """Keep this process, and the threads it starts from now on, to these CPUs and this node's memory.

    What the kernel refuses is said on stderr and left: a process in the wrong place is slow, not wrong.

    Args:
        cpus: CPUs to run on; empty: as it is.
        memory_node: NUMA node to take memory from while it has some; None: as it is.
    """
    try:
        if cpus and set(cpus) != os.sched_getaffinity(0):
            os.sched_setaffinity(0, cpus)
        if memory_node is not None:
            prefer_memory(memory_node)
    except OSError as error:
        print(f"warning: NUMA binding failed, continuing without: {error}", file=sys.stderr)


def prefer_memory(node: int) -> None:
    """Take pages from this node from now on, and from another only while it is full.

    Preferred and not bound (`MPOL_BIND`): on a full node the latter ends in the out-of-memory killer, which is a high
    price for pages that would merely be slower to reach.

    Raises:
        OSError: the kernel refused, or this kind of machine is not known here.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"the number of set_mempolicy on {platform.machine()} is not known")
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than the size that it is given.
    if libc.syscall(number, _MPOL_PREFERRED, ctypes.byref(mask), _MASK_WORDS * _WORD_BITS + 1) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"set_mempolicy for node {node}: {os.strerror(code)}")
