"""Measure the speed of weight transfer to policies in other processes, against a plain copy of the same bytes.

- Shared memory: writing, receiving, and both with conversion from float32 to bfloat16; checksums included.
- gloo: a process sends, another one receives, over the loopback device; in buckets, tensor by tensor, and as patches.
  The time is that of the sender, who waits for the receiver. A raw broadcast of the same bytes is measured as well.

Contenders take turns; medians are printed. For patches the share of the bytes that travels is given, for weights that
moved by steps of a size typical of a learning rate.

    python benchmarks/weight_sync.py [--mib 128] [--tensors 64] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embodyrl.engine.sync import BroadcastReceiver, BroadcastSender, SharedReceiver, SharedSender, held_by

MIB = 2**20
RATES = (1e-6, 1e-5, 1e-4)
TIMEOUT_S = 120.0
COPY = "copy within memory"
RAW = "gloo, one raw broadcast"
COPY_BESIDE = "copy within memory, taking turns with gloo"
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
    size = (options.mib, options.tensors)
    num_bytes = options.mib * MIB
    speeds = {name: num_bytes / median(taken) / 1e9 for name, taken in shared_memory(*size, options.rounds).items()}
    seconds, shares = over_gloo(*size, options.rounds)
    speeds |= {name: num_bytes / median(taken) / 1e9 for name, taken in seconds.items()}
    for name, speed in speeds.items():
        copy, beside = COPY, ""
        if name.startswith("gloo"):
            copy, beside = COPY_BESIDE, f", {speed / speeds[RAW]:.2f} of the raw broadcast"
        print(f"{name:42} {speed:7.2f} GB/s of float32, {speed / speeds[copy]:.2f} of the copy{beside}")
    for name, share in shares.items():
        print(f"{name:42} {share:7.3f} of the bytes")
    if options.json is not None:
        result = {"mib": options.mib, "gb_per_s": speeds, "share_of_bytes": shares}
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
        self.noise = torch.Generator().manual_seed(0)
        size = mib * MIB // 4 // tensors
        self.parts = nn.ParameterList(
            nn.Parameter((0.02 * torch.randn(size, generator=self.noise)).to(dtype)) for _ in range(tensors)
        )

    @torch.no_grad()
    def move(self, rate: float) -> None:
        """Change every number by at most `rate`, up or down."""
        for part in self.parts:
            part.add_((torch.rand(part.shape, generator=self.noise) * 2 - 1) * rate)


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


def over_gloo(mib: int, tensors: int, rounds: int) -> tuple[Samples, dict[str, float]]:
    """Seconds of every contender as the sender sees them, and the share of the bytes that patches are."""
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"{folder}/meeting"
        receiver = context.Process(target=receive, args=(meeting, mib, tensors, rounds), daemon=True)
        receiver.start()
        join(meeting, 0)
        module = Weights(mib, tensors)
        source, copy = torch.ones(mib * MIB // 4), torch.empty(mib * MIB // 4)
        contenders: dict[str, Callable[[], object]] = {
            COPY_BESIDE: lambda: copy.copy_(source),
            RAW: partial(raw, source),
        }
        for name, bucket_bytes in BUCKETS.items():
            sender = BroadcastSender(module, source=0, timeout_s=TIMEOUT_S, patches=False, bucket_bytes=bucket_bytes)
            contenders[name] = stepping(sender.send)
        seconds = take_turns(contenders, rounds)
        shares = {}
        patching = BroadcastSender(module, source=0, timeout_s=TIMEOUT_S, patches=True)
        patching.send(0)
        for version, rate in enumerate(RATES, 1):
            module.move(rate)
            start = time.perf_counter()
            name = f"gloo, patches of bfloat16, steps of {rate:g}"
            shares[name] = patching.send(version) / (mib * MIB / 2)
            seconds[name] = [time.perf_counter() - start]
        dist.destroy_process_group()
        receiver.join(TIMEOUT_S)
    return seconds, shares


BUCKETS = {"gloo, buckets of 32 MiB": 32 * MIB, "gloo, tensor by tensor": 1}


def receive(meeting: str, mib: int, tensors: int, rounds: int) -> None:
    """The other process: takes part in everything that `over_gloo` does."""
    torch.set_num_threads(1)
    join(meeting, 1)
    module = Weights(mib, tensors)
    contenders: dict[str, Callable[[], object]] = {RAW: partial(raw, torch.empty(mib * MIB // 4))}
    for name, bucket_bytes in BUCKETS.items():
        receiver = BroadcastReceiver(module, source=0, timeout_s=TIMEOUT_S, bucket_bytes=bucket_bytes)
        contenders[name] = stepping(receiver.receive)
    take_turns(contenders, rounds)
    patched = BroadcastReceiver(Weights(mib, tensors, torch.bfloat16), source=0, timeout_s=TIMEOUT_S)
    for version in range(len(RATES) + 1):
        patched.receive(version)
    dist.destroy_process_group()


def join(meeting: str, rank: int) -> None:
    """Join the process group with the other process."""
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )


def raw(tensor: Tensor) -> None:
    """Send it, or receive into it, and wait until both are done."""
    dist.broadcast(tensor, 0)
    dist.barrier()


if __name__ == "__main__":
    main()
