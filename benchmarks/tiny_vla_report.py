"""Write pages in docs/results from the results of tiny_vla.py and tiny_vla_controls.py.

The text of each page is in benchmarks/pages; benchmarks/figures.py draws the images.

    python benchmarks/tiny_vla_report.py
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TEXTS = ROOT / "benchmarks" / "pages"
PAGES = ROOT / "docs" / "results"
SMOOTHED = 5
"""Training success is drawn as the mean over so many iterations."""

Row = dict[str, Any]


def seeds_and_work(description: str | None) -> argparse.ArgumentParser:
    """Return the arguments of a benchmark that runs seeds in a folder, or reports what it measured before."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--work", type=Path, help="folder for demonstrations and runs")
    what.add_argument("--report", action="store_true", help="write or print what was measured")
    return parser


def write_page(name: str) -> None:
    """Write a page from the committed numbers."""
    measured = json.loads((RESULTS / f"{name}.json").read_text())
    rows: list[Row] = measured["seeds"]
    controls = json.loads((RESULTS / f"{name}_controls.json").read_text())
    tried = RESULTS / f"{name}_tried.json"
    constant = json.loads((RESULTS / "constant_motions.json").read_text())
    text = (TEXTS / f"{name}.md").read_text()
    (PAGES / f"{name}.md").write_text(
        text.format(
            episodes=rows[0]["episodes"],
            smoothed=SMOOTHED,
            remark=measured.get("remark", ""),
            table=table(rows),
            controls=control_table(controls["runs"]),
            motions=constant["motions"],
            constant={task: found["best"] for task, found in constant["tasks"].items()},
            tried=tried_table(json.loads(tried.read_text())) if tried.is_file() else "",
        )
    )


def table(rows: Sequence[Row]) -> str:
    """Success over the iterations of every seed, and what it cost."""
    steps = list(rows[0]["success"])
    cooler = list(rows[0]["success_at_temperature"])
    heads = ["seed", "after demonstrations", *(f"iteration {step}" for step in steps[1:]), "gain"]
    heads += [*(f"temperature {each}" for each in cooler), "wall [s]", "CPU [s]"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        rates = [row["success"][step] for step in steps]
        parts = list(row["seconds"].values())
        seconds = [sum(each[kind] or math.nan for each in parts) for kind in ("wall", "cpu")]
        cells = [str(row["seed"]), *(f"{rate:.2f}" for rate in rates), f"**+{100 * (rates[-1] - rates[0]):.0f}**"]
        cells += [f"{row['success_at_temperature'][each]:.2f}" for each in cooler]
        lines.append(
            "| " + " | ".join([*cells, *("-" if math.isnan(each) else f"{each:.0f}" for each in seconds)]) + " |"
        )
    return "\n".join(lines)


def control_table(rows: Sequence[Row]) -> str:
    """Success without task description or image."""
    kinds = [kind for kind in rows[0] if kind != "seed"]
    lines = ["| seed | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    lines += [f"| {row['seed']} | " + " | ".join(f"{row[kind]:.2f}" for kind in kinds) + " |" for row in rows]
    return "\n".join(lines)


def tried_table(rows: Sequence[Row]) -> str:
    """Success over the iterations with other settings."""
    lines = []
    for row in rows:
        rates = [f"{rate:.2f}" for rate in row["success"]]
        lines.append("| " + " | ".join([row["settings"], *rates, *["stopped"] * (4 - len(rates))]) + " |")
    return "\n".join(lines)


def smoothed(rates: Sequence[float]) -> list[tuple[float, float]]:
    """Means over windows of iterations, each at its middle."""
    return [
        (first + (SMOOTHED + 1) / 2, fmean(rates[first : first + SMOOTHED]))
        for first in range(len(rates) - SMOOTHED + 1)
    ]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for each in sorted(TEXTS.glob("tiny_*.md")):
        write_page(each.stem)
