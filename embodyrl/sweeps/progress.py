"""What the runs of a sweep are doing: read from their metrics, shown with a line for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.live import Live
from rich.table import Table

from embodyrl.errors import without_controls
from embodyrl.runs import CONSOLE_FILE, METRICS_FILE
from embodyrl.runs.metrics import NEWEST, MetricsReader, seconds_left
from embodyrl.screen import duration
from embodyrl.terminal import Console

PLAIN_EVERY_S = 30.0
"""Interval of the lines about a run in a pipe, beside those about its beginning and end [s]."""
OTHER_LINES = 4
"""Lines of the screen beside those of the runs."""
NARROW = 100
"""Width of a screen from which on there is room for all columns."""


@dataclass
class Task:
    """A run that is to be started or continued, and its line on the screen."""

    name: str
    """Its settings, as short as they are clear."""
    arguments: list[str]
    """Those of `embodyrl` for it."""
    run_dir: Path
    iterations: int
    state: str = "waiting"
    started: float | None = None
    """On the clock of `time.monotonic`; None while it does not run."""
    seconds: float = 0.0
    """Time that it ran, once it has ended."""
    reason: str = ""
    """Why it failed, or was stopped."""

    def __post_init__(self) -> None:
        self.metrics = MetricsReader(self.run_dir / METRICS_FILE, most_rows=NEWEST)

    @property
    def log(self) -> Path:
        """File with what it shows."""
        return self.run_dir / CONSOLE_FILE

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self.started is not None

    def cells(self) -> dict[str, str]:
        """Return its columns."""
        latest = self.metrics.latest
        success, evaluated = (latest.get(name) for name in ("env/success_recent", "eval/success_once"))
        left = seconds_left(self.metrics.rows, self.iterations) if self.is_running else None
        elapsed = time.monotonic() - self.started if self.started is not None else self.seconds
        return {
            "run": self.name,
            "state": self.state,
            "iter": f"{iteration}/{self.iterations}" if (iteration := latest.get("iteration")) else "-",
            "success": "-" if success is None else f"{success:.2f}",
            "eval": "-" if evaluated is None else f"{evaluated:.2f}",
            "time": duration(elapsed) if elapsed else "-",
            "eta": "-" if left is None else duration(left),
        }


class Screen:
    """Shows the runs: a table that is kept up to date on a terminal, lines in a pipe.

    Args:
        tasks: of all runs.
        shown: whether anything is printed.
        note: writes lines into a log.
    """

    def __init__(self, tasks: Sequence[Task], *, shown: bool, note: Callable[[str], None]) -> None:
        self._tasks = tasks
        self._note = note
        self._shown = shown
        self._console = Console()
        self._last: dict[str, float] = {}
        self._live: Live | None = None
        if shown and self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._table, refresh_per_second=2, vertical_overflow="crop"
            )
            self._live.start()

    def update(self) -> None:
        """Read what the runs have written, and show it where nothing refreshes itself."""
        for task in self._tasks:
            if task.is_running:
                task.metrics.read()
                if self._shown and self._live is None and task.metrics.latest.get("iteration"):
                    self._plain(task)

    def _plain(self, task: Task) -> None:
        now = time.monotonic()
        if now - self._last.setdefault(task.name, now) < PLAIN_EVERY_S:
            return
        self._last[task.name] = now
        cells = task.cells()
        self.say(
            f"{task.name}: iteration {cells['iter']}, success {cells['success']}, evaluated {cells['eval']}, eta "
            f"{cells['eta']}"
        )

    def say(self, text: str) -> None:
        """Show a line, above the table if there is one."""
        text = without_controls(text)
        self._note(text)
        if self._shown:
            self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        """Show the last state, and stop updating."""
        if self._live is not None:
            self._live.refresh()
            self._live.stop()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        tasks = self._on_screen()
        narrow = self._console.width < NARROW
        for title in ("run", "state", "iter", "success", "eval", "time", "eta"):
            if not (narrow and title == "time"):
                justify = "left" if title in ("run", "state") else "right"
                table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
        for task in tasks:
            cells = task.cells()
            table.add_row(*(without_controls(cells[str(column.header)]) for column in table.columns))
        hidden = len(self._tasks) - len(tasks)
        counts = ", ".join(f"{count} {state}" for state, count in self._counts().items())
        table.caption = counts + (f" ({hidden} not shown)" if hidden else "")
        table.caption_justify = "left"
        return table

    def _counts(self) -> dict[str, int]:
        states = [task.state for task in self._tasks]
        return {state: states.count(state) for state in dict.fromkeys(states)}

    def _on_screen(self) -> list[Task]:
        """Return the tasks for which there is room: if not for all, those that run first, then those that failed."""
        room = max(1, self._console.height - OTHER_LINES)
        if len(self._tasks) <= room:
            return list(self._tasks)
        urgent = sorted(self._tasks, key=lambda task: (not task.is_running, task.state != "failed", not task.seconds))
        chosen = {id(task) for task in urgent[:room]}
        return [task for task in self._tasks if id(task) in chosen]


def short_names(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return settings as text, each key by its last part where that is enough."""
    keys = list(dict.fromkeys(key for each in settings for key in each))
    lasts = [key.rpartition(".")[2] for key in keys]
    short = {key: last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)}
    return [" ".join(f"{short[key]}={value}" for key, value in each.items()) or "all" for each in settings]
