"""`embodyrl watch`: a run in the terminal, from its files."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from embodyrl.errors import UserError, shell_command, without_controls
from embodyrl.runner.stopping import Interrupted
from embodyrl.runs import CONFIG_FILE, LOCK_FILE, LOG_FILE, published, runs_below
from embodyrl.runs.metrics import seconds_of
from embodyrl.runs.record import ENDED, FAILED, TIMED, EvaluationRecord, RunRecord, Status
from embodyrl.screen import counted, duration, fold
from embodyrl.terminal import Console
from embodyrl.tracking.console import FIRST, ITERATION, LAST, SPLIT, cells_of, columns_for, split_of_time, table

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the files."""
DEPTH = 3
"""Levels of folders below a folder in which runs are looked for."""
SHOWN_ROWS = 8
SHOWN_NOTES = 4
WORTH_SEEING = ("warning:", FAILED, "replaced a simulator process", "nothing was learned")
"""What lines of run.log begin with that are shown."""
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


class WatchError(UserError):
    """Raised when there is no run to watch, or no more."""

    exit_code = 2


def find_runs(folder: Path) -> list[Path]:
    """Return the runs at or below a folder that have been started, by name.

    Raises:
        WatchError: there is none.
    """
    if not folder.is_dir():
        raise WatchError(f"{folder}: no such folder: give the directory of a run, or a folder of runs")
    below = runs_below(folder, DEPTH, follow_links=False)
    if found := [path for path in below if (path / LOCK_FILE).exists()]:
        return found
    raise WatchError(f"{folder} holds no run (a folder with {CONFIG_FILE} and {LOG_FILE} that `embodyrl run` made)")


def watch(folder: Path, *, once: bool) -> int:
    """Show a run, or all runs below a folder, until they have ended or Ctrl-C; returns the exit code."""
    paths = find_runs(folder)
    runs, console = [RunRecord(path) for path in paths], Console()

    def look() -> tuple[RenderableType, bool]:
        runs[:] = [run.again() for run in runs]
        for path in paths:
            if not (path / CONFIG_FILE).is_file():
                raise WatchError(f"{path} has no {CONFIG_FILE} any more: it was removed")
        drawn = draw(runs[0], console.width) if paths == [folder] else draw_all(runs, folder, console.width)
        return drawn, all(run.status in ENDED for run in runs)

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


def draw(run: RunRecord, width: int) -> Group:
    """Return a run on a terminal of so many columns."""
    parts: list[Text] = _progress(run)
    if run.final is not None:
        parts.append(_row("evaluation", _evaluated(run.final)))
    parts += [_row(title, curve(values, width - 40)) for title, values in _curves(run)]
    if speed := _speed(run):
        parts.append(_row("speed", speed))
    if (memory := memory_of(run.process)) is not None:
        size, count = memory
        parts.append(_row("memory", f"{size / 2**30:.1f} GiB in {counted(count, 'process')}"))
    notes = [line for line in run.log if line[TIMED:].startswith(WORTH_SEEING)]
    parts += [Text(fold(f"  {line[11:19]}   {line[TIMED:]}", width), "yellow") for line in notes[-SHOWN_NOTES:]]
    if newest := run.training[-SHOWN_ROWS:]:
        filled = [{key: value for key, value in row.items() if value is not None} for row in newest]
        columns = (FIRST, *columns_for(set().union(*filled)), LAST[0])
        cells = [cells_of(row) | {ITERATION: str(row["iteration"]), SPLIT: split_of_time(row)} for row in filled]
        parts += [Text(""), table(cells, columns, width)]
    # The path is not folded, so that it can be copied whole, with its spaces, too.
    return Group(
        _fitted(_title(run), width),
        Text(without_controls(f"  {run.path}")),
        *(_fitted(part, width) for part in parts),
    )


def _fitted(text: Text, width: int) -> Text:
    """Return a text with its lines folded; one that fits keeps its styles."""
    if max(map(len, text.plain.split("\n"))) > width:
        return Text(fold(text.plain, width), text.style)
    return text


def _title(run: RunRecord) -> Text:
    said = {
        Status.running: f"running (process {run.process})" if run.process else "running",
        Status.died: "died: no process here works on it, and none said that it ended",
        Status.not_started: "not started: no results, and no process works on it",
    }
    what = said.get(run.status, run.status.value)
    return Text.assemble((without_controls(run.name), "bold"), "  ", (what, COLORS[run.status]))


def _progress(run: RunRecord) -> list[Text]:
    rows = []
    if run.iterations is not None and run.status is not Status.not_started:
        share = min(run.last_iteration / max(run.iterations, 1), 1.0)
        bar = "━" * round(20 * share)
        left = "" if run.left_s is None else f", {duration(run.left_s)} left"
        spent = duration(seconds_of(run.training))
        text = f"{run.last_iteration:,} of {run.iterations:,}  {bar}{'─' * (20 - len(bar))}  {spent}{left}"
        rows.append(_row("iteration", text))
    if run.status in (Status.failed, Status.stopped):
        rows.append(_row("because", run.reason))
    if run.status in (Status.died, Status.failed, Status.stopped) and published(run.path):
        rows.append(_row("next", shell_command("resume", run.path)))
    quiet = run.silent_s is not None and run.silent_s >= QUIET_S
    if run.status is Status.running and quiet:
        rows.append(_row("quiet", f"nothing was written for {duration(run.silent_s or 0.0)}"))
    if run.status is Status.running and not run.rows:
        rows.append(_row("starting", "no results yet"))
    return rows


def _row(title: str, text: str) -> Text:
    return Text(without_controls(f"  {title:<12}{text}"))


def _evaluated(final: EvaluationRecord) -> str:
    interval = "" if final.interval is None else " [{:.2f}, {:.2f}]".format(*final.interval)
    episodes = counted(int(final.metrics["eval/episodes"]), "episode")
    mean = final.metrics["eval/return"]
    return f"success {_rate(final)}{interval}  return {mean:.2f}  {episodes}, iteration {final.iteration}"


def _rate(final: EvaluationRecord) -> str:
    return "-" if final.success is None else f"{final.success:.2f}"


def _curves(run: RunRecord) -> list[tuple[str, list[float]]]:
    found = [(title, [row[key] for row in run.rows if row.get(key) is not None]) for title, key in CURVES]
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


def _speed(run: RunRecord) -> str:
    newest = run.training[-SHOWN_ROWS:]
    rates = [rate for row in newest if (rate := row.get("time/env_steps_per_s"))]
    if not rates:
        return ""
    total = newest[-1].get("env/total_steps") or 0.0
    return f"{sum(rates) / len(rates):,.0f} env steps per second, {total:,.0f} in all"


def memory_of(process: int | None) -> tuple[int, int] | None:
    """Return the memory of a process and those that it started [bytes] and their number; None if they are not here.
    Memory that they share counts once for each."""
    if not process:
        return None
    try:
        first = psutil.Process(process)
        sizes = [_size(each) for each in (first, *first.children(recursive=True))]
    except psutil.Error:
        return None
    return sum(sizes), len(sizes)


def _size(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


# ---- several runs


def draw_all(runs: Sequence[RunRecord], folder: Path, width: int) -> Group:
    """Return a line for each of several runs."""
    lines = []
    for run in runs:
        name = without_controls(str(run.path.relative_to(folder)) if run.path != folder else run.name)
        of = "" if run.iterations is None else f"/{run.iterations}"
        left = "" if run.left_s is None else f"  {duration(run.left_s)} left"
        curves = dict(reversed(_curves(run)))
        success = "" if run.final is None else f"  success {_rate(run.final)}"
        lines.append((name, run.status, f"{run.last_iteration}{of}{success}{left}", curves.get("return")))
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
