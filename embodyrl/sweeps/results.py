"""Results of a sweep: a row for each run, mean and interval over the seeds of each setting, and the best setting."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from embodyrl.files import write_whole
from embodyrl.runs.record import RunRecord, sorted_evaluations
from embodyrl.sweeps.axes import SEED, Point
from embodyrl.sweeps.folder import Plan, State, state_of
from embodyrl.sweeps.progress import short_names
from embodyrl.tracking.intervals import mean_interval, rate_interval

RUNS_FILE = "runs.csv"
SETTINGS_FILE = "settings.csv"
RESULTS_FILE = "results.json"
SUCCESS, RETURN = "eval/success_once", "eval/return"
METRICS = {SUCCESS: "success", RETURN: "return"}
"""Metrics of the last evaluation that are compared, and their names in tables."""


@dataclass(frozen=True)
class RunResult:
    """What one run has reached."""

    point: Point
    state: State
    """Of a run that is not finished, the rest are its results so far."""
    summary: Mapping[str, Any]
    """Contents of its summary.json; empty if there is none."""
    evaluation: Mapping[str, float]
    """Metrics of its last evaluation; empty if there is none."""

    def row(self) -> dict[str, Any]:
        """Return it as columns."""
        numbers = {key: self.summary.get(key) for key in ("seed", "iterations", "env_steps", "wall_s")}
        return {"run": self.point.name, **self.point.values, "state": self.state.value, **numbers, **self.evaluation}


@dataclass(frozen=True)
class SettingResult:
    """What the finished runs of one setting have reached, over their seeds."""

    values: Mapping[str, str]
    """The swept settings, without the seed."""
    runs: int
    finished: int
    metrics: Mapping[str, Sequence[float]]
    """For each of `METRICS` the values of the finished runs."""
    episodes: Sequence[int]
    """Episodes behind each value of success."""

    def row(self) -> dict[str, Any]:
        """Return it as columns: for each metric the mean and its 95 % interval."""
        cells: dict[str, Any] = {**self.values, "runs": self.runs, "finished": self.finished}
        for key, values in self.metrics.items():
            low, high = self.interval(key) or (None, None)
            cells |= {key: fmean(values) if values else None, f"{key}/low": low, f"{key}/high": high}
        return cells

    def interval(self, key: str) -> tuple[float, float] | None:
        """Return the 95 % interval of a metric's mean over seeds: of a rate `rate_interval`; None where there is none,
        as for the return of one seed."""
        values = self.metrics[key]
        return rate_interval(values, self.episodes) if key == SUCCESS else mean_interval(values)

    def mean(self, key: str) -> float:
        """Return the mean of a metric; minus infinity without any value."""
        return fmean(self.metrics[key]) if self.metrics[key] else float("-inf")


@dataclass(frozen=True)
class Results:
    """Results of a sweep."""

    runs: Sequence[RunResult]
    settings: Sequence[SettingResult]

    @property
    def best(self) -> SettingResult | None:
        """The setting with the highest mean success, at equal success with the highest mean return; None if no run has
        finished, or there is one setting."""
        found = max(self.settings, key=lambda each: (each.mean(SUCCESS), each.mean(RETURN)))
        return found if len(self.settings) > 1 and found.metrics[RETURN] else None

    @property
    def is_complete(self) -> bool:
        """Whether all runs have finished."""
        return all(run.state is State.finished for run in self.runs)


def read_results(path: Path, plan: Plan) -> Results:
    """Read the results of all runs of a sweep, whatever their state."""
    runs = [_read_run(path / point.name, point) for point in plan.points]
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        groups.setdefault(run.point.setting, []).append(run)
    return Results(runs, [_over_seeds(group) for group in groups.values()])


def _read_run(run_dir: Path, point: Point) -> RunResult:
    summary = RunRecord(run_dir).summary
    evaluations = sorted_evaluations(summary)
    return RunResult(point, state_of(run_dir), summary or {}, evaluations[-1][1] if evaluations else {})


def _over_seeds(runs: Sequence[RunResult]) -> SettingResult:
    finished = [run for run in runs if run.state is State.finished]
    evaluations = [run.evaluation for run in finished if run.evaluation]
    metrics = {key: [each[key] for each in evaluations if key in each] for key in METRICS}  # success may be unknown
    episodes = [round(each["eval/episodes"]) for each in evaluations if SUCCESS in each]
    values = {key: value for key, value in runs[0].point.values.items() if key != SEED}
    return SettingResult(values, len(runs), len(finished), metrics, episodes)


def write_results(path: Path, results: Results) -> None:
    """Write runs.csv, settings.csv and results.json into the folder of a sweep."""
    runs, settings = ([each.row() for each in rows] for rows in (results.runs, results.settings))
    best = results.best
    found = {"runs": runs, "settings": settings, "best": None if best is None else best.row()}
    write_whole(path / RESULTS_FILE, json.dumps(found, indent=2) + "\n")
    for name, rows in ((RUNS_FILE, runs), (SETTINGS_FILE, settings)):
        write_whole(path / name, to_csv(rows))


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with all columns that any of them has."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def results_table(results: Results) -> Table:
    """Return a table with a row for each setting; the best one is marked."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", overflow="fold")
    for title in ("seeds", *METRICS.values()):
        table.add_column(title, justify="right", no_wrap=True)
    best = results.best
    names = short_names([setting.values for setting in results.settings])
    for name, setting in zip(names, results.settings, strict=True):
        seeds = f"{setting.finished}" + (f" of {setting.runs}" if setting.finished < setting.runs else "")
        cells = [_cell(setting, key) for key in METRICS]
        table.add_row(name + (" *" if setting is best else ""), seeds, *cells)
    return table


def _cell(setting: SettingResult, key: str) -> str:
    """Return the mean of a metric with its interval."""
    values = setting.metrics[key]
    if not values:
        return "-"
    text, interval = f"{fmean(values):.2f}", setting.interval(key)
    if interval is None:
        return text
    low, high = interval
    return f"{text} [{low:.2f}, {high:.2f}]"


def remarks(results: Results) -> Iterator[str]:
    """Yield what the table does not say."""
    if any(len(setting.metrics[RETURN]) > 1 for setting in results.settings):
        yield "mean over seeds of the last evaluation, with the 95 % interval of the mean"
    best = results.best
    if best is not None:
        part = "" if results.is_complete else ", of the runs that have finished"
        yield f"* best by success, then return{part}"
