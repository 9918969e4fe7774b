"""The screen: a live table on a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table

from embodyrl.tracking.clock import Phase
from embodyrl.tracking.sinks import SinkContext

PLAIN_INTERVAL_S = 2.0
"""Shortest time between two plain lines, so that a fast run does not flood a log file [s]."""
PLAIN_HEADER_EVERY = 20
LIVE_ROWS = 12
SHOWN_PHASES = (Phase.simulate, Phase.render, Phase.infer, Phase.train)
SPLIT_TITLE = f"{'/'.join(SHOWN_PHASES)}/rest"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table."""

    title: str
    key: str
    width: int
    format: str


ROLLOUTS = (
    Column(title="env steps", key="env/total_steps", width=10, format=",.0f"),
    Column(title="return", key="env/return", width=9, format=".2f"),
    Column(title="success", key="env/success_once", width=7, format=".2f"),
    Column(title="kl", key="train/approx_kl", width=7, format=".4f"),
    Column(title="clip", key="train/clip_fraction", width=5, format=".2f"),
    Column(title="expl.var", key="train/explained_variance", width=8, format=".2f"),
    Column(title="steps/s", key="time/env_steps_per_s", width=7, format=",.0f"),
)
"""Columns of a run with rollouts."""
REPLAY = (
    *ROLLOUTS[:2],
    Column(title="success", key="env/success_recent", width=7, format=".2f"),
    Column(title="replay", key="replay/fill", width=6, format=".0%"),
    Column(title="updates", key="train/updates", width=8, format=",.0f"),
    Column(title="Q", key="train/q", width=7, format=".2f"),
    Column(title="alpha", key="train/temperature", width=7, format=".4f"),
    Column(title="entropy", key="train/entropy", width=7, format=".2f"),
    ROLLOUTS[-1],
)
"""Columns of a run that learns from a replay; `success` is that of the newest 30 episodes."""
EXPERT = Column(title="expert", key="env/interventions", width=6, format=".0%")
"""Share of the decisions that an expert has taken over."""
CORRECTED = (*REPLAY[:4], EXPERT, *REPLAY[4:])
"""Columns of a run that learns from a replay, with an expert beside the policy."""
DEMONSTRATIONS = (
    Column(title="loss", key="train/loss", width=8, format=".4f"),
    Column(title="grad norm", key="train/grad_norm", width=9, format=".3f"),
    Column(title="learning rate", key="train/learning_rate", width=13, format=".2e"),
)
"""Columns of a run that only learns from demonstrations."""
IMITATION = (*REPLAY[:4], EXPERT, REPLAY[4], DEMONSTRATIONS[0], ROLLOUTS[-1])
"""Columns of a run that imitates an expert beside the policy."""
WEIGHED = (
    *REPLAY[:6],
    Column(title="weight", key="train/weight", width=7, format=".2f"),
    Column(title="loss", key="train/actor_loss", width=8, format=".4f"),
    ROLLOUTS[-1],
)
"""Columns of a run that imitates what is worth most: `weight` is the mean of what actions weigh."""


class ConsoleSink:
    """Shows iterations as they finish, and messages between them."""

    def __init__(self, context: SinkContext) -> None:
        self._console = Console()
        self._context = context
        self._training_s = 0.0
        self._last_line = float("-inf")
        self._lines = 0
        self._rows: deque[list[str]] = deque(maxlen=LIVE_ROWS)
        self._columns: tuple[Column, ...] = ROLLOUTS
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show one iteration."""
        if "time/iteration" not in metrics:  # the evaluation before training
            return
        self._columns = columns_for(metrics)
        self._training_s += metrics["time/iteration"]
        cells = self._cells(iteration, metrics)
        if self._live is not None:
            self._rows.append(cells)
            self._live.update(self._table())
        elif iteration == self._context.iterations or time.monotonic() - self._last_line >= PLAIN_INTERVAL_S:
            self._plain_line(cells)

    def message(self, text: str) -> None:
        """Show a line above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop updating the table."""
        if self._live is not None:
            self._live.stop()

    def _cells(self, iteration: int, metrics: Mapping[str, float]) -> list[str]:
        cells = [str(iteration)]
        cells += [
            format(metrics[column.key], column.format) if column.key in metrics else "-" for column in self._columns
        ]
        return [*cells, split_of_time(metrics), self._remaining(iteration)]

    def _remaining(self, iteration: int) -> str:
        """Return the time that the remaining iterations will take, without evaluations."""
        per_iteration = self._training_s / (iteration - self._context.start_iteration)
        seconds = round(per_iteration * (self._context.iterations - iteration))
        minutes, hours = seconds // 60, seconds // 3600
        return f"{hours}:{minutes % 60:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"

    def _plain_line(self, cells: list[str]) -> None:
        widths = [5, *(column.width for column in self._columns), len(SPLIT_TITLE), 7]
        if self._lines % PLAIN_HEADER_EVERY == 0:
            titles = ["iter", *(column.title for column in self._columns), SPLIT_TITLE, "eta"]
            self.message("  ".join(title.rjust(width) for title, width in zip(titles, widths, strict=True)))
        self.message("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
        self._last_line = time.monotonic()
        self._lines += 1

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ["iter", *(column.title for column in self._columns), SPLIT_TITLE, "eta"]:
            table.add_column(title, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table


def columns_for(metrics: Mapping[str, float]) -> tuple[Column, ...]:
    """Return the columns for a run with such metrics."""
    if "train/value_loss" in metrics and "train/updates" in metrics:
        return WEIGHED
    if "train/updates" in metrics and "train/temperature" not in metrics:
        return IMITATION
    if "replay/fill" in metrics:
        return CORRECTED if EXPERT.key in metrics else REPLAY
    return ROLLOUTS if "env/steps" in metrics else DEMONSTRATIONS


def split_of_time(metrics: Mapping[str, float]) -> str:
    """Return the shares of an iteration's time: of the phases shown, and of all others together [%]."""
    shares = [100.0 * metrics.get(f"time/{phase}", 0.0) / metrics["time/iteration"] for phase in SHOWN_PHASES]
    return "/".join(f"{share:3.0f}" for share in [*shares, 100.0 - sum(shares)]) + " %"
