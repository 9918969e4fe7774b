"""report.html of one run."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from embodyrl.config.rules import described_tasks, known_tasks
from embodyrl.files import write_whole
from embodyrl.runs import CONFIG_FILE, GRAPH_FILE, ROBUSTNESS, VIDEOS
from embodyrl.runs.metrics import Row, seconds_of
from embodyrl.runs.record import EvaluationRecord, RunRecord
from embodyrl.runs.robustness import VIDEO_FILE, measured_checkpoint, read_robustness
from embodyrl.screen import counted, rounded
from embodyrl.tracking.clock import Phase
from embodyrl.tracking.report.charts import MOST_STACKS, PHASE_COLOURS, Item, chart, library, stacks
from embodyrl.tracking.report.compare import by_source, by_task, changes_from_defaults
from embodyrl.tracking.report.robustness import robustness_svg
from embodyrl.tracking.report.series import CURVES, curves_of

EMBEDDED_MIB = 8.0
"""Videos in the page itself, newest first, up to this size together; of others it has links, relative to its folder."""
MOST_EPISODES = 200
"""Episodes in the table of failures."""
MOST_WARNINGS = 12
"""Warnings of run.log that are shown."""


@dataclass(frozen=True)
class Figure:
    """A chart on a page."""

    name: str
    """Id of its element."""
    title: str
    note: str


@dataclass(frozen=True)
class Video:
    """A video of evaluation episodes."""

    name: str
    source: str
    """Address: the video itself, or its file relative to the page."""
    embedded: bool


class Charts:
    """Charts of a page, by the element in which they are drawn."""

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}

    def add(self, title: str, note: str, item: Item) -> Figure:
        """Add a chart; returns its place on the page."""
        name = f"chart-{len(self.items)}"
        self.items[name] = item
        return Figure(name, title, note)


def write_page(run: RunRecord, path: Path) -> Path:
    """Write the page of a run; returns its path."""
    write_whole(path, page_of(run, path.absolute().parent))
    return path


def page_of(run: RunRecord, place: Path) -> str:
    """Return the page of a run, for a file in the folder `place`."""
    charts, videos = Charts(), videos_of(run, place)
    x_label = "env steps" if run.env_steps else "iteration"
    figures: dict[str, list[Figure]] = {"results": [], "learning": [], "time": []}
    for curve in CURVES:
        if series := curves_of(run, curve):
            item = chart(
                series, x_label=x_label, percent=curve.percent, whole=curve.section == "results" and curve.percent
            )
            figures[curve.section].append(charts.add(curve.title, curve.note, item))
    return render(
        "run.html.j2",
        charts.items,
        title=run.name if run.seed is None else f"{run.name}, seed {run.seed}",
        run=run,
        by_task=by_task,
        by_source=by_source,
        config=run.text(CONFIG_FILE),
        graph=run.text(GRAPH_FILE),
        tiles=tiles(run),
        warnings=warnings_of(run),
        figures=figures,
        stacks=stacks_of(run, charts),
        times=times_of(run.rows),
        memory=memory_of(run),
        first=run.evaluations[0] if run.evaluations else None,
        descriptions=task_descriptions_of(run),
        episodes=failures_first(run.final),
        all_episodes=len(run.final.episodes) if run.final else 0,
        robustness=robustness_of(run, place),
        videos=videos,
        gallery=gallery(run, videos),
        changes=changes_from_defaults(run.config),
        machine=machine_of(run),
        versions=(run.summary or {}).get("versions", {}),
        metrics=extremes(run.rows),
    )


def render(template: str, items: Mapping[str, Item], **values: Any) -> str:
    """Fill a page's template. All values are escaped by Jinja; charts and the library are scripts."""
    environment = Environment(
        loader=PackageLoader("embodyrl.tracking.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "seconds": rounded}
    return environment.get_template(template).render(charts=as_script(items), bokeh=Markup(library()), **values)


def as_script(data: object) -> Markup:
    """Return data as JSON that can stand inside of a script element, whatever texts it has."""
    text = json.dumps(data, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def number(value: float | None) -> str:
    """Write a number for a table, with four digits that say something."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def percent(rate: float | None) -> str:
    """Write a rate as percent, without decimals that an evaluation cannot resolve; one that is unknown as a dash."""
    if rate is None:
        return "–"
    shown = round(100.0 * rate, 1)
    return f"{shown:.0f} %" if shown in (0.0, 100.0) or 10.0 <= shown <= 90.0 else f"{shown:.1f} %"


def tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the figures at the top: what, the number, and what belongs to it."""
    found: list[tuple[str, str, str]] = []
    if (final := run.final) is not None:
        interval = "unknown, the simulator does not report it"
        if final.interval is not None:
            interval = "95 % interval {} to {}".format(*map(percent, final.interval))
        note = f"{interval}, {counted(int(final.metrics['eval/episodes']), 'episode')}"
        found.append(("success", percent(final.success), note))
        before = f"{number(run.evaluations[0].metrics['eval/return'])} at first" if len(run.evaluations) > 1 else ""
        found.append(("return", number(final.metrics["eval/return"]), before))
    if run.env_steps:
        found.append(("env steps", number(run.env_steps), counted(run.last_iteration, "iteration")))
    else:
        found.append(("iterations", number(run.last_iteration), "no env steps"))
    if run.summary is not None:
        speed = f"{number(run.summary['env_steps_per_s'])} env steps/s" if run.env_steps else ""
        found.append(("wall clock", rounded(run.summary["wall_s"]), speed))
    elif run.last_iteration:
        found.append(("so far", rounded(seconds_of(run.rows)), "iterations and evaluations"))
    return found


def warnings_of(run: RunRecord) -> list[str]:
    """Return the first warnings of run.log, each once."""
    return list(dict.fromkeys(line for line in run.said if line.startswith("warning")))[:MOST_WARNINGS]


def machine_of(run: RunRecord) -> dict[str, str]:
    """Return facts about the machine: those of summary.json, and what the first screen said of it."""
    kept = (run.summary or {}).get("machine")
    facts = {str(name): str(value) for name, value in kept.items()} if isinstance(kept, dict) else {}
    for row in ("machine", "placement"):
        said = [line.strip().removeprefix(row).strip() for line in run.said if line.split()[:1] == [row]]
        facts |= {row: said[-1]} if said else {}
    return facts


def task_descriptions_of(run: RunRecord) -> dict[str, str]:
    """Return the task description of each task of the last evaluation for which the config or the simulator has one."""
    own, simulator = run.setting("env", "task_descriptions"), run.setting("env", "name")
    tasks = {rate.name for rate in by_task(run.final)} if run.final else set()
    known = set(known_tasks(simulator) or ()) if isinstance(simulator, str) else set()
    found: dict[str, str] = described_tasks(str(simulator), tasks & known) if tasks & known else {}
    own_texts = {str(task): str(text) for task, text in own.items()} if isinstance(own, dict) else {}
    return {task: text for task, text in (found | own_texts).items() if text != task}


# ---- time and memory


def stacks_of(run: RunRecord, charts: Charts) -> Figure | None:
    """Return the chart of seconds by phase, or None for a run without iterations."""
    rows = run.training
    if not rows:
        return None
    size = -(-len(rows) // MOST_STACKS)
    groups = [rows[first : first + size] for first in range(0, len(rows), size)]
    means = [{phase: total(group, f"time/{phase}") / len(group) for phase in Phase} for group in groups]
    what = "each iteration" if size == 1 else f"iterations, means of {size}"
    item = stacks(means, [group[0]["iteration"] for group in groups], size)
    return charts.add("Seconds by phase", f"Of {what}, evaluations left out.", item)


def times_of(rows: Sequence[Row]) -> list[tuple[str, str, float, float, float, float]]:
    """Return a row for each phase that took time: phase, its colour, seconds of iterations and their share, the same of
    evaluations; the last row is the sum."""
    every, evaluations = total(rows, "time/iteration"), total(rows, "time/eval")
    found = []
    for phase in Phase:
        parts = total(rows, f"time/{phase}"), total(rows, f"time/eval/{phase}")
        if any(parts):
            shares = parts[0] / every if every else 0.0, parts[1] / evaluations if evaluations else 0.0
            found.append((phase.value, PHASE_COLOURS[phase], parts[0], shares[0], parts[1], shares[1]))
    if found:
        found.append(("all", "", every, 1.0, evaluations, 1.0 if evaluations else 0.0))
    return found


def total(rows: Sequence[Row], key: str) -> float:
    """Return the sum of a metric over the rows that have it."""
    return float(sum(row.get(key) or 0.0 for row in rows))


def memory_of(run: RunRecord) -> list[tuple[str, float]]:
    """Return what of memory is known [MiB]: the largest use of the run, and what offloading freed."""
    kept = (run.summary or {}).get("memory_mib")
    found = {str(name): value for name, value in kept.items()} if isinstance(kept, dict) else {}
    for row in run.rows:
        for key, value in row.items():
            if key.startswith("memory/") and value is not None:
                name = f"freed by offloading: {key.removeprefix('memory/').removesuffix('_freed_mib')}"
                found[name] = max(value, found.get(name, 0.0))
    return [(name, float(value)) for name, value in found.items() if isinstance(value, int | float)]


def extremes(rows: Sequence[Row]) -> list[tuple[str, float, float, float, float]]:
    """Return name, first, last, smallest and largest value of every metric."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None and name != "iteration":
                found.setdefault(name, []).append(value)
    return [(name, each[0], each[-1], min(each), max(each)) for name, each in sorted(found.items())]


# ---- robustness


def robustness_of(run: RunRecord, place: Path) -> dict[str, Any] | None:
    """Return what `embodyrl eval --robustness` found of the run's policy: rows, figure, and the address of the video;
    None if it was not asked for, or has not ended its first evaluations."""
    rows = read_robustness(run.path)
    if len(rows) < 2:
        return None
    video = run.path / ROBUSTNESS / VIDEO_FILE
    address = quote(Path(os.path.relpath(video.absolute(), place)).as_posix()) if video.is_file() else ""
    known = rows[0].success is not None
    figure = Markup(robustness_svg(rows)) if known else ""
    return {"rows": rows, "figure": figure, "video": address, "checkpoint": measured_checkpoint(run.path)}


# ---- episodes and videos


def failures_first(evaluation: EvaluationRecord | None) -> list[tuple[int, Row]]:
    """Return the episodes of an evaluation with their numbers, from 1: failures first, those with the least return
    before others; no more than `MOST_EPISODES`."""
    if evaluation is None:
        return []
    numbered = enumerate(evaluation.episodes, start=1)
    ordered = sorted(numbered, key=lambda each: (bool(each[1]["success"]), each[1]["total_reward"]))
    return ordered[:MOST_EPISODES]


def videos_of(run: RunRecord, place: Path) -> list[Video]:
    """Return the videos of a run, newest first: those that fit are in the page, of others it has the address."""
    room, found = EMBEDDED_MIB * 2**20, []
    for path in sorted((run.path / VIDEOS).glob("*.mp4"), reverse=True):
        size = path.stat().st_size
        embedded = 0 < size <= room
        if embedded:
            room -= size
            source = "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
        else:
            source = quote(Path(os.path.relpath(path.absolute(), place)).as_posix())
        found.append(Video(path.stem, source, embedded))
    return found


def gallery(run: RunRecord, videos: Sequence[Video]) -> dict[str, Any] | None:
    """Return the episodes that the newest video shows, failures first, each with its place among the video's tiles;
    None if that is not known."""
    newest = videos[0].name if videos else ""
    shown = next((each for each in run.evaluations if newest == f"iteration_{each.iteration:06d}"), None)
    if shown is None or not shown.episodes or not run.recorded:
        return None
    columns = math.ceil(math.sqrt(run.recorded))
    tiles = [
        {"number": place + 1, "column": place % columns, "row": place // columns, **episode}
        for place, episode in enumerate(shown.episodes[: run.recorded])
    ]
    tiles.sort(key=lambda tile: (bool(tile["success"]), tile["total_reward"]))
    return {
        "iteration": shown.iteration,
        "columns": columns,
        "rows": math.ceil(run.recorded / columns),
        "tiles": tiles,
        "failed": None
        if all(tile["success"] is None for tile in tiles)
        else sum(tile["success"] is False for tile in tiles),
    }
