"""What the runs of a sweep are doing: read from their metrics, shown with a line for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table

from embodyrl.errors import without_controls
from embodyrl.terminal import Console
from embodyrl.tracking.sinks import METRICS_FILE, read_row

PLAIN_EVERY_S = 30.0
"""Interval of the lines about a run in a pipe, beside those about its beginning and end [s]."""
OTHER_LINES = 4
"""Lines of the screen beside those of the runs."""
NARROW = 100
"""Width of a screen from which on there is room for all columns."""
READ_AT_ONCE = 1 << 20


@dataclass
class Reader:
    """Follows the metrics.jsonl of a run while it grows."""

    path: Path
    iteration: int = 0
    success: float | None = None
    """Of the newest episodes of training."""
    evaluated: float | None = None
    """Success of the newest evaluation."""
    _position: int = 0
    _part: str = ""
    _seconds: list[float] = field(default_factory=list)

    def read(self) -> None:
        """Take in what was added. The sink rewrites the file on resume, which then is read from its start."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return
        if size < self._position:
            self._position, self._part = 0, ""
        if size == self._position:
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read(READ_AT_ONCE)
        self._position += len(data)
        *lines, self._part = (self._part + data.decode(errors="replace")).split("\n")
        for line in lines:
            if (row := read_row(line)) is not None:
                self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        self.iteration = row["iteration"]
        self.success = row.get("env/success_recent", self.success)
        self.evaluated = row.get("eval/success_once", self.evaluated)
        seconds = row.get("time/iteration")
        if seconds is not None:
            self._seconds = [*self._seconds[-49:], seconds + (row.get("time/eval") or 0.0)]

    def remaining(self, iterations: int) -> float | None:
        """Return the time until a number of iterations is done [s]; None if nothing is known yet."""
        if not self._seconds:
            return None
        return sum(self._seconds) / len(self._seconds) * max(0, iterations - self.iteration)


@dataclass
class Line:
    """One run on the screen."""

    name: str
    """Its settings, as short as they are clear."""
    run_dir: Path
    iterations: int
    state: str = "waiting"
    started: float | None = None
    """On the clock of `time.monotonic`; None while it does not run."""
    seconds: float = 0.0
    """Time that it ran, once it has ended."""

    def __post_init__(self) -> None:
        self.reader = Reader(self.run_dir / METRICS_FILE)

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self.started is not None

    def cells(self) -> dict[str, str]:
        """Return its columns."""
        reader, now = self.reader, time.monotonic()
        left = reader.remaining(self.iterations) if self.is_running else None
        elapsed = now - self.started if self.started is not None else self.seconds
        return {
            "run": self.name,
            "state": self.state,
            "iter": f"{reader.iteration}/{self.iterations}" if reader.iteration else "-",
            "success": "-" if reader.success is None else f"{reader.success:.2f}",
            "eval": "-" if reader.evaluated is None else f"{reader.evaluated:.2f}",
            "time": clock(elapsed) if elapsed else "-",
            "eta": "-" if left is None else clock(left),
        }


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds, or with hours."""
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class Screen:
    """Shows the runs: a table that is kept up to date on a terminal, lines in a pipe.

    Args:
        lines: of all runs.
        shown: whether anything is printed.
        note: writes lines into a log.
    """

    def __init__(self, lines: Sequence[Line], *, shown: bool, note: Callable[[str], None]) -> None:
        self._lines = lines
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
        for line in self._lines:
            if line.is_running:
                line.reader.read()
                if self._shown and self._live is None and line.reader.iteration:
                    self._plain(line)

    def _plain(self, line: Line) -> None:
        now = time.monotonic()
        if now - self._last.setdefault(line.name, now) < PLAIN_EVERY_S:
            return
        self._last[line.name] = now
        cells = line.cells()
        self.say(
            f"{line.name}: iteration {cells['iter']}, success {cells['success']}, evaluated {cells['eval']}, eta "
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
        lines = self._on_screen()
        narrow = self._console.width < NARROW
        for title in ("run", "state", "iter", "success", "eval", "time", "eta"):
            if not (narrow and title == "time"):
                justify = "left" if title in ("run", "state") else "right"
                table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
        for line in lines:
            cells = line.cells()
            table.add_row(*(without_controls(cells[str(column.header)]) for column in table.columns))
        hidden = len(self._lines) - len(lines)
        counts = ", ".join(f"{count} {state}" for state, count in self._counts().items())
        table.caption = counts + (f" ({hidden} not shown)" if hidden else "")
        table.caption_justify = "left"
        return table

    def _counts(self) -> dict[str, int]:
        states = [line.state for line in self._lines]
        return {state: states.count(state) for state in dict.fromkeys(states)}

    def _on_screen(self) -> list[Line]:
        """Return the lines for which there is room: if not for all, those that run first, then those that failed."""
        room = max(1, self._console.height - OTHER_LINES)
        if len(self._lines) <= room:
            return list(self._lines)
        urgent = sorted(self._lines, key=lambda line: (not line.is_running, line.state != "failed", not line.seconds))
        chosen = {id(line) for line in urgent[:room]}
        return [line for line in self._lines if id(line) in chosen]


def short_names(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return settings as text, each key by its last part where that is enough."""
    keys = list(dict.fromkeys(key for each in settings for key in each))
    lasts = [key.rpartition(".")[2] for key in keys]
    short = {key: last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)}
    return [" ".join(f"{short[key]}={value}" for key, value in each.items()) or "all" for each in settings]
