"""The screen: a live table on a terminal, as wide as it is, and plain lines with all columns in a pipe."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Group
from rich.live import Live
from rich.text import Text

from embodyrl.screen import bar, duration, fold, telling
from embodyrl.terminal import Console
from embodyrl.tracking.clock import Phase
from embodyrl.tracking.sinks import SinkContext

PLAIN_INTERVAL_S = 2.0
"""Shortest time between two plain lines, so that a fast run does not flood a log file [s]."""
PLAIN_HEADER_EVERY = 20
LIVE_ROWS = 12
SHOWN_PHASES = (Phase.simulate, Phase.render, Phase.infer, Phase.train)
ITERATION, SPLIT, ETA = "iteration", "phases", "eta"
"""Keys of the columns that are no metrics."""
NO_NUMBER = "-"
GAP = "  "
"""Between two columns."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table."""

    title: str
    key: str
    width: int
    format: str = ""
    beside: str | None = None
    """Another metric without which it is not shown; None: it needs none."""


SUCCESS = "env/success_recent"
ROLLOUTS = (
    Column(title="env steps", key="env/total_steps", width=10, format=",.0f"),
    Column(title="return", key="env/return_recent", width=9, format=".2f"),
    Column(title="success", key=SUCCESS, width=7, format=".2f"),
)
"""Columns from the first rollout on; `return` and `success` are means over the newest training episodes."""
LEARNING = (
    Column(title="answer", key="env/answer", width=6, format=".2f"),
    Column(title="differs", key="env/disagreement", width=7, format=".0%"),
    Column(title="replay", key="replay/fill", width=6, format=".0%"),
    Column(title="expert", key="env/interventions", width=6, format=".0%"),
    Column(title="updates", key="train/updates", width=8, format=",.0f"),
    Column(title="Q", key="train/q", width=7, format=".2f"),
    Column(title="weight", key="train/weight", width=7, format=".2f"),
    Column(title="loss", key="train/actor_loss", width=8, format=".4f", beside="train/weight"),
    Column(title="loss", key="train/flow_loss", width=8, format=".4f"),
    Column(title="loss", key="train/loss", width=8, format=".4f"),
    Column(title="alpha", key="train/temperature", width=7, format=".4f"),
    Column(title="entropy", key="train/entropy", width=7, format=".2f", beside="train/temperature"),
    Column(title="kl", key="train/approx_kl", width=7, format=".4f"),
    Column(title="clip", key="train/clip_fraction", width=5, format=".2f"),
    Column(title="expl.var", key="train/explained_variance", width=8, format=".2f"),
)
"""Columns from the first number on: `answer` is the mean of what was answered about episodes whose reward was asked
for, `differs` the share of those of which the simulator says otherwise, `expert` the share of the decisions that an
expert has taken over, `weight` the mean of what actions weigh in imitation."""
SPEED = Column(title="steps/s", key="time/env_steps_per_s", width=7, format=",.0f")
"""Of rollouts."""
WITHOUT_ROLLOUTS = (
    Column(title="grad norm", key="train/grad_norm", width=9, format=".3f"),
    Column(title="learning rate", key="train/learning_rate", width=13, format=".2e"),
)
"""Further columns of a run that learns from demonstrations alone."""
OF_THE_NEWEST = "return, success: means over the newest 100 training episodes, or all of this rollout if these are more"
"""What a table of a run with rollouts begins with."""

FIRST = Column(title="iter", key=ITERATION, width=5)
LAST = (
    Column(title=f"{'/'.join(SHOWN_PHASES)}/rest", key=SPLIT, width=len(f"{'/'.join(SHOWN_PHASES)}/rest")),
    Column(title="eta", key=ETA, width=7),
)
DROPPED = (
    *(SPLIT, "train/explained_variance", "train/entropy", "train/temperature", "replay/fill", "train/updates"),
    *("train/clip_fraction", "train/learning_rate", "train/grad_norm", "env/interventions", "train/q", "train/weight"),
    *("train/approx_kl", SPEED.key, "env/total_steps", ETA),
)
"""Columns that a narrow terminal does without, the first one first; all others are always shown."""


class ConsoleSink:
    """Shows iterations as they finish, messages between them, and the progress of slow work.

    Args:
        context: of the run.
        console: to write to; None: stdout.
    """

    def __init__(self, context: SinkContext, console: Console | None = None) -> None:
        self._console = console or Console()
        self._context = context
        self._training_s = 0.0
        self._last_line = float("-inf")
        self._lines = 0
        self._rows: deque[dict[str, str]] = deque(maxlen=LIVE_ROWS)
        self._metrics: set[str] = set()
        """Names of all that were logged."""
        self._header: list[str] = []
        """Titles over the newest plain lines."""
        self._closing = ExitStack()
        if self._console.is_terminal:
            live = Live(get_renderable=self.view, console=self._console, refresh_per_second=4, transient=False)
            self._live: Live | None = self._closing.enter_context(live)
        else:
            self._live = None
            self._closing.enter_context(telling())

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show one iteration."""
        if "time/iteration" not in metrics:  # the evaluation before training
            return
        if not self._metrics and "env/steps" in metrics:
            self.message(OF_THE_NEWEST)
        self._metrics |= metrics.keys()
        self._training_s += metrics["time/iteration"]
        cells = cells_of(metrics) | {
            ITERATION: str(iteration),
            SPLIT: split_of_time(metrics),
            ETA: duration(self._remaining(iteration)),
        }
        if self._live is not None:
            self._rows.append(cells)
            self._live.refresh()
        elif iteration == self._context.iterations or time.monotonic() - self._last_line >= PLAIN_INTERVAL_S:
            self._plain_line(cells)

    def message(self, text: str) -> None:
        """Show a line above the table."""
        width = self._console.width if self._live is not None else None
        self._console.print(fold(text, width), soft_wrap=True)

    def close(self) -> None:
        """Stop updating the table."""
        self._closing.close()

    def _remaining(self, iteration: int) -> float:
        """Return the seconds that the remaining iterations will take, without evaluations."""
        per_iteration = self._training_s / (iteration - self._context.start_iteration)
        return per_iteration * (self._context.iterations - iteration)

    @property
    def _columns(self) -> tuple[Column, ...]:
        """Those of what was logged so far: a run may begin without rollouts, or without a finished episode."""
        return (FIRST, *columns_for(self._metrics), *LAST)

    def _plain_line(self, cells: Mapping[str, str]) -> None:
        columns = self._columns
        widths, titles = [column.width for column in columns], [column.title for column in columns]
        if self._lines % PLAIN_HEADER_EVERY == 0 or titles != self._header:
            self.message(_line(titles, widths))
            self._header = titles
        self.message(_line([cells.get(column.key, NO_NUMBER) for column in columns], widths))
        self._last_line = time.monotonic()
        self._lines += 1

    def view(self) -> Group:
        """Return what is redrawn: the newest rows, and a bar below them. Other threads add rows meanwhile."""
        width = self._console.width
        return Group(table(list(self._rows), self._columns, width), bar(width))


def table(rows: Sequence[Mapping[str, str]], columns: Sequence[Column], width: int) -> Text:
    """Return rows as a table for a terminal: columns are left out until no number has to be cut.

    Args:
        rows: text by key, see `cells_of`; `-` stands where a key is missing.
        columns: of the run, in their order.
        width: of the terminal.
    """
    shown = fitting(rows, columns, width)
    widths = [_width(rows, column) for column in shown]
    titles = _line([column.title for column in shown], widths)
    lines = [_line([row.get(column.key, NO_NUMBER) for column in shown], widths) for row in rows]
    # Not a Table of rich, which cuts what is too wide, or lays it out in two lines.
    return Text.assemble((titles, "bold"), *("\n" + line for line in lines), no_wrap=True, overflow="ignore")


def fitting(rows: Sequence[Mapping[str, str]], columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that a terminal has room for, see `DROPPED`."""
    left = list(columns)
    for key in DROPPED:
        if _needed(rows, left) <= width:
            break
        left = [column for column in left if column.key != key]
    return left


def _needed(rows: Sequence[Mapping[str, str]], columns: Sequence[Column]) -> int:
    """Return the width of a table of these columns."""
    return sum(_width(rows, column) for column in columns) + len(GAP) * (len(columns) - 1)


def _width(rows: Sequence[Mapping[str, str]], column: Column) -> int:
    return max(column.width, *(len(row.get(column.key, NO_NUMBER)) for row in rows), 0)


def cells_of(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics of an iteration that have a column as text, by key."""
    columns = (*ROLLOUTS, *source_columns(metrics), *LEARNING, SPEED, *WITHOUT_ROLLOUTS)
    return {column.key: format(metrics[column.key], column.format) for column in columns if column.key in metrics}


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return GAP.join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def columns_for(metrics: Set[str]) -> tuple[Column, ...]:
    """Return the columns for a run with metrics of these names."""
    own = [
        column for column in LEARNING if column.key in metrics and (column.beside is None or column.beside in metrics)
    ]
    if "env/steps" in metrics:
        return (*ROLLOUTS, *source_columns(metrics), *own, SPEED)
    is_alone = "replay/fill" not in metrics
    return (*own, *(column for column in WITHOUT_ROLLOUTS if is_alone and column.key in metrics))


def source_columns(metrics: Iterable[str]) -> list[Column]:
    """Return a column with the success of each simulator of a mix, under its name."""
    names = [name.removeprefix(f"{SUCCESS}/") for name in metrics if name.startswith(f"{SUCCESS}/")]
    return [
        Column(title=name, key=f"{SUCCESS}/{name}", width=max(len(name), 7), format=".2f") for name in sorted(names)
    ]


def split_of_time(metrics: Mapping[str, float]) -> str:
    """Return the shares of an iteration's time: of the phases shown, and of all others together [%]."""
    shares = [100.0 * metrics.get(f"time/{phase}", 0.0) / metrics["time/iteration"] for phase in SHOWN_PHASES]
    return "/".join(f"{share:3.0f}" for share in [*shares, 100.0 - sum(shares)]) + " %"
