"""Seconds per iteration of real runs whose parts sleep, beside what `scale_model.py` predicts from the same costs.

    python benchmarks/scale_check.py    # prints and writes results/scale_check.json, and its table into docs/scaling.md

Simulators, decisions and learning (a stage) sleep for known times, so that other programs on this machine hardly
matter; everything else is what runs do. One machine only: nothing here crosses a network.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from scale_model import Case, Layout, Machines, costs_of, follow, put

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "scale_check.json"
BEGIN, END = "<!-- table of benchmarks/scale_check.py -->", "<!-- end of that table -->"
PLUGINS = ("sleeping_simulator", "sleeping_stage", "sleeping_policy")
ENVS, PROCESSES, CHUNKS, ACTIONS = 12, 6, 10, 8
STEP_S, DECIDE_LEAST_S, DECIDE_S, LEARN_S = 0.012, 0.03, 0.006, 1.6
CONFIG = f"""
defaults: [algorithm: ppo, _self_]
plugins: [{", ".join(PLUGINS)}]
env: {{name: sleeping, step_ms: {STEP_S * 1e3}, sigma: 0.0, num_envs: {ENVS}, workers: {PROCESSES},
      max_episode_steps: {CHUNKS * ACTIONS}, start_states: 50}}
model: {{name: sleeping, decide_least_ms: {DECIDE_LEAST_S * 1e3}, decide_ms: {DECIDE_S * 1e3}}}
rollout: {{num_chunks: {CHUNKS}, chunk_size: {ACTIONS}}}
pipeline: {{insert: [{{name: learn_long, stage: sleep_a_while, after: [rollout]}}]}}
algorithm: {{epochs: 1, minibatches: 1}}
eval: {{first_start_state: 1000, episodes: 1}}
run: {{name: sleeps, eval_every: 0, save_every: 0}}
tracking: {{sinks: [jsonl]}}
"""
FIRST = 2
"""Iterations before this one are not counted: in the first, rollouts begin."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A run, and its prediction."""

    name: str
    settings: tuple[str, ...] = ()
    ranks: int = 1
    workers: int = 0
    ahead: int = 0
    iterations: int = 8
    case: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's `Case`."""

    def predicted(self) -> float:
        """Return the seconds of an iteration by the model."""
        players = self.workers or self.ranks
        case = Case(
            name=self.name,
            about="",
            cores=0,  # counts in clusters only
            slots=ENVS // (self.ranks + self.workers),
            chunks=CHUNKS,
            actions=ACTIONS,
            step_s=STEP_S,
            decide_least_s=DECIDE_LEAST_S,
            decide_s=DECIDE_S,
            learn_s=0.0,
            row_gb=0.0,
            small_gb=0.0,
            weights_gb=0.0,
            gradients_gb=0.0,
            **{"step_sigma": 0.0} | self.case,
        )
        layout = Layout(
            ranks=self.ranks,
            workers=self.workers,
            worker_machines=min(1, self.workers),
            cores=PROCESSES // players,
        )
        costs = costs_of(case, layout, Machines(hop_s=0.0, slow_share=0.0))
        return follow(replace(costs, learn=LEARN_S), self.ahead)

    def measured(self, folder: Path) -> float:
        """Train, and return the mean seconds of an iteration."""
        path = folder / self.name.replace(" ", "_")
        mode = ["rollout.mode=async", f"rollout.max_staleness={self.ahead}"] if self.ahead else []
        settings = [
            *self.settings,
            *mode,
            f"engine.parallel.world_size={self.ranks}",
            f"placement.rollout.workers={self.workers}",
            f"run.iterations={self.iterations}",
            f"run.dir={path}",
        ]
        command = [sys.executable, "-m", "embodyrl", "run", str(folder / "sleeps.yaml"), *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "SLEEP_S": str(LEARN_S)})
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if "time/iteration" in row][FIRST:-1]  # in the last one no rollout begins
        return float(statistics.mean(row["time/iteration"] for row in rows))


UNEQUAL = ("env.sigma=0.6",)
TAIL = ("rollout.episodes=whole", f"env.length={0.4 * CHUNKS * ACTIONS}")
CHECKS = (
    Check(name="collocated"),
    Check(name="collocated, 2 ranks", ranks=2),
    Check(name="separate, 1 worker", workers=1),
    Check(name="separate, 2 workers", workers=2),
    Check(name="async, 1 worker", workers=1, ahead=1),
    Check(name="async, 2 workers", workers=2, ahead=1),
    Check(name="collocated, unequal steps", settings=UNEQUAL, case={"step_sigma": 0.6}),
    Check(name="collocated, long tail", settings=TAIL, case={"length": 0.4 * CHUNKS}, iterations=16),
    Check(
        name="async, 2 workers, long tail",
        settings=TAIL,
        workers=2,
        ahead=1,
        case={"length": 0.4 * CHUNKS},
        iterations=16,
    ),
)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    result: dict[str, Any] = {"load_average_before": round(os.getloadavg()[0], 2), "cases": {}}
    with tempfile.TemporaryDirectory(prefix="embodyrl-scale-") as name:
        folder = Path(name)
        (folder / "sleeps.yaml").write_text(CONFIG)
        for plugin in PLUGINS:
            (folder / f"{plugin}.py").write_text((HERE / f"{plugin}.py").read_text())
        for check in CHECKS:
            predicted, measured = check.predicted(), check.measured(folder)
            result["cases"][check.name] = told = {
                "predicted_s": round(predicted, 3),
                "measured_s": round(measured, 3),
                "predicted_of_measured": round(predicted / measured, 3),
            }
            print(f"{check.name:<30}" + "  ".join(f"{key} {value:.3f}" for key, value in told.items()), flush=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    put(table(result["cases"]), BEGIN, END)


def table(cases: dict[str, dict[str, float]]) -> str:
    """Return the results in Markdown."""
    head = f"| {ENVS} envs in {PROCESSES} processes | model | measured | model / measured |\n|---|---|---|---|"
    rows = [
        f"| {name} | {told['predicted_s']:.2f} | {told['measured_s']:.2f} | {told['predicted_of_measured']:.2f} |"
        for name, told in cases.items()
    ]
    return "\n".join([head, *rows])


if __name__ == "__main__":
    main()
