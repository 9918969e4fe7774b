"""Rows of metrics.jsonl, also of a run that goes on writing them."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embodyrl.config.renames import newest_metric

Row = dict[str, Any]
"""Metrics by name, with `iteration`; None stands for numbers that JSON cannot hold."""
NEWEST = 20
"""Iterations by which the time of those to come is estimated."""


class MetricsReader:
    """Reads a metrics.jsonl while it grows, line by line, and each line once.

    Args:
        path: the file; it may come later.
        most_rows: of the rows that are kept, the newest ones; None: all.
    """

    def __init__(self, path: Path, most_rows: int | None = None) -> None:
        self._path = path
        self._begin(-1, most_rows)

    def _begin(self, inode: int, most_rows: int | None) -> None:
        self._inode, self._end, self._odd, self._is_cut = inode, 0, 0, False
        self.rows: deque[Row] = deque(maxlen=most_rows)
        self.latest: Row = {}
        """Newest value of every metric."""

    @property
    def odd_lines(self) -> int:
        """Lines that are no rows: damaged, or cut short by a kill, as a line that is being written seems to be."""
        return self._odd + self._is_cut

    def read(self) -> None:
        """Take in what was added. A file that was written anew, as a resume does, is read from its beginning."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            facts = os.fstat(file.fileno())
            if facts.st_ino != self._inode or facts.st_size < self._end:
                self._begin(facts.st_ino, self.rows.maxlen)
            file.seek(self._end)
            self._is_cut = False
            for line in file:
                if (row := _row_in(line)) is not None:
                    self.rows.append(row)
                    self.latest.update(row)
                elif not line.endswith(b"\n"):
                    self._is_cut = True  # and read again with its end
                    break
                else:
                    self._odd += bool(line.strip())
                self._end += len(line)


def read_rows(path: Path) -> tuple[list[Row], int]:
    """Return the rows of a metrics.jsonl, and the number of lines that are none; nothing of one that is missing."""
    reader = MetricsReader(path)
    reader.read()
    return list(reader.rows), reader.odd_lines


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield the values of a file with a line of JSON each; damaged lines are left out."""
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            yield json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError):
            continue


def _row_in(line: bytes) -> Row | None:
    """Return the row in a line that `JsonlSink` wrote, metrics by their present names; None for any other line."""
    try:
        row = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("iteration")) is not int:
        return None
    if not all(value is None or _is_number(value) for value in row.values()):
        return None
    return {newest_metric(name): value for name, value in row.items()}


def _is_number(value: object) -> bool:
    if type(value) is int:
        return abs(value) < 1 << 63
    return isinstance(value, float) and math.isfinite(value)


def seconds_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the wall clock of iterations and of their evaluations, together [s]."""
    return float(sum((row.get("time/iteration") or 0.0) + (row.get("time/eval") or 0.0) for row in rows))


def seconds_left(rows: Sequence[Mapping[str, Any]], iterations: int) -> float | None:
    """Return the time until so many iterations are done if they are like the newest [s]; None: nothing is known yet."""
    newest = [row for row in rows if "time/iteration" in row][-NEWEST:]
    if not newest:
        return None
    done: int = max(row["iteration"] for row in rows)
    return seconds_of(newest) / len(newest) * max(0, iterations - done)
