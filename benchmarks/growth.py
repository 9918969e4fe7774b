"""Measure what one more costs: envs, processes, pixels, decisions in a replay, iterations.

    python benchmarks/growth.py [--rounds 3] [--json benchmarks/results/growth.json]

Simulators without computation, so that only our own work is counted; CPU time of all processes together, medians. A
cost per unit that stays flat says that nothing in between grows faster than what it is there for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from transport import cpu_seconds
from zero_cost_simulator import ACTION, PROPRIO, ZeroCostConfig

from embodyrl.envs.manager import EnvManager
from embodyrl.envs.types import EpisodeSpec
from embodyrl.rollout.replay import Replay
from embodyrl.rollout.replay_fields import MIB, replay_fields
from embodyrl.tracking.report import write_report

ENVS, PROCESSES = (1, 8, 64, 512, 1000), (1, 2, 8, 32, 64)
PIXELS, DECISIONS, ITERATIONS = (64, 128, 256, 512), (10**4, 10**5, 10**6, 10**7), (10, 100, 1_000, 10_000)


def stepping(num_envs: int, workers: int, side: int, seconds: float) -> float:
    """CPU time of a step of one env with one image of `side` pixels, which the caller copies [us]."""
    config = ZeroCostConfig(num_envs=num_envs, workers=workers, cameras=["front"], image_size=[side, side])
    plugin: dict[str, Any] = {"plugins": ["zero_cost_simulator"], "plugin_path": str(Path(__file__).parent)}
    with EnvManager(config, chunk_size=1, **plugin) as manager:
        slots, actions = np.arange(num_envs), np.zeros((num_envs, 1, ACTION), np.float32)
        manager.reset(slots, [EpisodeSpec(task="nothing", start_state=0, seed=0)] * num_envs)
        mine = np.zeros((num_envs, 1, side, side, 3), np.uint8)
        processes = [psutil.Process(), *(psutil.Process(worker.pid) for worker in manager.workers)]
        for _ in range(5):
            manager.step(slots, actions)
        steps, start, used = 0, time.perf_counter(), cpu_seconds(processes)
        while time.perf_counter() - start < seconds:
            images = manager.step(slots, actions).observation.images
            assert images is not None
            np.copyto(mine, images)
            steps += num_envs
        return 1e6 * (cpu_seconds(processes) - used) / steps


def drawing(decisions: int) -> float:
    """CPU time of drawing a decision from a full replay of so many states [us]."""
    replay = Replay(
        decisions,
        slots=1,
        own=range(1),
        fields=replay_fields(proprio_dim=PROPRIO, action_dim=ACTION, chunk_size=1),
        start_after=1,
        seed=1,
        memory=8000 * MIB,
        folder=Path(tempfile.gettempdir()),
    )
    for column in replay._columns.values():
        column[...] = 0
    replay._columns["steps"][0] = 1
    replay._live = np.arange(decisions)
    count, batch = 200, 256
    start = time.process_time()
    for minibatch in replay.minibatches(count, batch):
        assert minibatch.size == batch
    return 1e6 * (time.process_time() - start) / (count * batch)


def reporting(iterations: int, run_dir: Path) -> float:
    """Seconds to build the report of a run of so many iterations."""
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    with tempfile.TemporaryDirectory(prefix="embodyrl-growth-") as folder:
        copied = Path(folder) / "run"
        shutil.copytree(run_dir, copied)
        rows = (json.dumps({**row, "iteration": number + 1}) + "\n" for number in range(iterations))
        (copied / "metrics.jsonl").write_text("".join(rows))
        start = time.process_time()
        write_report(copied)
        return time.process_time() - start


def small_run(folder: Path) -> Path:
    """A run of two iterations."""
    run_dir = folder / "run"
    settings = [f"run.dir={run_dir}", "run.iterations=2", "run.eval_every=0", "eval.episodes=2"]
    command = [sys.executable, "-m", "embodyrl", "run", "gym_pendulum", *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return run_dir


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="embodyrl-growth-") as folder:
        run_dir = small_run(Path(folder))
        seconds = chosen.seconds
        tables: dict[str, tuple[tuple[int, ...], Callable[[int], float]]] = {
            "envs in 2 processes, us per env step": (ENVS, lambda n: stepping(n, min(n, 2), 64, seconds)),
            "processes of 64 envs, us per env step": (PROCESSES, lambda n: stepping(64, n, 64, seconds)),
            "side of images in pixels, 8 envs, ns per KB of image": (
                PIXELS,
                lambda n: 1e3 * stepping(8, 2, n, seconds) * 1000 / (n * n * 3),
            ),
            "decisions in a replay, us per decision drawn": (DECISIONS, drawing),
            "iterations, ms per iteration in the report": (ITERATIONS, lambda n: 1e3 * reporting(n, run_dir) / n),
        }
        found: dict[str, dict[str, float]] = {name: {} for name in tables}
        for name, (sizes, measure) in tables.items():
            for size in sizes:
                found[name][str(size)] = round(statistics.median(measure(size) for _ in range(chosen.rounds)), 3)
            print(name, found[name], flush=True)
    result = {"cpu": found, "rounds": chosen.rounds, "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
