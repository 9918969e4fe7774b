"""The files of a machine that is not there: sysfs and procfs with NUMA nodes, CPUs and NVIDIA GPUs."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def make_machine(
    root: Path,
    nodes: dict[int, str],
    *,
    memory_gib: dict[int, int] | None = None,
    online_cpus: str | None = None,
    gpus: dict[str, int | None] | None = None,
    mems_allowed: str | None = None,
) -> Path:
    """Write the tree.

    Args:
        root: where.
        nodes: id -> cpulist.
        memory_gib: id -> memory; 64 where it is not said.
        online_cpus: the kernel's list of online CPUs; no such file where it is not said.
        gpus: PCI address as the driver writes it -> numa_node; None: no such file.
        mems_allowed: what /proc/self/status says; nothing where it is not said.
    """
    sysfs, procfs = root / "sys", root / "proc"
    folder = sysfs / "devices/system/node"
    for number, cpulist in nodes.items():
        write(folder / f"node{number}/cpulist", cpulist)
        kib = (memory_gib or {}).get(number, 64) * 2**20
        write(folder / f"node{number}/meminfo", f"Node {number} MemTotal: {kib:>12} kB\nNode {number} MemFree: 1 kB")
    if nodes:
        write(folder / "online", ",".join(map(str, nodes)))
    if online_cpus is not None:
        write(sysfs / "devices/system/cpu/online", online_cpus)
    for number, (address, node) in enumerate((gpus or {}).items()):
        information = f"Model: \t\t Example\nGPU UUID: \t GPU-{number}abc\nBus Location: \t {address}"
        write(procfs / "driver/nvidia/gpus" / address / "information", information)
        if node is not None:
            write(sysfs / "bus/pci/devices" / address.lower() / "numa_node", str(node))
    if mems_allowed is not None:
        write(procfs / "self/status", f"Name:\tpython\nMems_allowed_list:\t{mems_allowed}")
    return root
