"""What `embodyrl eval --robustness` found, as its results.json has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embodyrl.runs import ROBUSTNESS

RESULTS_FILE = "results.json"
FIGURE_FILE = "robustness.svg"
VIDEO_FILE = "worst.mp4"


@dataclass(frozen=True, kw_only=True)
class Robustness:
    """Success under a perturbation, beside that of the same episodes without."""

    kind: str | None
    """None: without any, with which the others are compared."""
    level: int
    """1 .. 5; 0 without."""
    episodes: int
    success: float | None
    """Success rate, 0 .. 1; None: it is unknown."""
    success_low: float | None
    success_high: float | None
    """95 % interval (Wilson)."""
    drop: float | None
    """Success rate without minus that with it, -1 .. 1, over the episodes that both have."""
    drop_low: float | None
    drop_high: float | None
    """95 % interval of it (Newcombe, paired)."""
    lost: int
    """Episodes that are solved without it alone."""
    gained: int
    """Episodes that are solved with it alone."""
    mean_return: float

    @property
    def name(self) -> str:
        """Its name in tables and figures."""
        return "none" if self.kind is None else f"{self.kind} {self.level}"

    def to_plain(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        return asdict(self)


def read_robustness(run_dir: Path) -> Sequence[Robustness]:
    """Return what was found of a run's policy, the first without perturbation; empty if nothing was, or if it cannot
    be read."""
    try:
        rows = [_row(each) for each in _read(run_dir)[ROBUSTNESS]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return rows if rows and rows[0].kind is None else []


def measured_checkpoint(run_dir: Path) -> str:
    """Return the name of the checkpoint of which `read_robustness` returns what was found; empty if it is unknown."""
    try:
        place = _read(run_dir)["evaluations"][0]["policy"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return Path(place).name[:100] if isinstance(place, str) else ""


def _read(run_dir: Path) -> Any:
    return json.loads((run_dir / ROBUSTNESS / RESULTS_FILE).read_text())


def _row(plain: Mapping[str, Any]) -> Robustness:
    row = Robustness(**plain)
    numbers = [row.success, row.success_low, row.success_high, row.drop, row.drop_low, row.drop_high, row.mean_return]
    if not all(each is None or isinstance(each, int | float) for each in numbers):
        raise ValueError("what should be numbers are none")
    if not all(type(each) is int for each in (row.level, row.episodes, row.lost, row.gained)):
        raise ValueError("what should be whole numbers are none")
    if not isinstance(row.kind, str | None):
        raise ValueError("a kind is no text")
    return row
