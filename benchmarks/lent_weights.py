"""Time for 128 MiB of weights to get to two rollout workers on other machines, beside gloo's own broadcast.

    python benchmarks/lent_weights.py [--rounds 15] [--out benchmarks/results/lent_weights.json]

Three processes of this machine: a rank, and two workers that reach it over the loopback device, as they would reach
another machine. `lent_s`: the rank writes a version into the memory that it lends (`SharedSender.send`), both workers
read it over lines, check it and copy it into their policies (`SharedReceiver.receive`), and say so. `broadcast_s`: the
same bytes by one call of torch.distributed's broadcast with gloo, and no more. Rounds alternate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from embodyrl.engine.sync import SharedReceiver, SharedSender
from embodyrl.placement.transport.lending import MemoryServer

RESULTS = Path(__file__).resolve().parent / "results"
BYTES = 128 * 2**20
PARTS = 32
WORKERS = 2
TIMEOUT_S = 60.0


class Weights(nn.Module):
    """As many weights as `BYTES` say, in several tensors."""

    def __init__(self, value: float) -> None:
        super().__init__()
        size = BYTES // 4 // PARTS
        self.parts = nn.ParameterList([nn.Parameter(torch.full((size,), value)) for _ in range(PARTS)])


def join(rank: int, port: int) -> None:
    """Join rank and workers over gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, WORKERS + 1, rank == 0, timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS + 1)
    torch.set_num_threads(1)


def work(rank: int, line: Connection) -> None:
    """Take weights in the way that is asked for."""
    join(rank, line.recv())
    module, flat = Weights(0.0), torch.zeros(BYTES, dtype=torch.uint8)
    receiver = SharedReceiver(module, line.recv(), timeout_s=TIMEOUT_S)
    line.send("ready")
    while (version := line.recv()) is not None:
        if version < 0:
            dist.broadcast(flat, 0)
        else:
            receiver.receive(version)
            assert module.parts[-1][-1].item() == version, "these are not the weights that were sent"
        line.send(version)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "lent_weights.json")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    lines = []
    for rank in range(1, WORKERS + 1):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(rank, theirs), daemon=True).start()
        lines.append(ours)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    for line in lines:
        line.send(port)
    join(0, port)
    module, flat = Weights(0.0), torch.zeros(BYTES, dtype=torch.uint8)
    sender = SharedSender(module, timeout_s=TIMEOUT_S)
    rounds: list[dict[str, float]] = []
    with MemoryServer("127.0.0.3") as server:
        for line in lines:
            line.send(sender.lend(server))
        for line in lines:
            line.recv()
        for version in range(options.rounds + 1):
            with torch.no_grad():
                for part in module.parts:
                    part.fill_(version)
            start = time.perf_counter()
            sender.send(version)
            tell(lines, version)
            lent = time.perf_counter() - start
            start = time.perf_counter()
            for line in lines:
                line.send(-1)
            dist.broadcast(flat, 0)
            for line in lines:
                line.recv()
            rounds.append({"lent_s": lent, "broadcast_s": time.perf_counter() - start})
        for line in lines:
            line.send(None)
    medians = {key: round(statistics.median(each[key] for each in rounds[1:]), 4) for key in rounds[0]}
    ratio = statistics.median(each["lent_s"] / each["broadcast_s"] for each in rounds[1:])
    result = {
        "bytes": BYTES,
        "workers": WORKERS,
        "rounds": options.rounds,
        "load_average": round(os.getloadavg()[0], 2),
        **medians,
        "ratio": round(ratio, 2),
    }
    print(json.dumps(result, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def tell(lines: list[Connection], version: int) -> None:
    """Have all workers take a version, at the same time."""
    for line in lines:
        line.send(version)
    for line in lines:
        line.recv()


if __name__ == "__main__":
    main()
