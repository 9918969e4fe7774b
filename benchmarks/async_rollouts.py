"""Seconds per iteration of asynchronous against synchronous runs, interleaved.

    python benchmarks/async_rollouts.py [--rounds 3] [--out benchmarks/results/async_rollouts.json]

Cases: simulators that sleep and a stage that sleeps as long (the bound is then exactly known); the same with a reward
of 200 ms per chunk row as a stage of its own; real MetaWorld with an MLP. Every run has one rollout worker. `waits` is
the share of a rollout in which the worker had nothing to do, which includes waiting for weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SLEEPS = """
defaults: [model: mlp, algorithm: ppo, _self_]
plugins: [sleeping_simulator, sleeping_stage]
env: {name: sleeping, step_ms: 10.0, sigma: 0.0, num_envs: 4, workers: 2, max_episode_steps: 50, start_states: 50}
rollout: {num_chunks: 100, chunk_size: 1}
pipeline: {insert: [{name: learn_long, stage: sleep_a_while, after: [rollout]}]}
algorithm: {epochs: 1, minibatches: 1}
eval: {first_start_state: 1000, episodes: 1}
run: {name: sleeps}
"""
QUIET = ["run.eval_every=0", "eval.episodes=1", "run.save_every=0", "tracking.sinks=[jsonl]"]
MODES = {"sync": ["rollout.mode=sync"], "async": ["rollout.mode=async", "rollout.max_staleness=1"]}


@dataclass(frozen=True)
class Case:
    """Something to be run in both modes."""

    name: str
    source: str
    """Config file or experiment."""
    settings: tuple[str, ...]
    seconds: float | None = None
    """How long the stage that stands for learning sleeps [s]."""


CASES = [
    Case("sleeping, learning as long as rollout", "sleeps.yaml", ("run.iterations=8",), 2.05),
    Case("sleeping, learning half as long", "sleeps.yaml", ("run.iterations=8",), 1.0),
    Case("a reward of 200 ms", "sleeps.yaml", ("run.iterations=8", "rollout.num_chunks=20"), 0.2),
    Case("MetaWorld reach, MLP", "experiment/metaworld_reach", ("run.iterations=12",)),
]
FIRST = 2
"""Iterations before this one are not counted: in the first, rollouts begin."""


def run(case: Case, mode: str, folder: Path) -> dict[str, float]:
    """Train, and return medians over the iterations."""
    path = folder / f"{CASES.index(case)}_{mode}_{len(list(folder.iterdir()))}"
    source = str(folder / case.source) if case.source.endswith(".yaml") else case.source
    settings = [*case.settings, *QUIET, *MODES[mode], "placement.rollout.workers=1", f"run.dir={path}"]
    command = [sys.executable, "-m", "embodyrl", "run", source, *settings]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "SLEEP_S": str(case.seconds or 0.0)}
    )
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/iteration" in row][FIRST:-1]  # in the last one no rollout begins
    found = {"iteration_s": statistics.median(row["time/iteration"] for row in rows)}
    rollout = [row["time/iteration"] - row["time/train"] for row in rows]
    if mode == "sync":
        collects = statistics.median(row["time/stage/rollout"] for row in rows)
        return found | {"rollout_s": collects, "learning_s": found["iteration_s"] - collects}
    waited = statistics.median(row["async/rollout_waited_s"] for row in rows)
    return found | {"worker_waited_s": waited, "outside_s": statistics.median(rollout)}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "async_rollouts.json")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "load_average_before": round(os.getloadavg()[0], 2),
        "rounds": options.rounds,
        "cases": {},
    }
    with tempfile.TemporaryDirectory(prefix="embodyrl-async-") as name:
        folder = Path(name)
        (folder / "sleeps.yaml").write_text(SLEEPS)
        for plugin in ("sleeping_simulator", "sleeping_stage"):
            (folder / f"{plugin}.py").write_text((HERE / f"{plugin}.py").read_text())
        for case in CASES:
            found = [{mode: run(case, mode, folder) for mode in MODES} for _ in range(options.rounds)]
            result["cases"][case.name] = told = summary(found)
            print(f"{case.name:<40}" + "  ".join(f"{key} {value:.3f}" for key, value in told.items()), flush=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def summary(found: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return medians over the rounds."""

    def median(mode: str, key: str) -> float:
        return statistics.median(each[mode][key] for each in found)

    rollout, learning = median("sync", "rollout_s"), median("sync", "learning_s")
    speedup = statistics.median(each["sync"]["iteration_s"] / each["async"]["iteration_s"] for each in found)
    bound = (rollout + learning) / max(rollout, learning)
    return {
        "sync_s": median("sync", "iteration_s"),
        "rollout_s": rollout,
        "learning_s": learning,
        "async_s": median("async", "iteration_s"),
        "speedup": speedup,
        "bound": bound,
        "of_bound": speedup / bound,
        "worker_waits": median("async", "worker_waited_s") / rollout,
    }


if __name__ == "__main__":
    main()
