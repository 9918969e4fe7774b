"""Time for a batch of 600 MB to get from a rollout worker to a rank of the same machine, beside a memcpy.

    python benchmarks/hand_over.py [--rounds 7] [--out benchmarks/results/hand_over.json]

Two processes: one collects (it writes chunk after chunk into the columns), the other maps what that shares and reads
every byte. Writing takes place in both, into ordinary memory as well (`write_s`, `write_shared_s`); `read_s` is reading
ordinary memory in the rank, and `way_1_s`, `way_2_s` are message, mapping and reading with one worker and with two,
whose small columns are joined. `way_of_memcpy`: (way - read) / memcpy, what the way costs; `all_of_memcpy`: with what
shared memory costs more in writing. The memcpy is between two arrays that have been touched; rounds alternate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodyrl.engine.exchange import ADDRESS, Exchange
from embodyrl.engine.parallel import Ranks
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.collector import RolloutBuffer, Zeros
from embodyrl.rollout.episodes import Rollout
from embodyrl.rollout.handing import SharedColumns, map_rollout
from embodyrl.rollout.spread import join_rollouts, leave_large

RESULTS = Path(__file__).resolve().parent / "results"
CHUNKS, IMAGE = 64, (1, 224, 224, 3)
TOTAL = 600e6


def collect(slots: int, zeros: Zeros) -> tuple[Rollout, float]:
    """Collect a batch of `slots` slots; returns it, and the seconds of writing."""
    images = np.full((slots, *IMAGE), 7, np.uint8)
    buffer, rows = RolloutBuffer(CHUNKS, slots, zeros), np.arange(slots)
    small: dict[str, NDArray[Any]] = {
        "actions": np.zeros((slots, 8, 7), np.float32),
        "rewards": np.zeros((slots, 8), np.float32),
        "valid": np.ones(slots, np.bool_),
    }
    start = time.perf_counter()
    for chunk in range(CHUNKS):
        buffer.write(np.full(slots, chunk), rows, {**small, "images": images})
    seconds = time.perf_counter() - start
    columns = buffer.columns(CHUNKS)
    batch = TrajectoryBatch.from_leaves(columns, torch.Size([CHUNKS, slots]), ["task"])
    return Rollout(batch=batch, finished=[], env_steps=0), seconds


def work(line: Connection) -> None:
    """Collect as often as asked, and say how long writing took."""
    torch.set_num_threads(1)
    earlier: SharedColumns | None = None
    while (slots := line.recv()) is not None:
        if earlier is not None:
            earlier.close()
        ordinary = collect(slots, np.zeros)[1]
        earlier = SharedColumns()
        rollout, seconds = collect(slots, earlier.zeros)
        start = time.perf_counter()
        line.send((earlier.share(rollout), ordinary, seconds, start))


def read(images: torch.Tensor) -> float:
    """Read every byte; returns the seconds."""
    start = time.perf_counter()
    images.view(-1).view(torch.int64).sum()
    return time.perf_counter() - start


def way(lines: list[Connection], slots: int) -> tuple[float, float, float]:
    """Have workers collect, and map, join and read; returns the seconds of writing into ordinary, into shared memory,
    and of all the rest."""
    usual, written, rest, parts = 0.0, 0.0, 0.0, []
    for line in lines:  # one after the other: each has a core
        line.send(slots // len(lines))
        shared, ordinary, seconds, start = line.recv()
        parts.append(map_rollout(shared))
        usual, written, rest = usual + ordinary, written + seconds, rest + time.perf_counter() - start
    exchange, start = Exchange(Ranks()), time.perf_counter()
    if len(parts) > 1:
        parts = [dataclasses.replace(part, batch=leave_large(part.batch, exchange)) for part in parts]
    joint = join_rollouts(parts, 1).batch
    rest += time.perf_counter() - start
    if ADDRESS not in joint:
        return usual, written, rest + read(joint["images"])
    return usual, written, rest + sum(read(held.columns["images"]) for held in exchange._held)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "hand_over.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    slots = int(TOTAL // (CHUNKS * np.prod(IMAGE))) // 2 * 2
    size = CHUNKS * slots * int(np.prod(IMAGE))
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    context = multiprocessing.get_context("spawn")
    lines = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(theirs,), daemon=True).start()
        lines.append(ours)
    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds + 1):
        start = time.perf_counter()
        target.copy_(source)
        memcpy = time.perf_counter() - start
        rollout, _ = collect(slots, np.zeros)
        row = {"memcpy_s": memcpy, "read_s": read(rollout.batch["images"])}
        del rollout
        for count in (1, 2):
            row["write_s"], row["write_shared_s"], spent = way(lines[:count], slots)
            row[f"way_{count}_s"] = spent
            row[f"way_{count}_of_memcpy"] = (spent - row["read_s"]) / memcpy
            more = row["write_shared_s"] - row["write_s"]
            row[f"all_{count}_of_memcpy"] = (spent - row["read_s"] + more) / memcpy
        rounds.append(row)
    for line in lines:
        line.send(None)
    medians = {key: round(statistics.median(each[key] for each in rounds[1:]), 4) for key in rounds[0]}
    result = {"bytes": size, "load_average": round(os.getloadavg()[0], 2), "rounds": options.rounds, **medians}
    print(json.dumps(result, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
