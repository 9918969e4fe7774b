"""report.html: the results of a run in one file that needs no other files."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError
from embodyrl.files import write_whole
from embodyrl.tracking.clock import Phase
from embodyrl.tracking.sinks import METRICS_FILE, read_rows

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
GRAPH_FILE = "graph.mmd"
"""Mermaid flow chart of the iteration, which a run writes to its directory when it starts."""
EVALUATIONS = "evaluations"
"""Folder with the episodes of every evaluation, `<iteration>.jsonl`: a line of JSON each."""
VIDEOS = "videos"
"""Folder of videos of evaluation episodes."""
WIDTH, HEIGHT, MARGIN = 420, 200, 44

SUMMARY: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "iterations": int,
    "env_steps": int,
    "wall_s": (int, float),
    "env_steps_per_s": (int, float),
    "seed": int,
    "evaluations": dict,
    "config_hash": str,
    "versions": dict,
}
"""Keys that every summary.json has, with their types."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 960px; padding: 0 1rem; color: #1c2330; }}
h1 {{ font-size: 1.4rem; margin-bottom: .2rem; }}
h2 {{ font-size: 1.05rem; margin-top: 2rem; }}
.curves {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
figure {{ margin: 0; border: 1px solid #d9dee7; border-radius: 6px; padding: .5rem; }}
figcaption {{ font-size: .85rem; color: #4a5568; }}
svg text {{ font: 11px system-ui, sans-serif; fill: #4a5568; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .2rem .9rem .2rem 0; text-align: right; font-variant-numeric: tabular-nums; }}
td:first-child, th:first-child {{ text-align: left; }}
pre {{ background: #f5f7fa; padding: .8rem; border-radius: 6px; overflow-x: auto; font-size: .85rem; }}
</style></head><body>
<h1>{title}</h1>
<p>{subtitle}</p>
<h2>Curves</h2>
<div class="curves">{curves}</div>
<h2>Evaluations</h2>
<table><tr><th>iteration</th><th>success</th><th>95 % interval</th><th>return</th><th>length</th><th>episodes</th>
<th>actions</th></tr>
{evaluations}</table>
{times}{videos}{iteration}<h2>Config</h2>
<pre>{config}</pre>
</body></html>
"""


@dataclass(frozen=True)
class Curve:
    """A diagram: one or two metrics over env steps."""

    title: str
    keys: tuple[str, ...]


CURVES = (
    Curve("success: evaluation (points) and exploring policy (line)", ("env/success_once", "eval/success_once")),
    Curve("return of training episodes", ("env/return",)),
    Curve("approximate KL per update [nats]", ("train/approx_kl",)),
    Curve("explained variance of the critic", ("train/explained_variance",)),
    Curve("env steps per second", ("time/env_steps_per_s",)),
)


class SummaryError(UserError):
    """Raised when summary.json is missing or damaged."""


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the contents of a run's summary.json.

    Raises:
        SummaryError: it is missing or damaged.
    """
    path = run_dir / SUMMARY_FILE
    try:
        summary = json.loads(path.read_text())
        damaged = not isinstance(summary, dict) or any(
            not isinstance(summary.get(name), kind) for name, kind in SUMMARY.items()
        )
        for iteration, found in () if damaged else summary["evaluations"].items():
            evaluation_row(str(int(iteration)), found)
    except FileNotFoundError as error:
        raise SummaryError(f"{run_dir} holds no {SUMMARY_FILE}: give the directory of a run that ended") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        damaged = True
    if damaged:
        raise SummaryError(f"{path} is damaged: have it written anew with embodyrl resume {run_dir}")
    return dict(summary)


def write_report(run_dir: Path) -> Path:
    """Build report.html from summary.json, config.yaml, metrics.jsonl (no curves without it), graph.mmd and videos/ of
    a run directory; returns its path.

    Raises:
        SummaryError: summary.json is missing or damaged.
    """
    metrics = run_dir / METRICS_FILE
    rows = read_rows(metrics)[0] if metrics.exists() else []
    summary = read_summary(run_dir)
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    text = PAGE.format(
        title=html.escape(f"{summary['name']}, seed {summary['seed']}"),
        subtitle=html.escape(
            f"{summary['iterations']} iterations, {summary['env_steps']} env steps in {summary['wall_s']:.0f} s "
            f"({summary['env_steps_per_s']:.0f} per second); {versions}; config {summary['config_hash'][:12]}"
        ),
        curves="".join(draw(curve, rows) for curve in CURVES),
        evaluations="".join(evaluation_row(step, each) for step, each in sorted_evaluations(summary)),
        times=where_time_went(rows),
        videos=videos(run_dir),
        iteration=drawn_iteration(run_dir / GRAPH_FILE),
        config=html.escape((run_dir / "config.yaml").read_text(errors="replace")),
    )
    path = run_dir / REPORT_FILE
    write_whole(path, text)
    return path


def videos(run_dir: Path) -> str:
    """Return the section that shows the newest video and links to the others; empty for a run without videos."""
    names = [f"{VIDEOS}/{path.name}" for path in sorted((run_dir / VIDEOS).glob("*.mp4"))]
    if not names:
        return ""
    links = ", ".join(f'<a href="{html.escape(name)}">{html.escape(Path(name).stem)}</a>' for name in names)
    newest = f'<video controls preload="metadata" style="max-width: 100%" src="{html.escape(names[-1])}"></video>'
    return f"<h2>Videos of evaluation episodes</h2>\n<p>{links}</p>\n{newest}\n"


def drawn_iteration(path: Path) -> str:
    """Return the section with the Mermaid text of the iteration; empty if there is none."""
    if not path.is_file():
        return ""
    return f"<h2>Iteration</h2>\n<pre>{html.escape(path.read_text(errors='replace'))}</pre>\n"


def sorted_evaluations(summary: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Return iteration and metrics of every evaluation, in order."""
    return sorted(summary["evaluations"].items(), key=lambda item: int(item[0]))


def evaluation_row(iteration: str, metrics: dict[str, float]) -> str:
    """Return one row of the table of evaluations."""
    cells = [
        iteration,
        f"{metrics['eval/success_once']:.2f}",
        f"{metrics['eval/success_low']:.2f} to {metrics['eval/success_high']:.2f}",
        f"{metrics['eval/return']:.2f}",
        f"{metrics['eval/episode_length']:.0f}",
        f"{metrics['eval/episodes']:.0f}",
        "sampled" if metrics.get("eval/sampled") else "likeliest",
    ]
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>\n"


def draw(curve: Curve, rows: Sequence[dict[str, Any]]) -> str:
    """Draw a curve as an SVG figure: evaluations as points, other metrics as a line. Empty if there are no points."""
    series = {key: found for key in curve.keys if (found := points_of(key, rows))}
    points = [point for each in series.values() for point in each]
    if not points:
        return ""
    right = max(x for x, _ in points) or 1.0
    low, high = min(y for _, y in points), max(y for _, y in points)
    if high == low:
        low, high = low - 0.5, high + 0.5

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = MARGIN + point[0] / right * (WIDTH - MARGIN - 12)
        return x, 12 + (high - point[1]) / (high - low) * (HEIGHT - 40)

    shapes = []
    for key, each in series.items():
        placed = [place(point) for point in each]
        if key.startswith("eval/"):
            shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#c2410c"/>' for x, y in placed]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            shapes.append(f'<polyline points="{path}" fill="none" stroke="#2563eb" stroke-width="1.5"/>')
    labels = (
        f'<text x="2" y="16">{high:.3g}</text><text x="2" y="{HEIGHT - 28}">{low:.3g}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 8}">0</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 8}" text-anchor="end">{right:,.0f} env steps</text>'
    )
    svg = f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(shapes)}{labels}</svg>'
    return f"<figure>{svg}<figcaption>{html.escape(curve.title)}</figcaption></figure>\n"


def points_of(key: str, rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return `(env steps, value)` of every row that has the metric; iteration 0 is at 0 env steps."""
    return [(row.get("env/total_steps", 0.0), row[key]) for row in rows if row.get(key) is not None]


# ---- where the time went: a stack of phases for every iteration, and their sums

STACKS_WIDTH, STACKS_HEIGHT = 880, 160
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
    tallest, width = max(heights) or 1.0, STACKS_WIDTH / len(groups)
    boxes = []
    for number, group in enumerate(groups):
        top = float(STACKS_HEIGHT)
        for phase in Phase:
            seconds = _sum(group, f"time/{phase}") / len(group)
            height = seconds / tallest * STACKS_HEIGHT
            top -= height
            boxes.append(
                f'<rect x="{number * width:.1f}" y="{top:.1f}" width="{0.9 * width:.1f}" height="{height:.1f}" '
                f'fill="{COLOURS[phase]}"><title>{phase} {seconds:.3g} s</title></rect>'
            )
    what = "iteration" if per_stack == 1 else f"{per_stack} iterations (mean)"
    return (
        f'<figure><svg width="{STACKS_WIDTH}" height="{STACKS_HEIGHT}" role="img">{"".join(boxes)}</svg>'
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
