"""The page of several runs, and their numbers as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from embodyrl.files import write_whole
from embodyrl.runs import REPORT_FILE
from embodyrl.runs.record import RunRecord
from embodyrl.screen import counted
from embodyrl.tracking.report.charts import chart
from embodyrl.tracking.report.compare import (
    Experiment,
    differing_settings,
    evaluations_of,
    group,
    training_of,
    x_key_of,
)
from embodyrl.tracking.report.page import Charts, Figure, render
from embodyrl.tracking.report.series import COLOURS, CURVES, Curve

SEED_BAND = (
    "Line: mean over seeds. Band: from the smallest to the largest seed. A single run has 95 % Wilson intervals."
)
MOST_METRICS = 12
"""Diagrams of what is learned, at most."""


def write_comparison(runs: Sequence[RunRecord], out: Path) -> Path:
    """Write the page of several runs; returns its path."""
    experiments = group(runs)
    charts = Charts()
    write_whole(
        out,
        render(
            "comparison.html.j2",
            charts.items,
            title=title_of(experiments),
            experiments=experiments,
            colours=COLOURS,
            results=results_of(experiments, charts),
            learning=learning_of(experiments, charts),
            differing=differing_settings(experiments),
            tasks=tasks_of(experiments),
            reports=[[report_beside(run, out) for run in each.runs] for each in experiments],
        ),
    )
    return out


def title_of(experiments: Sequence[Experiment]) -> str:
    """Return the title of the page."""
    runs = sum(len(each.runs) for each in experiments)
    if len(experiments) == 1:
        return f"{experiments[0].name}, {counted(runs, 'seed')}"
    return f"{counted(len(experiments), 'experiment')}, {counted(runs, 'run')}"


def results_of(experiments: Sequence[Experiment], charts: Charts) -> list[Figure]:
    """Return the charts of evaluations, and of training where it has the same metric."""
    x_key, found = x_key_of(experiments), []
    x_label = "iteration" if x_key == "iteration" else "env steps"
    for curve in (each for each in CURVES if each.evaluated):
        if series := evaluations_of(experiments, curve.evaluated, x_key):
            item = chart(series, x_label=x_label, percent=curve.percent, whole=curve.whole)
            found.append(charts.add(f"{curve.title}, evaluations", SEED_BAND, item))
    training = (_training(experiments, each, charts, x_label, f"{each.title}, training") for each in CURVES[:2])
    return [*found, *(figure for figure in training if figure is not None)]


def learning_of(experiments: Sequence[Experiment], charts: Charts) -> list[Figure]:
    """Return the charts of what is learned and how fast."""
    x_label = "iteration" if x_key_of(experiments) == "iteration" else "env steps"
    drawn = (_training(experiments, each, charts, x_label, each.title) for each in CURVES if not each.evaluated)
    return [figure for figure in drawn if figure is not None][:MOST_METRICS]


def _training(
    experiments: Sequence[Experiment], curve: Curve, charts: Charts, x_label: str, title: str
) -> Figure | None:
    series, window = training_of(experiments, curve)
    if not series:
        return None
    note = "" if window == 1 else f"Running means of {window} iterations."
    return charts.add(title, note, chart(series, x_label=x_label, percent=curve.percent, whole=curve.whole))


def tasks_of(experiments: Sequence[Experiment]) -> list[tuple[str, list[Any]]]:
    """Return each task with every experiment's success in it (None where it was not evaluated)."""
    rates = [each.by_task() for each in experiments]
    return [
        (task, [each.get(task) for each in rates]) for task in dict.fromkeys(name for each in rates for name in each)
    ]


def report_beside(run: RunRecord, out: Path) -> str:
    """Return the address of a run's own report, seen from the page; empty if it has none."""
    path = run.path / REPORT_FILE
    return quote(Path(os.path.relpath(path.absolute(), out.absolute().parent)).as_posix()) if path.is_file() else ""


# ---- numbers


def write_data(runs: Sequence[RunRecord], folder: Path) -> list[Path]:
    """Write experiments.csv (the table), evaluations.csv and metrics.csv (a line per run and iteration) and
    experiments.json (all but the rows of metrics) into a folder; returns their paths."""
    experiments = group(runs)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_table_row(each) for each in experiments]
    evaluations: list[dict[str, Any]] = [
        {"experiment": each.name, "seed": run.seed, "run": str(run.path), "iteration": found.iteration}
        | {"env_steps": found.env_steps} | found.metrics
        for each in experiments for run in each.runs for found in run.evaluations
    ]  # fmt: skip
    metrics = [
        {"experiment": each.name, "seed": run.seed, "run": str(run.path)} | row
        for each in experiments for run in each.runs for row in run.rows
    ]  # fmt: skip
    whole = [
        row | {
            "settings": dict(each.settings),
            "tasks": {name: _rate(rate.successes, rate.trials, rate.interval) for name, rate in each.by_task().items()},
            "evaluations": [found for found in evaluations if found["experiment"] == each.name],
        }
        for each, row in zip(experiments, rows, strict=True)
    ]  # fmt: skip
    texts = {
        "experiments.csv": as_csv(rows),
        "evaluations.csv": as_csv(evaluations),
        "metrics.csv": as_csv(metrics),
        "experiments.json": json.dumps(whole, indent=2, allow_nan=False) + "\n",
    }
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with a column for each key that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _safe_cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _safe_cell(value: Any) -> Any:
    """Return a text that no spreadsheet takes for a formula; other values as they are."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value


def _table_row(each: Experiment) -> dict[str, Any]:
    returns = each.mean("eval/return")
    low, high = each.over_seeds or (None, None)
    pooled = each.over_episodes or (None, None)
    return {
        "experiment": each.name,
        "seeds": each.seeds,
        "runs": len(each.runs),
        "success_mean": each.success,
        "success_low_over_seeds": low,
        "success_high_over_seeds": high,
        "success_low_over_episodes": pooled[0],
        "success_high_over_episodes": pooled[1],
        "success_by_seed": " ".join(f"{rate:.4f}" for rate, _ in each.rates),
        "return_mean": None if returns is None else returns[0],
        "env_steps_mean": _mean(run.env_steps for run in each.runs),
        "wall_s_mean": _mean(run.summary["wall_s"] for run in each.runs if run.summary is not None),
    }


def _rate(successes: int, trials: int, interval: tuple[float, float]) -> dict[str, float]:
    return {"successes": successes, "episodes": trials, "low": interval[0], "high": interval[1]}


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return math.fsum(found) / len(found) if found else None
