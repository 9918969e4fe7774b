"""Seconds per iteration of asynchronous against synchronous runs, interleaved.

    python benchmarks/async_rollouts.py [--rounds 3] [--only WORD] [--out benchmarks/results/async_rollouts.json]

Cases: simulators that sleep and a stage that sleeps as long (the bound is then exactly known); the same with a reward
of 200 ms per chunk row as a stage of its own; real MetaWorld with an MLP; soft actor-critic, whose updates are real,
with simulators that sleep about as long, with MetaWorld, and with MetaWorld and an eighth of the updates. Every
asynchronous run has one rollout worker, and so has every synchronous one but for those of soft actor-critic, which have
what is fastest there: none. `waits` is the share of a rollout in which the worker had nothing to do, which includes
waiting for weights.
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
SLEEPS_SAC = """
defaults: [model: mlp, algorithm: sac, _self_]
plugins: [sleeping_simulator]
env: {name: sleeping, step_ms: 10.0, sigma: 0.0, num_envs: 8, workers: 4, max_episode_steps: 50, start_states: 50}
model: {head: squashed, activation: relu}
rollout: {num_chunks: 16}
algorithm:
  off_policy:
    replay: {capacity: 20000, start_after: 256}
    updates_per_step: 2.0
    batch_size: 128
    critics: {hidden_sizes: [128, 128]}
eval: {first_start_state: 1000, episodes: 1}
run: {name: sleeps}
"""
"""The updates of `metaworld_reach_sac`; in an iteration each simulator process sleeps for 32 steps."""
STEPS = 32
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
    first: int = 2
    """Iterations before this one are not counted: in the first, rollouts begin."""
    sync: tuple[str, ...] = ("placement.rollout.workers=1",)
    """Settings of synchronous runs alone."""
    balanced: bool = False
    """Whether simulators sleep as long as learning takes here."""


NO_WORKERS = ("placement.rollout.workers=0",)
REACH = "experiment/metaworld_reach_sac"
CASES = [
    Case("sleeping, learning as long as rollout", "sleeps.yaml", ("run.iterations=8",), 2.05),
    Case("sleeping, learning half as long", "sleeps.yaml", ("run.iterations=8",), 1.0),
    Case("a reward of 200 ms", "sleeps.yaml", ("run.iterations=8", "rollout.num_chunks=20"), 0.2),
    Case("MetaWorld reach, MLP", "experiment/metaworld_reach", ("run.iterations=12",)),
    Case("SAC, sleeping", "sleeps_sac.yaml", ("run.iterations=11",), first=4, sync=NO_WORKERS, balanced=True),
    Case("SAC, MetaWorld reach", REACH, ("run.iterations=18",), first=10, sync=NO_WORKERS),
    Case(
        "SAC, MetaWorld reach, 0.25 updates per step",
        REACH,
        ("run.iterations=40", "algorithm.off_policy.updates_per_step=0.25"),
        first=12,
        sync=NO_WORKERS,
    ),
]


def run(case: Case, mode: str, folder: Path, *more: str) -> dict[str, float]:
    """Train, and return medians over the iterations."""
    path = folder / f"{CASES.index(case)}_{mode}_{len(list(folder.iterdir()))}"
    source = str(folder / case.source) if case.source.endswith(".yaml") else case.source
    apart = case.sync if mode == "sync" else ("placement.rollout.workers=1",)
    settings = [*case.settings, *QUIET, *MODES[mode], *apart, f"run.dir={path}", *more]
    command = [sys.executable, "-m", "embodyrl", "run", source, *settings]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "SLEEP_S": str(case.seconds or 0.0)}
    )
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/iteration" in row][case.first : -1]  # in the last one no rollout begins
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
    parser.add_argument("--only", default="", help="cases with this word in their name")
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
        (folder / "sleeps_sac.yaml").write_text(SLEEPS_SAC)
        for plugin in ("sleeping_simulator", "sleeping_stage"):
            (folder / f"{plugin}.py").write_text((HERE / f"{plugin}.py").read_text())
        for case in (case for case in CASES if options.only in case.name):
            more = []
            if case.balanced:
                learning = run(case, "sync", folder, "env.step_ms=1.0")["learning_s"]
                more = [f"env.step_ms={1e3 * learning / STEPS:.1f}"]
            found = [{mode: run(case, mode, folder, *more) for mode in MODES} for _ in range(options.rounds)]
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
