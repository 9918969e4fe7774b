"""What people read while a program works: text folded to the width of the terminal, and the progress of long work.

Whoever works says so with `task`; whoever has the screen shows it with `showing`, or has it in a display of its own by
`bar`. Nothing is shown of work that is over within `SLOW_S`, and nothing at all where nobody has the screen.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from embodyrl.errors import without_controls

if TYPE_CHECKING:  # rich takes a tenth of a second to import
    from rich.console import RenderableType

SLOW_S = 5.0
"""Seconds from which on the progress of a task is shown."""
PLAIN_EVERY_S = 30.0
"""Seconds between two lines about a task where the screen is no terminal."""
LOOK_EVERY_S = 1.0
"""Seconds between two looks at the tasks there."""
BAR_WIDTH = 20
_ROW = re.compile(r" *(?:\S+(?: \S+)* {2,}|(?<= ) {2,})(?=\S)")
"""The beginning of a row `name     text`, up to its text."""
_COMMAND = re.compile(r" *(?:next:? +)?(?:embodyrl|tensorboard) ")
"""The beginning of a line with a command, which is to be copied whole."""


# ---- text


def counted(number: float, what: str) -> str:
    """Return a number of things in words, as in `1 rank`, `2 ranks`, `0.5 updates`, `1,024 env steps`."""
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{ending}" if isinstance(number, int) else f"{number:g} {what}{ending}"


def terminal_width() -> int | None:
    """Return the number of columns of the terminal that stdout is; None if it is a pipe or a file."""
    if not sys.stdout.isatty():
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except OSError:
        return None


def fold(text: str, width: int | None) -> str:
    """Break lines between words so that they fit `width` columns (None: any length). What a row of the form
    `name     text` continues with stands below its text. A word that is longer, such as a path, stays whole, and so
    does a command, so that they can be copied."""
    if width is None:
        return text
    return "\n".join("\n".join(_folded(line, width)) for line in text.split("\n"))


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width or _COMMAND.match(line):
        return [line]
    row = _ROW.match(line)
    indent = min(row.end() if row else len(line) - len(line.lstrip()) + 2, width // 3)
    start = row.end() if row else 0
    first, _, rest = line[start:].partition(" ")
    if start + len(first) > width:  # it stays beside its name
        further = _folded(" " * indent + rest.lstrip(), width) if rest.strip() else []
        return [line[:start] + first, *further]
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
        replace_whitespace=False,
    )


def say(text: str) -> None:
    """Print text for people at once, folded to the terminal, without characters that would change its state."""
    print(fold(without_controls(text), terminal_width()), flush=True)


@contextmanager
def announced(text: str) -> Iterator[None]:
    """Show a line during a block, on a terminal only; whatever follows takes its place."""
    shown = sys.stdout.isatty()
    if shown:
        print(without_controls(text), end="", flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\033[K", end="", flush=True)


def duration(seconds: float) -> str:
    """Return a time as `m:ss` or `h:mm:ss`."""
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def rounded(seconds: float) -> str:
    """Return a time in words, as precise as people ask for it: `0.52 s`, `40 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# ---- progress


class Task:
    """Work that is under way.

    Args:
        title: what is done, as in `evaluating`.
        total: parts of the work; None: nobody knows.
        unit: what the parts are, as in `episodes`.
    """

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = 0
        """Parts that are done."""
        self.note = ""
        """What else there is to say of them."""
        self._begun = time.monotonic()

    def advance(self, parts: int = 1) -> None:
        """Count parts that are done."""
        self.done += parts

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._begun

    @property
    def left(self) -> str:
        """The time that is left, as far as the parts done tell; the time since the beginning if they do not."""
        if not self.total or not self.done:
            return f"{duration(self.seconds)} so far"
        return f"{duration(self.seconds * max(self.total - self.done, 0) / self.done)} left"

    def line(self) -> str:
        """Return it as text."""
        parts = f"  {self.done:,} of {self.total:,} {self.unit}" if self.total else ""
        note = f"  {self.note}" if self.note else ""
        return f"{self.title}{parts}{note}  {self.left}"


_tasks: list[Task] = []
"""Tasks under way in this process, the innermost last."""


@contextmanager
def task(title: str, total: int | None = None, unit: str = "") -> Iterator[Task]:
    """Count a block as a task under way; see `Task`."""
    current = Task(title, total, unit)
    _tasks.append(current)
    try:
        yield current
    finally:
        _tasks.remove(current)


def slow_task() -> Task | None:
    """Return the innermost task of those that have taken `SLOW_S`, if possible one that is counted; None if there is
    none."""
    slow = [each for each in list(_tasks) if each.seconds >= SLOW_S]
    best = [each for each in slow if each.total] or slow
    return best[-1] if best else None


def bar(width: int) -> RenderableType:
    """Return a bar of the task that is shown now, at most `width` columns wide; nothing if there is none."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    current = slow_task()
    if current is None:
        return Group()
    room = min(BAR_WIDTH, width - len(current.line()) - 4)
    if room < 5 or not current.total:
        return Text(current.line(), no_wrap=True, overflow="ignore")
    row = Table.grid(padding=(0, 2))
    known = ProgressBar(total=current.total, completed=min(current.done, current.total), width=room)
    row.add_row(current.title, known, current.line().removeprefix(current.title).strip())
    return row


@contextmanager
def showing() -> Iterator[None]:
    """Show the progress of slow tasks during a block: a bar below everything else on a terminal, lines in a pipe."""
    if terminal_width() is None:
        with telling():
            yield
        return

    from rich.live import Live

    from embodyrl.terminal import Console

    console = Console()
    with Live(get_renderable=lambda: bar(console.width), console=console, refresh_per_second=4, transient=True):
        yield


@contextmanager
def telling() -> Iterator[None]:
    """Print lines about slow tasks during a block."""
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(over,), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _tell(over: threading.Event) -> None:
    last = float("-inf")
    while not over.wait(LOOK_EVERY_S):
        current = slow_task()
        if current is not None and time.monotonic() - last >= PLAIN_EVERY_S:
            last = time.monotonic()
            print(without_controls(current.line()), flush=True)
