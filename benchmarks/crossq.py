"""Compare CrossQ with soft actor-critic at equal env steps, and their seconds, on tasks that do and do not suit it.

    python benchmarks/crossq.py --work DIR [--tasks pendulum reach] [--seeds 1 2 3]    # benchmarks/results/crossq.json

Both have the same networks, rates, minibatches and number of updates; `wide` is CrossQ as its authors have it, with
critics four times as wide and Adam's first moment at 0.5. Runs of a seed follow each other, so that their seconds
compare.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tiny_vla import Seconds, once
from tiny_vla_report import RESULTS

TASKS = {"pendulum": "gym_pendulum_sac", "reach": "metaworld_reach_sac", "swingup": "dm_control_swingup_sac"}
METRICS = {"pendulum": "eval/return", "reach": "eval/success_once", "swingup": "eval/return"}


def arms(width: int) -> dict[str, list[str]]:
    """Return the settings of each method; `width` is that of SAC's critics."""
    crossq = ["algorithm=crossq"]
    wide = f"algorithm.off_policy.critics.hidden_sizes=[{4 * width},{4 * width}]"
    return {"sac": [], "crossq": crossq, "wide": [*crossq, wide, "engine.optimizer.betas=[0.5,0.999]"]}


def main() -> None:
    """Run all, and write what each found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--arms", nargs="+", default=["sac", "crossq", "wide"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, required=True, help="folder for runs")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for task in arguments.tasks:
        for seed in arguments.seeds:
            for name in arguments.arms:
                run = arguments.work / f"{task}-{name}-{seed}"
                seconds: Seconds = {}
                settings = [*arms(128)[name], f"seed={seed}", "tracking.sinks=[jsonl]", f"run.dir={run}"]
                once(run, seconds, "run", TASKS[task], *settings)
                every = json.loads((run / "summary.json").read_text())["evaluations"]
                found = {step: round(each[METRICS[task]], 3) for step, each in every.items()}
                rows.append({"task": task, "arm": name, "seed": seed, "found": found, **seconds.get(run.name, {})})
                (RESULTS / "crossq.json").write_text(json.dumps(rows, indent=1) + "\n")
                print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
