"""Write pages and images in docs/results from the results of tiny_vla.py and tiny_vla_controls.py.

The text of each page is in benchmarks/pages.

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
COLOURS = ("#2563eb", "#c2410c", "#15803d")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 44, 16, 24, 36
SMOOTHED = 5
"""Training success is drawn as the mean over so many iterations."""

Row = dict[str, Any]


def write_page(name: str) -> None:
    """Write a page and its image from the committed numbers."""
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
    (PAGES / f"{name}.svg").write_text(draw(rows))


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


def draw(rows: Sequence[Row]) -> str:
    """Success over iterations: a line and points per seed."""
    last = max(len(row["training"]) for row in rows)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(iteration: float, success: float) -> str:
        return f"{LEFT + iteration / last * wide:.1f},{TOP + (1.0 - success) * high:.1f}"

    shapes = [
        f'<text x="{LEFT}" y="14">success</text>',
        f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 2}" text-anchor="middle">iteration</text>',
    ]
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + (1.0 - level) * high
        shapes.append(f'<path d="M{LEFT} {y:.1f}h{wide}" stroke="#d9dee7"/>')
        shapes.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{level:g}</text>')
    for step in range(0, last + 1, 25):
        across = place(step, 0.0).split(",")[0]
        shapes.append(f'<text x="{across}" y="{HEIGHT - 18}" text-anchor="middle">{step}</text>')
    for row, colour in zip(rows, COLOURS, strict=False):
        lines = [place(step, rate) for step, rate in smoothed(row["training"])]
        shapes.append(f'<polyline points="{" ".join(lines)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for step, rate in row["success"].items():
            across, down = place(float(step), rate).split(",")
            shapes.append(f'<circle cx="{across}" cy="{down}" r="4.5" fill="{colour}"/>')
        x = WIDTH - 170 + 55 * rows.index(row)
        shapes.append(f'<text x="{x}" y="14" style="fill: {colour}">seed {row["seed"]}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">\n'
        "<style>text { font: 12px system-ui, sans-serif; fill: #4a5568; }</style>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


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
