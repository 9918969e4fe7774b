"""Measure how much of saving a checkpoint `run.save_async` hides from a run.

A policy and an optimiser state of `--mib` are saved while the run waits, and in the background while it continues with
work that takes about as long. Contenders take turns; medians are printed: seconds that the run was blocked, seconds
until the checkpoint was published, and how much longer the same work took meanwhile.

    python benchmarks/saving.py [--mib 256] [--rounds 5] [--folder DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from embodyrl.config import load_config
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.models import build_policy
from embodyrl.models.mlp.options import MLPConfig
from embodyrl.runner.checkpoint import Retention
from embodyrl.runner.state import Saver, Snapshot, TrainerState

MIB = 2**20
SPEC = SimulatorSpec(
    tasks={"push": "push"},
    actions=(ActionField(name="arm", meaning="force", unit="N", low=(-1.0,), high=(1.0,)),),
    proprio_dim=8,
    max_episode_steps=10,
    control_frequency=1.0,
)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = compare(options.mib, options.rounds, Path(folder))
    for name, row in found.items():
        print(f"{name:15} stood still {row['waited_s']:.2f} s, published after {row['published_s']:.2f} s, "
              f"work x {row['slowdown']:.2f}")  # fmt: skip
    hidden = 1.0 - found["in background"]["waited_s"] / found["waiting"]["waited_s"]
    print(f"hidden          {hidden:.0%} of the time that the run stood still")
    if options.json is not None:
        options.json.write_text(json.dumps({"mib": options.mib, **found}, indent=2) + "\n")


def compare(mib: int, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return medians of both ways to save."""
    snapshot = make_snapshot(mib)
    savers = {}
    for name, in_background in (("waiting", False), ("in background", True)):
        (folder / name).mkdir()
        savers[name] = Saver(folder / name, Retention(last=1), in_background=in_background)
    steps = 0
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in savers}
    for number in range(rounds + 1):
        for name, saver in savers.items():
            alone = work(steps)
            start = time.perf_counter()
            published = saver.save(replace(snapshot, iteration=number))
            waited = time.perf_counter() - start
            slowdown = work(steps) / alone if steps else 1.0
            (saved,) = published or saver.wait()
            found[name].append((waited, saved.seconds, slowdown))
        steps = steps or steps_that_take(found["waiting"][0][0])
    columns = ("waited_s", "published_s", "slowdown")
    return {
        name: {column: median(values) for column, values in zip(columns, zip(*rows[1:], strict=True), strict=True)}
        for name, rows in found.items()
    }


def make_snapshot(mib: int) -> Snapshot:
    """A third of the bytes are weights, two thirds moments, as with AdamW."""
    width = int((mib * MIB / 3 / 4 / 2) ** 0.5)
    policy = build_policy(MLPConfig(name="mlp", hidden_sizes=[width, width]), SPEC, chunk_size=1, seed=1)
    moments = {name: [torch.zeros_like(each)] * 2 for name, each in policy.named_parameters()}
    moments = {name: [each.clone() for each in pair] for name, pair in moments.items()}
    state = TrainerState(counters={}, engine={"moments": moments}, simulators=[])
    loaded = load_config("experiment/gym_pendulum")
    return Snapshot(iteration=0, metrics={}, policy=policy, loaded=loaded, trainer=state)


def work(steps: int) -> float:
    """Seconds that so many products of matrices take."""
    matrix = torch.ones(256, 256)
    start = time.perf_counter()
    for _ in range(steps):
        matrix = (matrix @ matrix).clamp_(0.0, 1.0)
    return time.perf_counter() - start


def steps_that_take(seconds: float) -> int:
    """Return how many steps of `work` take about so long."""
    return max(int(seconds / (work(50) / 50)), 1)


if __name__ == "__main__":
    main()
