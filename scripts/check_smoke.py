"""Check in a short run's output that the policy learned.

python scripts/check_smoke.py RUN_DIR --at-least 0.5
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def faults(run_dir: Path, at_least: float) -> list[str]:
    """Return the faults of the run, as text."""
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rates = [row["eval/success_once"] for row in rows if "eval/success_once" in row]
    print(f"success over evaluations: {rates}; {summary['env_steps']} env steps in {summary['wall_s']:.0f} s")
    found = []
    if len(rates) < 2:
        found.append(f"metrics.jsonl has {len(rates)} evaluations, want one before training and one after")
    elif rates[-1] <= rates[0]:
        found.append(f"success went from {rates[0]} to {rates[-1]}: no improvement")
    if summary["eval/success_once"] < at_least:
        found.append(f"final success is {summary['eval/success_once']}, want at least {at_least}")
    if rates and summary["eval/success_once"] != rates[-1]:
        found.append("summary.json and metrics.jsonl disagree about the last evaluation")
    if not (run_dir / "checkpoints" / "last").exists():
        found.append("there is no checkpoint")
    return found


def main() -> int:
    """Read the command line and report."""
    parser = argparse.ArgumentParser(description="Check that a short run learned.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--at-least", type=float, default=0.5, help="final success rate to ask for")
    arguments = parser.parse_args()
    found = faults(arguments.run_dir, arguments.at_least)
    for fault in found:
        print(f"smoke run: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
