"""Measure where the time of an iteration of the main job goes, in this source tree and in others.

    python benchmarks/phases.py [--rounds 5] [--tree before=DIR] [--out benchmarks/results/phases.json]

Milliseconds by phase, as runs log them (`tracking.clock`): medians over iterations 3 to 22 of each run, then over the
rounds, in which the trees take turns. A tree is a checkout, for instance of an earlier commit (`git archive`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS, ROOT = Path(__file__).resolve().parent / "results", Path(__file__).resolve().parents[1]
PHASES = ("simulate", "infer", "preprocess", "record", "train", "idle", "iteration")


def measure(tree: Path) -> dict[str, float]:
    """Milliseconds of an iteration by phase."""
    with tempfile.TemporaryDirectory(prefix="embodyrl-phases-") as folder:
        run_dir = Path(folder) / "run"
        settings = [
            f"run.dir={run_dir}",
            "run.iterations=24",
            "run.eval_every=0",
            "run.save_every=0",
            "eval.episodes=8",
        ]
        subprocess.run(
            [sys.executable, "-m", "embodyrl", "run", *settings],
            env={**os.environ, "PYTHONPATH": str(tree)},
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][2:22]
    return {name: 1e3 * statistics.median(row[f"time/{name}"] for row in rows) for name in PHASES}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--out", type=Path, default=RESULTS / "phases.json")
    arguments = parser.parse_args()
    trees = {name: Path(folder) for name, _, folder in (each.partition("=") for each in arguments.tree)}
    trees["now"] = ROOT
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(arguments.rounds):
        for name in trees if number % 2 == 0 else reversed(trees):
            found[name].append(measure(trees[name]))
    result = {
        name: {phase: round(statistics.median(each[phase] for each in rows), 1) for phase in PHASES}
        for name, rows in found.items()
    }
    print(json.dumps(result, indent=1))
    written = {
        "ms": result,
        "rounds": arguments.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }
    arguments.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
