"""Measure what a batch of several ranks costs: time and memory of joining it, and of an epoch that reads every image.

Two ways, in turns, with the same processes and batches:

- stay: large columns stay with the rank that collected them, and each minibatch fetches what this rank learns from, as
  runs do it (`rollout.spread`, `engine.exchange`).
- everywhere: every rank gets all columns of everybody's batch.

    python benchmarks/spread_batch.py [--ranks 2] [--mib 128] [--minibatches 8] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from embodyrl.engine.exchange import ADDRESS, Exchange
from embodyrl.engine.parallel import Ranks, connected
from embodyrl.placement.ranks import RankInfo
from embodyrl.rollout import spread
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.episodes import Rollout

MIB = 2**20
CHUNKS, SIDE = 32, 128
"""Rows of a batch, and pixels of an image."""
WAYS = ("stay", "everywhere")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=128, help="of images, for each rank")
    parser.add_argument("--minibatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="list of results; the one of these sizes is replaced")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return be_rank(options)
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        processes = [subprocess.Popen([*words, "--rank", str(rank)]) for rank in range(options.ranks)]
        if any(process.wait() for process in processes):
            raise SystemExit("a rank failed")
        result = json.loads((Path(folder) / "result.json").read_text())
    for way, row in result["ways"].items():
        print(f"{way:11} " + ", ".join(f"{name} {value:.3g}" for name, value in row.items()))
    if options.json:
        earlier = json.loads(options.json.read_text()) if options.json.is_file() else []
        others = [each for each in earlier if (each["ranks"], each["mib"]) != (result["ranks"], result["mib"])]
        options.json.write_text(json.dumps([*others, result], indent=2) + "\n")


def be_rank(options: argparse.Namespace) -> None:
    """Measure as one of the ranks; the first writes the medians."""
    torch.set_num_threads(1)
    size = options.ranks
    meeting = str(options.folder / "meeting")
    place = RankInfo(rank=options.rank, size=size, local_rank=options.rank, local_size=size, meeting=meeting)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with connected(place, torch.device("cpu"), 120.0, lambda ranks: None) as ranks:
        rollout = Rollout(batch=own_batch(options.rank, options.mib * MIB), finished=[], env_steps=0)
        for number in range(options.rounds + 1):
            for way in WAYS:
                row = measure(rollout, ranks, way, options.minibatches)
                if number:  # the first round warms up
                    found[way].append(row)
        if ranks.is_first:
            medians = {way: {key: median(row[key] for row in rows) for key in rows[0]} for way, rows in found.items()}
            result = {"ranks": size, "mib": options.mib, "minibatches": options.minibatches, "ways": medians}
            (options.folder / "result.json").write_text(json.dumps(result))


def own_batch(rank: int, num_bytes: int) -> TrajectoryBatch:
    """What a rank has collected."""
    slots = num_bytes // (CHUNKS * SIDE * SIDE * 3)
    size = (CHUNKS, slots)
    columns: dict[str, Any] = {
        name: torch.zeros(size, dtype=torch.int64) for name in ("task_index", "steps", "episode", "group", "version")
    }
    columns |= {name: torch.zeros(size, dtype=torch.bool) for name in ("terminated", "truncated")}
    columns |= {
        "actions": torch.zeros(*size, 8, 7),
        "logprobs": torch.zeros(*size, 8),
        "rewards": torch.zeros(*size, 8),
        "success": torch.zeros(*size, 8, dtype=torch.bool),
        "valid": torch.ones(size, dtype=torch.bool),
        "images": torch.full((*size, 1, SIDE, SIDE, 3), rank, dtype=torch.uint8),
        "trace": {"sample": torch.zeros(*size, 8, 7)},
    }
    return TrajectoryBatch(columns, ["task"])


def measure(rollout: Rollout, ranks: Ranks, way: str, minibatches: int) -> dict[str, float]:
    """Join the batches, and read every image once; returns seconds, and this rank's memory and traffic in MiB."""
    vars(spread)["LARGE_ROW"] = 512 if way == "stay" else 2**40
    exchange = Exchange(ranks)
    ranks.barrier()
    with Growth() as growth:
        start = time.perf_counter()
        batch = spread.gather_rollouts(rollout, exchange, 1).batch
        joined = time.perf_counter() - start
        order = torch.randperm(math.prod(batch.size), generator=torch.Generator().manual_seed(0))
        total = 0
        for part in order.tensor_split(minibatches):
            dealt = part.tensor_split(ranks.size)
            if way == "stay":
                address = batch[ADDRESS].flatten()
                images = exchange.fetch([address[rows] for rows in dealt], ["images"])["images"]
            else:
                images = batch["images"].flatten(0, 1).index_select(0, dealt[ranks.rank])
            total += int(images[:, 0, 0, 0, 0].sum())
        seconds = time.perf_counter() - start
    every = sum(int(each) for each in ranks.gather(torch.tensor([total])))
    assert every == sum(range(ranks.size)) * math.prod(batch.size) // ranks.size, "every image was read once"
    received = exchange.received if way == "stay" else rollout.batch["images"].nbytes * (ranks.size - 1)
    return {
        "join [s]": joined,
        "join and epoch [s]": seconds,
        "memory [MiB]": growth.mib,
        "received [MiB]": received / MIB,
    }


class Growth:
    """The most memory that this process needs in addition during a block."""

    mib = 0.0

    def __enter__(self) -> Growth:
        self._process, self._going = psutil.Process(), True
        self._before = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while self._going:
            self.mib = max(self.mib, (self._process.memory_info().rss - self._before) / MIB)
            time.sleep(0.002)

    def __exit__(self, *error: object) -> None:
        self._going = False
        self._thread.join()


if __name__ == "__main__":
    main()
