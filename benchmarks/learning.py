"""Train the shipped experiments: final success, steps and wall-clock seconds over several seeds.

    python benchmarks/learning.py [--experiment experiment/metaworld_reach] [--seeds 5] [--variant NAME] [key=value ...]

Runs them one after the other with `embodyrl run`, prints a table, and writes
benchmarks/results/learning_<experiment>[_<variant>].json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def run_seed(experiment: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Train one seed and return its results; `process_s` counts from the start of the program to its end."""
    with tempfile.TemporaryDirectory(prefix="embodyrl-learning-") as folder:
        run_dir = Path(folder) / "run"
        settings = [f"seed={seed}", f"run.dir={run_dir}", *overrides]
        command = [sys.executable, "-m", "embodyrl", "run", experiment, *settings]
        start = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - start
        summary = json.loads((run_dir / "summary.json").read_text())
    evaluations = summary["evaluations"]
    return {
        "seed": seed,
        "success": {step: evaluations[step]["eval/success_once"] for step in sorted(evaluations, key=int)},
        "env_steps": summary["env_steps"],
        "env_steps_per_s": summary["env_steps_per_s"],
        "process_s": round(seconds, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }


def write(experiment: str, variant: str | None, overrides: list[str], rows: list[dict[str, Any]]) -> None:
    """Write the results so far, so that a stopped benchmark keeps its finished seeds."""
    RESULTS.mkdir(exist_ok=True)
    name = experiment.removeprefix("experiment/") + (f"_{variant}" if variant else "")
    result = {"experiment": experiment, "overrides": overrides, "runs": rows}
    (RESULTS / f"learning_{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="experiment/metaworld_reach")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--variant", help="name of what the overrides make of it")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    rows = []
    for seed in range(1, options.seeds + 1):
        row = run_seed(options.experiment, seed, options.overrides)
        rows.append(row)
        write(options.experiment, options.variant, options.overrides, rows)
        rates = " -> ".join(f"{rate:.2f}" for rate in row["success"].values())
        print(
            f"seed {seed}   success {rates}   {row['env_steps']} env steps, {row['env_steps_per_s']:.0f} per second, "
            f"{row['process_s']} s",
            flush=True,
        )
    final = [list(row["success"].values())[-1] for row in rows]
    good = sum(rate >= 0.9 for rate in final)
    print(f"final success {min(final):.2f} to {max(final):.2f}, at least 0.90 on {good} of {len(final)}")


if __name__ == "__main__":
    main()
