"""Control steps per second of MetaWorld reach with rollout workers, and against another checkout.

    python benchmarks/rollout_workers.py [--pairs 6] [--against FOLDER] [--out benchmarks/results/rollout_workers.json]

Runs of 40 iterations in fresh processes alternate, and so does the order within a round. Compared are 1 and 2 rollout
workers with a run without (same blocks), or, with `--against`, this checkout with another one that has a `.venv` of its
own, both without workers. CPU seconds are those of a run and all its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["run.iterations=40", "run.eval_every=0", "eval.episodes=2", "run.save_every=0"]
WORKERS = {f"workers {count}": ["rollout.blocks=2", f"placement.rollout.workers={count}"] for count in (0, 1, 2)}


def run(checkout: Path, settings: list[str]) -> dict[str, float]:
    """Train; returns the median of control steps per second over iterations, and CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="embodyrl-workers-") as folder:
        path = Path(folder) / "run"
        command = [str(checkout / ".venv/bin/embodyrl"), "run", "metaworld_reach", *SHORT, *settings]
        subprocess.run([*command, f"run.dir={path}"], check=True, stdout=subprocess.DEVNULL, cwd=checkout)
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    speeds = [row["time/env_steps_per_s"] for row in rows if "time/env_steps_per_s" in row][5:]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"steps_per_s": statistics.median(speeds), "cpu_s": cpu}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "rollout_workers.json")
    options = parser.parse_args()
    kinds = {name: (ROOT, settings) for name, settings in WORKERS.items()}
    if options.against is not None:
        kinds = {"before": (options.against.resolve(), []), "now": (ROOT, [])}
    first, *others = kinds
    load, rounds = round(os.getloadavg()[0], 2), []
    for number in range(options.pairs):
        names = [*kinds] if number % 2 == 0 else [*reversed(kinds)]
        rounds.append({name: run(*kinds[name]) for name in names})
        print(*(f"{name}: {found['steps_per_s']:.0f}/s {found['cpu_s']:.1f} s" for name, found in rounds[-1].items()))
    result: dict[str, Any] = {"load_average_before": load, "rounds": rounds}
    for key in ("steps_per_s", "cpu_s"):
        result[f"median_{key}"] = {name: statistics.median(each[name][key] for each in rounds) for name in kinds}
        result[f"{key}_to_{first}"] = {
            name: sorted(round(each[name][key] / each[first][key], 3) for each in rounds) for name in others
        }
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
