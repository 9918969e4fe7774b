"""The section of report.html about time: a stack of phases for every iteration, and their sums."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from embodyrl.tracking.clock import Phase

WIDTH, HEIGHT = 880, 160
MOST_STACKS = 80
"""Largest number of stacks; longer runs get several iterations in each."""
COLOURS: Mapping[Phase, str] = {
    Phase.simulate: "#2563eb",
    Phase.render: "#60a5fa",
    Phase.infer: "#c2410c",
    Phase.preprocess: "#fb923c",
    Phase.record: "#a3a3a3",
    Phase.train: "#15803d",
    Phase.sync: "#a21caf",
    Phase.save: "#ca8a04",
    Phase.idle: "#d4d4d4",
}
Row = Mapping[str, Any]


def where_time_went(rows: Sequence[Row]) -> str:
    """Return the section, from the rows of metrics.jsonl; empty for a run without iterations."""
    iterations = [row for row in rows if "time/iteration" in row]
    if not iterations:
        return ""
    evaluations = [row for row in rows if "time/eval" in row]
    return f"<h2>Where the time went</h2>\n{_stacks(iterations)}{_table(iterations, evaluations)}"


def _stacks(rows: Sequence[Row]) -> str:
    """Draw a stack for each iteration, or for each group of consecutive ones."""
    per_stack = -(-len(rows) // MOST_STACKS)
    groups = [rows[first : first + per_stack] for first in range(0, len(rows), per_stack)]
    heights = [sum(_sum(group, f"time/{phase}") for phase in Phase) / len(group) for group in groups]
    tallest, width = max(heights) or 1.0, WIDTH / len(groups)
    boxes = []
    for number, group in enumerate(groups):
        top = float(HEIGHT)
        for phase in Phase:
            seconds = _sum(group, f"time/{phase}") / len(group)
            height = seconds / tallest * HEIGHT
            top -= height
            boxes.append(
                f'<rect x="{number * width:.1f}" y="{top:.1f}" width="{0.9 * width:.1f}" height="{height:.1f}" '
                f'fill="{COLOURS[phase]}"><title>{phase} {seconds:.3g} s</title></rect>'
            )
    what = "iteration" if per_stack == 1 else f"{per_stack} iterations (mean)"
    return (
        f'<figure><svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(boxes)}</svg>'
        f"<figcaption>seconds of each {what}, without evaluation; the tallest: {tallest:.3g} s</figcaption></figure>\n"
    )


def _table(iterations: Sequence[Row], evaluations: Sequence[Row]) -> str:
    """Return the table of sums by phase, of iterations and of evaluations."""
    lines = ["<tr><th>phase</th><th>iterations [s]</th><th>share</th><th>evaluations [s]</th><th>share</th></tr>"]
    totals = [_sum(iterations, "time/iteration"), _sum(evaluations, "time/eval")]
    for phase in Phase:
        parts = [_sum(iterations, f"time/{phase}"), _sum(evaluations, f"time/eval/{phase}")]
        key = f'<span style="color: {COLOURS[phase]}">&#9632;</span> {html.escape(phase)}'
        lines.append(_row(key, parts, totals))
    return f"<table>{''.join([*lines, _row('all', totals, totals)])}</table>\n"


def _row(name: str, parts: Sequence[float], totals: Sequence[float]) -> str:
    cells = [name]
    for part, total in zip(parts, totals, strict=True):
        cells += [f"{part:.2f}", f"{100.0 * part / total:.1f} %" if total else "-"]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"


def _sum(rows: Sequence[Row], key: str) -> float:
    return float(sum(row.get(key) or 0.0 for row in rows))
