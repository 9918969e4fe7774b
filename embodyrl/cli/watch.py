"""`embodyrl watch`: a run in the terminal, from its files."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from embodyrl.errors import shell_command, without_controls
from embodyrl.runner.checkpoint import published
from embodyrl.runner.stopping import Interrupted
from embodyrl.runner.watching import ENDED, RunView, RunWatcher, Status, find_runs
from embodyrl.screen import counted, duration, fold
from embodyrl.terminal import Console
from embodyrl.tracking.console import FIRST, ITERATION, LAST, SPLIT, cells_of, columns_for, split_of_time, table

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the files."""
SHOWN_ROWS = 8
SHOWN_NOTES = 4
QUIET_S = 120.0
"""Seconds without a sign of life that are worth a remark."""
BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = (
    ("held out", "eval/success_once"),
    ("success", "env/success_recent"),
    ("return", "env/return_recent"),
    ("loss", "train/loss"),
    ("entropy", "train/entropy"),
    ("kl", "train/approx_kl"),
)
"""Titles and metrics of the curves, as far as the run has them."""
COLORS = {
    Status.running: "green",
    Status.done: "bold",
    Status.stopped: "yellow",
    Status.failed: "red",
    Status.died: "red",
    Status.not_started: "dim",
}


def watch(folder: Path, *, once: bool) -> int:
    """Show a run, or all runs below a folder, until they have ended or Ctrl-C; returns the exit code.

    Args:
        folder: of a run or of several.
        once: show it a single time.
    """
    runs = find_runs(folder)
    watchers = [RunWatcher(path) for path in runs]
    console = Console()

    def look() -> tuple[RenderableType, bool]:
        views = [watcher.look() for watcher in watchers]
        drawn = draw(views[0], console.width) if runs == [folder] else draw_all(views, folder, console.width)
        return drawn, all(view.status in ENDED for view in views)

    if once or not sys.stdout.isatty():
        console.print(look()[0], soft_wrap=True)  # the terminal breaks long commands, which can be copied so
        return 0
    try:
        follow(look, console)
    except Interrupted as stop:
        if stop.exit_code != 130:
            raise
    return 0


def follow(look: Callable[[], tuple[RenderableType, bool]], console: Console) -> None:
    """Show what `look` returns until it says that there is nothing to wait for."""
    drawn, over = look()
    with Live(drawn, console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while not over:
            time.sleep(LOOK_EVERY_S)
            drawn, over = look()
            live.update(drawn, refresh=True)


# ---- one run


def draw(view: RunView, width: int) -> Group:
    """Return a run on a terminal of so many columns."""
    parts: list[Text] = _progress(view)
    if evaluation := view.evaluation:
        parts.append(_row("evaluation", _evaluated(evaluation)))
    parts += [_row(title, curve(values, width - 40)) for title, values in _curves(view)]
    if speed := _speed(view):
        parts.append(_row("speed", speed))
    if (memory := view.memory()) is not None:
        size, count = memory
        parts.append(_row("memory", f"{size / 2**30:.1f} GiB in {counted(count, 'process')}"))
    parts += [Text(fold(f"  {line[11:19]}   {line[21:]}", width), "yellow") for line in view.notes[-SHOWN_NOTES:]]
    if newest := view.training[-SHOWN_ROWS:]:
        columns = (FIRST, *columns_for(newest[-1]), LAST[0])
        filled = [{key: value for key, value in row.items() if value is not None} for row in newest]
        cells = [
            cells_of(row, columns) | {ITERATION: str(row["iteration"]), SPLIT: split_of_time(row)} for row in filled
        ]
        parts += [Text(""), table(cells, columns, width)]
    # The path is not folded, so that it can be copied whole, with its spaces, too.
    return Group(
        _fitted(_title(view), width),
        Text(without_controls(f"  {view.path}")),
        *(_fitted(part, width) for part in parts),
    )


def _fitted(text: Text, width: int) -> Text:
    """Return a text with its lines folded; one that fits keeps its styles."""
    if max(map(len, text.plain.split("\n"))) > width:
        return Text(fold(text.plain, width), text.style)
    return text


def _title(view: RunView) -> Text:
    said = {
        Status.running: "running" if view.pid is None else f"running (process {view.pid})",
        Status.died: "died: no process here works on it, and none said that it ended",
        Status.not_started: "not started: no results, and no process works on it",
    }
    what = said.get(view.status, view.status.value)
    return Text.assemble((view.name, "bold"), "  ", (what, COLORS[view.status]))


def _progress(view: RunView) -> list[Text]:
    rows = []
    if view.iterations is not None and view.status is not Status.not_started:
        share = min(view.iteration / max(view.iterations, 1), 1.0)
        bar = "━" * round(20 * share)
        spent = sum((row["time/iteration"] or 0.0) + (row.get("time/eval") or 0.0) for row in view.training)
        left = "" if view.left_s is None else f", {duration(view.left_s)} left"
        text = f"{view.iteration:,} of {view.iterations:,}  {bar}{'─' * (20 - len(bar))}  {duration(spent)}{left}"
        rows.append(_row("iteration", text))
    if view.status in (Status.failed, Status.stopped):
        rows.append(_row("because", view.reason))
    if view.status in (Status.died, Status.failed, Status.stopped) and published(view.path):
        rows.append(_row("next", shell_command("resume", view.path)))
    quiet = view.silent_s is not None and view.silent_s >= QUIET_S
    if view.status is Status.running and quiet:
        rows.append(_row("quiet", f"nothing was written for {duration(view.silent_s or 0.0)}"))
    if view.status is Status.running and not view.rows:
        rows.append(_row("starting", "no results yet"))
    return rows


def _row(title: str, text: str) -> Text:
    return Text(without_controls(f"  {title:<12}{text}"))


def _evaluated(row: dict[str, Any]) -> str:
    low, high = row.get("eval/success_low"), row.get("eval/success_high")
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    mean = row.get("eval/return")
    reward = "" if mean is None else f"  return {mean:.2f}"
    episodes = row.get("eval/episodes") or 0.0
    return f"success {_rate(row)}{interval}{reward}  {counted(int(episodes), 'episode')}, iteration {row['iteration']}"


def _rate(row: dict[str, Any]) -> str:
    rate = row.get("eval/success_once")
    return "-" if rate is None else f"{rate:.2f}"


def _curves(view: RunView) -> list[tuple[str, list[float]]]:
    found = [(title, [row[key] for row in view.rows if row.get(key) is not None]) for title, key in CURVES]
    return [(title, values) for title, values in found if len(values) > 1]


def curve(values: Sequence[float], width: int) -> str:
    """Return values as a line of blocks, each the mean of as many neighbours as it takes to fit, with the first and
    the last value and the range."""
    count = max(8, min(len(values), width))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    drawn = "".join(BLOCKS[round((mean - low) * scale)] for mean in means)
    return f"{drawn}  {_number(values[0])} -> {_number(values[-1])}"


def _number(value: float) -> str:
    return f"{value:.2f}" if 0.01 <= abs(value) < 1e5 or value == 0 else f"{value:.1e}"


def _speed(view: RunView) -> str:
    newest = view.training[-SHOWN_ROWS:]
    rates = [rate for row in newest if (rate := row.get("time/env_steps_per_s"))]
    if not rates:
        return ""
    total = newest[-1].get("env/total_steps") or 0.0
    return f"{sum(rates) / len(rates):,.0f} env steps per second, {total:,.0f} in all"


# ---- several runs


def draw_all(views: Sequence[RunView], folder: Path, width: int) -> Group:
    """Return a line for each of several runs."""
    lines = []
    for view in views:
        name = without_controls(str(view.path.relative_to(folder))) if view.path != folder else view.name
        of = "" if view.iterations is None else f"/{view.iterations}"
        left = "" if view.left_s is None else f"  {duration(view.left_s)} left"
        curves = dict(reversed(_curves(view)))
        success = "" if view.evaluation is None else f"  success {_rate(view.evaluation)}"
        lines.append((name, view.status, f"{view.iteration}{of}{success}{left}", curves.get("return")))
    longest = max(len(name) for name, *_ in lines)
    drawn = []
    for name, status, text, values in lines:
        start = f"{name:<{longest}}  "
        room = width - len(start) - 13 - len(text) - 2 - 24
        line = Text.assemble(start, (f"{status.value:<11}  ", COLORS[status]), text)
        if values and room >= 8:
            line.append("  return " + curve(values, room))
        line.no_wrap, line.overflow = True, "ignore"
        drawn.append(line)
    return Group(*drawn)
