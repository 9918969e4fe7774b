"""Measure the cost of moving tensors off the compute device and back (`engine.offload`).

The tensors stand for an optimiser's state. For comparison the same bytes are copied between tensors in allocated
memory: on a GPU between the GPU and pinned memory, as fast as the bus allows; on the CPU within
memory. Contenders take turns; medians are printed.

    python benchmarks/mode_switch.py [--device auto] [--mib 512] [--tensors 64] [--rounds 7] [--folder DIR]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from embodyrl.config.schema import Device
from embodyrl.engine.compute import choose_device
from embodyrl.engine.offload import Offloaded

MIB = 2**20


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(Device), default=Device.auto)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = choose_device(Device(options.device))
    found = compare(device, options.mib, options.tensors, options.rounds, options.folder)
    copies = {"offload": "copy, device to host", "onload": "copy, host to device"}
    for name, speed in found.items():
        share = f"  {speed / found[copies[name]]:.2f} of the copy" if name in copies else ""
        print(f"{name:22} {speed:8.2f} GB/s{share}")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"device": str(device), "mib": options.mib, "gb_per_s": found}, indent=2) + "\n"
        )


def compare(device: torch.device, mib: int, count: int, rounds: int, folder: Path) -> dict[str, float]:
    """Return the median speed of every contender [GB/s]."""
    size = mib * MIB // 4 // count
    tensors = [torch.ones(size, device=device) for _ in range(count)]
    part = Offloaded(lambda: tensors, device=device, folder=folder)
    here, there = (torch.ones(size * count, device=device), torch.ones(size * count))
    if device.type == "cuda":
        there = there.pin_memory()
    contenders: dict[str, Callable[[], object]] = {
        "copy, device to host": lambda: there.copy_(here),
        "offload": part.offload,
        "copy, host to device": lambda: here.copy_(there),
        "onload": part.onload,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, contender in contenders.items():
            seconds[name].append(timed(contender, device))
    # The first round takes the memory.
    return {name: size * count * 4 / median(taken[1:]) / 1e9 for name, taken in seconds.items()}


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Seconds that something takes."""
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
