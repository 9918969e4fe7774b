"""Measure the speed of weight transfer to policies in other processes of a machine, against a plain copy of the bytes:
writing, receiving, and both with conversion from float32 to bfloat16; checksums included.

Contenders take turns; medians are printed.

    python benchmarks/weight_sync.py [--mib 128] [--tensors 64] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median

import torch
from torch import nn

from embodyrl.engine.sync import SharedReceiver, SharedSender, held_by

MIB = 2**20
TIMEOUT_S = 120.0
COPY = "copy within memory"
Samples = dict[str, list[float]]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="of float32 weights")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_bytes = options.mib * MIB
    seconds = shared_memory(options.mib, options.tensors, options.rounds)
    speeds = {name: num_bytes / median(taken) / 1e9 for name, taken in seconds.items()}
    for name, speed in speeds.items():
        print(f"{name:42} {speed:7.2f} GB/s of float32, {speed / speeds[COPY]:.2f} of the copy")
    if options.json is not None:
        result = {"mib": options.mib, "gb_per_s": speeds}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


class Weights(nn.Module):
    """Tensors of one size, with values like those of trained layers.

    Args:
        mib: all of them together in float32 [MiB].
        tensors: how many.
        dtype: what they are held in.
    """

    def __init__(self, mib: int, tensors: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(0)
        size = mib * MIB // 4 // tensors
        self.parts = nn.ParameterList(
            nn.Parameter((0.02 * torch.randn(size, generator=noise)).to(dtype)) for _ in range(tensors)
        )


def shared_memory(mib: int, tensors: int, rounds: int) -> Samples:
    """Seconds of every contender, both sides in one process so that nothing but they run."""
    module = Weights(mib, tensors)
    source, copy = torch.ones(mib * MIB // 4), torch.empty(mib * MIB // 4)
    contenders: dict[str, Callable[[], object]] = {COPY: lambda: copy.copy_(source)}
    for dtype in (torch.float32, torch.bfloat16):
        other = Weights(mib, tensors, dtype)
        sender = SharedSender(module, held=held_by(other), timeout_s=TIMEOUT_S)
        receiver = SharedReceiver(other, sender.address, timeout_s=TIMEOUT_S)
        name = str(dtype).removeprefix("torch.")
        contenders[f"shared memory, sending {name}"] = stepping(sender.send)
        contenders[f"shared memory, receiving {name}"] = stepping(receiver.receive)
    return take_turns(contenders, rounds)


def stepping(action: Callable[[int], object]) -> Callable[[], object]:
    """Call with 0, 1, 2, ..."""
    numbers = count()
    return lambda: action(next(numbers))


def take_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> Samples:
    """Seconds of every contender in every round but the first, which takes memory."""
    seconds: Samples = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
