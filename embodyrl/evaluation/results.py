"""Results of evaluations that are compared: tables for people, results.json with every episode for others, and
statistics of paired episodes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from embodyrl.evaluation.protocols import Criterion, Protocol
from embodyrl.files import write_whole
from embodyrl.tracking.intervals import outcomes, wilson_interval
from embodyrl.version import __version__

if TYPE_CHECKING:  # imports torch
    from embodyrl.runner.evaluation import EpisodeRecord

FILE = "results.json"
"""Name of the results in their folder."""
SHOWN = 10
"""Most episodes that are listed on the screen."""
WIDE = 80
"""Columns of the screen, up to which evaluations stand side by side."""

Episode = tuple[str, int, int]
"""Task, number of the initial state, and how often it was played before in the same evaluation."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One evaluation among those that are compared."""

    label: str
    """Name in tables."""
    policy: str
    """Place of its weights."""
    protocol: Protocol | None
    """None: the checkpoint's own settings."""
    records: tuple[EpisodeRecord, ...]
    initial_states: tuple[int, ...]
    """Of each record, numbers that mean the same in every row."""
    sampled: bool
    seconds: float
    settings: tuple[Mapping[str, Any], ...]
    """Sections seed, env, eval, rollout and model of its config; several if tasks have different ones."""
    complete: bool = True
    """False: it was interrupted, and some episodes are missing."""
    table: str = ""
    """Title of the table that it belongs to: the protocol, where two policies are compared under several."""

    @property
    def name(self) -> str:
        """Its name among all rows."""
        return f"{self.label}, {self.table}" if self.table else self.label

    @property
    def criterion(self) -> Criterion:
        """Which episodes count as solved."""
        return Criterion.once if self.protocol is None else self.protocol.criterion

    @property
    def solved(self) -> list[bool]:
        """Outcome of each record; empty if the simulator says of none."""
        return outcomes(map(self._said, self.records))

    @cached_property
    def _tasks_with_success(self) -> set[str]:
        """Tasks of which the simulator says what is solved."""
        return {record.task for record in self.records if self._said(record) is not None}

    def is_solved(self, record: EpisodeRecord) -> bool | None:
        """Return whether an episode counts as solved; None: of its task the simulator does not say."""
        return bool(self._said(record)) if record.task in self._tasks_with_success else None

    def _said(self, record: EpisodeRecord) -> bool | None:
        return record.success if self.criterion is Criterion.once else record.success_at_end

    @property
    def rate(self) -> float | None:
        """Success rate, 0 .. 1; None: it is unknown."""
        return sum(self.solved) / len(self.solved) if self.solved else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the success rate; None: it is unknown."""
        return wilson_interval(sum(self.solved), len(self.solved)) if self.solved else None

    @property
    def mean_return(self) -> float:
        """Mean return."""
        return sum(sorted(record.total_reward for record in self.records)) / len(self.records)

    @property
    def mean_length(self) -> float:
        """Mean length [control steps]."""
        return sum(record.length for record in self.records) / len(self.records)

    def by_episode(self) -> dict[Episode, EpisodeRecord]:
        """Return the records by what was played."""
        seen: Counter[tuple[str, int]] = Counter()
        found: dict[Episode, EpisodeRecord] = {}
        for record, state in zip(self.records, self.initial_states, strict=True):
            found[record.task, state, seen[record.task, state]] = record
            seen[record.task, state] += 1
        return found


@dataclass(frozen=True, kw_only=True)
class Differing:
    """An episode that one of two evaluations solved."""

    task: str
    initial_state: int
    first: EpisodeRecord
    second: EpisodeRecord


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Evaluations that are compared with the first of them, or with the first of their table."""

    rows: tuple[Row, ...]
    complete: bool = True
    """False: further evaluations were planned, and not played yet."""

    def tables(self) -> list[Comparison]:
        """Return a comparison for each table: of two policies under several protocols one for each protocol."""
        titles = dict.fromkeys(row.table for row in self.rows)
        return [replace(self, rows=tuple(row for row in self.rows if row.table == title)) for title in titles]

    def first_of(self, row: Row) -> Row:
        """Return the row that a row is compared with: the first of its table."""
        return next(each for each in self.rows if each.table == row.table)

    def shared(self, row: Row) -> list[tuple[Episode, EpisodeRecord, EpisodeRecord]]:
        """Return the episodes that a row and the first of its table both played, with both records."""
        first, second = self.first_of(row).by_episode(), row.by_episode()
        return [(episode, first[episode], second[episode]) for episode in first if episode in second]

    def pairs(self, row: Row) -> Pairs:
        """Count the episodes that a row and the first of its table both played, by outcome."""
        first = self.first_of(row)
        outcomes = ((first.is_solved(one), row.is_solved(other)) for _, one, other in self.shared(row))
        return Pairs.of((one, other) for one, other in outcomes if one is not None and other is not None)

    def differing(self, row: Row) -> list[Differing]:
        """Return the episodes that only one of a row and the first of its table solved."""
        first = self.first_of(row)
        return [
            Differing(task=episode[0], initial_state=episode[1], first=one, second=other)
            for episode, one, other in self.shared(row)
            if first.is_solved(one) != row.is_solved(other)
        ]

    def tasks(self) -> list[str]:
        """Return the tasks in the order in which they were first played."""
        return list(dict.fromkeys(record.task for row in self.rows for record in row.records))

    # ---- for people

    def text(self) -> str:
        """Return the tables."""
        tables = self.tables()
        if len(tables) > 1:
            return "\n\n".join(f"{each.rows[0].table}\n\n{each.text()}" for each in tables)
        blocks = [self._rates()]
        if others := self._with_tasks_of_the_first():
            blocks.append(self._differences(others))
        if len(self.tasks()) > 1:
            blocks.append(self._by_task())
        return "\n\n".join(blocks)

    def _rates(self) -> str:
        lines = [("", "episodes", "success", "95 % interval", "at end", "return", "length")]
        for row in self.rows:
            at_end = [record.success_at_end for record in row.records if record.success_at_end is not None]
            lines.append(
                (
                    row.label + ("" if row.complete else " (interrupted)"),
                    str(len(row.records)),
                    "-" if row.rate is None else f"{row.rate:.2f}",
                    "-" if row.interval is None else "{:.2f} .. {:.2f}".format(*row.interval),
                    f"{sum(at_end) / len(at_end):.2f}" if at_end else "-",
                    f"{row.mean_return:.2f}",
                    f"{row.mean_length:.0f}",
                )
            )
        return table(lines)

    def _with_tasks_of_the_first(self) -> list[Row]:
        """Return the further rows that play a task of the first; variants of a protocol play others."""
        tasks = {record.task for record in self.rows[0].records}
        return [row for row in self.rows[1:] if tasks & {record.task for record in row.records}]

    def _differences(self, others: Sequence[Row]) -> str:
        first = self.rows[0].label
        lines = [(f"against {first}", "pairs", "difference", "95 % interval", "only it", "only other", "p")]
        for row in others:
            pairs = self.pairs(row)
            if pairs.count:
                low, high = pairs.interval
                numbers = (f"{pairs.difference:+.2f}", f"{low:+.2f} .. {high:+.2f}")
                counts = (str(pairs.only_second), str(pairs.only_first), f"{pairs.p_value:.2g}")
                lines.append((row.label, str(pairs.count), *numbers, *counts))
            else:
                why = "success is unknown" if self.shared(row) else "no initial state in common"
                lines.append((row.label, "0", why, "", "", "", ""))
        return table(lines)

    def _by_task(self) -> str:
        """Return the solved episodes of each task, those of rows with tasks in common side by side as far as the screen
        is wide; variants of a protocol play tasks of their own."""
        counts = {task: [self._counted(row, task) for row in self.rows] for task in self.tasks()}
        widest, blocks = max(map(len, counts)), list[list[int]]()
        for number in range(len(self.rows)):
            tasks = {task for task, cells in counts.items() if cells[number] is not None}
            last = blocks[-1] if blocks else []
            columns = widest + sum(2 + max(len(self.rows[other].label), 5) for other in (*last, number))
            if columns <= WIDE and any(counts[task][other] for task in tasks for other in last):
                last.append(number)
            else:
                blocks.append([number])
        return "\n\n".join(self._of_tasks(counts, block) for block in blocks)

    def _of_tasks(self, counts: Mapping[str, Sequence[str | None]], block: Sequence[int]) -> str:
        """Return the table of some rows, with the tasks that they played."""
        shown = {task: [cells[number] for number in block] for task, cells in counts.items()}
        lines = [(task, *(cell or "-" for cell in cells)) for task, cells in shown.items() if any(cells)]
        return table([("task", *(self.rows[number].label for number in block)), *lines])

    @staticmethod
    def _counted(row: Row, task: str) -> str | None:
        """Return how many episodes of a task a row solved, of how many; None if it did not play it."""
        every = [row.is_solved(record) for record in row.records if record.task == task]
        own = [solved for solved in every if solved is not None]
        return (f"{sum(own)}/{len(own)}" if own else "-") if every else None

    def differing_text(self, row: Row) -> str:
        """Return the first of the episodes that only one of two evaluations solved, a line each."""
        found = self.differing(row)
        if not found:
            return "no episode differs"
        lines = [("only solved by", "task", "initial state")]
        for each in found[:SHOWN]:
            first = self.first_of(row)
            solver = first if first.is_solved(each.first) else row
            lines.append((solver.label, each.task, str(each.initial_state)))
        rest = f"\n... and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        return table(lines) + rest

    # ---- for others

    def as_json(self) -> dict[str, Any]:
        """Return everything, as results.json has it; `docs/evaluation.md` describes the entries."""
        return {
            "embodyrl": __version__,
            "complete": self.complete and all(row.complete for row in self.rows),
            "evaluations": [_row_as_json(row) for row in self.rows],
            "differences": [
                _pairs_as_json(table.rows[0], row, table.pairs(row))
                for table in self.tables()
                for row in table.rows[1:]
            ],
        }

    def write(self, folder: Path, further: Mapping[str, Any]) -> Path:
        """Write results.json, with further entries, into a folder, which is made if it is missing; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        write_whole(path, json.dumps(self.as_json() | dict(further), indent=1, allow_nan=False) + "\n")
        return path


def _row_as_json(row: Row) -> dict[str, Any]:
    low, high = row.interval or ((None, None) if row.records else (0.0, 1.0))
    return {
        "name": row.label,
        "policy": row.policy,
        "protocol": None if row.protocol is None else protocol_as_json(row.protocol),
        "complete": row.complete,
        "sampled": row.sampled,
        "counts_as_success": row.criterion.value,
        "episodes": len(row.records),
        "successes": sum(row.solved) if row.solved or not row.records else None,
        "success": row.rate,
        "success_low": low,
        "success_high": high,
        "seconds": row.seconds,
        "settings": list(row.settings),
        "records": [
            _renamed(asdict(record), state) for record, state in zip(row.records, row.initial_states, strict=True)
        ],
    }


def _renamed(record: dict[str, Any], initial_state: int) -> dict[str, Any]:
    record["return"] = record.pop("total_reward")
    return record | {"initial_state": initial_state}


def protocol_as_json(protocol: Protocol) -> dict[str, Any]:
    """Return what identifies a protocol, and what embodyrl does not do as it says."""
    return {
        "name": protocol.name,
        "repository": protocol.repository,
        "commit": protocol.commit,
        "differs": {aspect.name: aspect.differs for aspect in protocol.aspects if aspect.differs},
    }


def _pairs_as_json(first: Row, second: Row, pairs: Pairs) -> dict[str, Any]:
    named = {"protocol": second.table} if second.table else {}
    counts = {"first": first.label, "second": second.label, **named, "pairs": pairs.count, **asdict(pairs)}
    if not pairs.count:
        return counts
    low, high = pairs.interval
    return counts | {"difference": pairs.difference, "low": low, "high": high, "p_value": pairs.p_value}


def table(lines: Sequence[Iterable[str]]) -> str:
    """Return rows of texts as columns: the first column starts at the left, the others end at the right."""
    rows = [list(line) for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    texts = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(text.rstrip() for text in texts)


# ---------------------------------------------------------------------------------------- statistics of paired episodes

Z = 1.96
"""Quantile of the normal distribution for 95 % coverage, as in `wilson_interval`."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Episodes that two evaluations both played, by outcome: the cells of a 2 x 2 table."""

    both: int
    """Solved in both."""
    only_first: int
    only_second: int
    neither: int

    @classmethod
    def of(cls, outcomes: Iterable[tuple[bool, bool]]) -> Self:
        """Count pairs of outcomes (solved in the first, in the second)."""
        found = list(outcomes)
        return cls(
            both=found.count((True, True)),
            only_first=found.count((True, False)),
            only_second=found.count((False, True)),
            neither=found.count((False, False)),
        )

    @property
    def count(self) -> int:
        """Number of pairs."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        """Success rate of the second minus that of the first, -1 .. 1."""
        return (self.only_second - self.only_first) / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the difference."""
        return newcombe_interval(self)

    @property
    def p_value(self) -> float:
        """See `mcnemar_p`."""
        return mcnemar_p(self)


def newcombe_interval(pairs: Pairs, z: float = Z) -> tuple[float, float]:
    """Confidence interval of the difference (second minus first) of two paired success rates, with 95 % coverage at
    z = 1.96.

    Method 10 of Newcombe (1998), "Improved confidence intervals for the difference between binomial proportions based
    on paired data", Statistics in Medicine 17, 2635-2650: Wilson's intervals of both rates, combined with the
    correlation phi of the outcomes, whose numerator is corrected for continuity.

    Args:
        pairs: at least one.
        z: quantile of the normal distribution.
    """
    count = pairs.count
    first, second = pairs.both + pairs.only_first, pairs.both + pairs.only_second
    low_1, high_1 = wilson_interval(first, count, z)
    low_2, high_2 = wilson_interval(second, count, z)
    below_1, above_1 = first / count - low_1, high_1 - first / count
    below_2, above_2 = second / count - low_2, high_2 - second / count
    phi = _correlation(pairs)
    # max: rounding can make the root of a perfect correlation slightly negative
    below = math.sqrt(max(0.0, below_2**2 - 2 * phi * below_2 * above_1 + above_1**2))
    above = math.sqrt(max(0.0, above_2**2 - 2 * phi * above_2 * below_1 + below_1**2))
    return max(-1.0, pairs.difference - below), min(1.0, pairs.difference + above)


def _correlation(pairs: Pairs) -> float:
    """Return phi of method 10; 0 where a row or a column of the table is empty."""
    first, second = pairs.both + pairs.only_first, pairs.both + pairs.only_second
    scale = math.sqrt(first * (pairs.count - first) * second * (pairs.count - second))
    product = float(pairs.both * pairs.neither - pairs.only_first * pairs.only_second)
    if product > 0:
        product = max(0.0, product - pairs.count / 2)
    return product / scale if scale else 0.0


def mcnemar_p(pairs: Pairs) -> float:
    """Exact two-sided p-value of McNemar (1947), "Note on the sampling error of the difference between correlated
    proportions or percentages", Psychometrika 12, 153-157: if both succeed equally often, each pair that differs is a
    toss of a fair coin. 1 without such pairs."""
    differing = pairs.only_first + pairs.only_second
    fewer = min(pairs.only_first, pairs.only_second)
    tail = sum(math.comb(differing, number) for number in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**differing))
