"""Names of the files that a report is made of, and summary.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodyrl.errors import MissingPackageError, UserError, shell_command

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
GRAPH_FILE = "graph.mmd"
"""Mermaid flow chart of the iteration, which a run writes to its directory when it starts."""
EVALUATIONS = "evaluations"
"""Folder with the episodes of every evaluation, `<iteration>.jsonl`: a line of JSON each."""
VIDEOS = "videos"
"""Folder of videos of evaluation episodes."""

SUMMARY: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "iterations": int,
    "env_steps": int,
    "wall_s": (int, float),
    "env_steps_per_s": (int, float),
    "seed": int,
    "evaluations": dict,
    "config_hash": str,
    "versions": dict,
}
"""Keys that every summary.json has, with their types."""

EVALUATED = ("eval/return", "eval/episode_length", "eval/episodes")
"""Metrics that every evaluation has."""
SUCCESS = ("eval/success_once", "eval/success_low", "eval/success_high")
"""Metrics of evaluations that an evaluation has all or, where the simulator does not say what success is, none of."""


class SummaryError(UserError):
    """Raised when summary.json is missing or damaged."""


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the contents of a run's summary.json.

    Raises:
        SummaryError: it is missing or damaged.
    """
    path = run_dir / SUMMARY_FILE
    try:
        summary = json.loads(path.read_text())
        damaged = not isinstance(summary, dict) or any(
            not isinstance(summary.get(name), kind) for name, kind in SUMMARY.items()
        )
        damaged = damaged or not all(
            int(iteration) >= 0 and is_evaluation(found) for iteration, found in summary["evaluations"].items()
        )
    except FileNotFoundError as error:
        raise SummaryError(f"{run_dir} holds no {SUMMARY_FILE}: give the directory of a run that ended") from error
    except (OSError, ValueError, RecursionError):
        damaged = True
    if damaged:
        raise SummaryError(f"{path} is damaged: have it written anew with {shell_command('resume', run_dir)}")
    return dict(summary)


def sorted_evaluations(summary: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Return iteration and metrics of every evaluation, in order."""
    return sorted(summary["evaluations"].items(), key=lambda item: int(item[0]))


def is_evaluation(found: object) -> bool:
    """Return whether these are the metrics of an evaluation."""
    if not isinstance(found, dict):
        return False
    wanted = (*EVALUATED, *(SUCCESS if any(found.get(name) is not None for name in SUCCESS) else ()))
    return all(isinstance(found.get(name), int | float) for name in wanted)


@contextmanager
def needs_packages(extra: str = "") -> Iterator[None]:
    """Turn a failed import in the block into an error with the command that installs the package.

    Args:
        extra: the extra of this package that has it; empty: it comes with every installation.

    Raises:
        MissingPackageError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        what = f"embodyrl[{extra}]" if extra else "--upgrade embodyrl"
        install = f"pip install '{what}'" if extra else f"pip install {what}"
        raise MissingPackageError(f"a report needs {error.name}, which is not installed: {install}") from error
