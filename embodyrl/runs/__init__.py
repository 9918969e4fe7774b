"""Run directories as readers see them. Nothing here writes to a run.

This module has the names of their files and finds them; `metrics` reads rows while they are written, `record` all else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"
LOG_FILE = "run.log"
CONSOLE_FILE = "console.log"
"""What a run of a sweep shows, where another one has its screen."""
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
GRAPH_FILE = "graph.mmd"
"""Mermaid flow chart of the iteration, which a run writes to its directory when it starts."""
EVALUATIONS = "evaluations"
"""Folder with the episodes of every evaluation, `<iteration>.jsonl`: a line of JSON each."""
VIDEOS = "videos"
"""Folder of videos of evaluation episodes."""
ROBUSTNESS = "robustness"
"""Folder of what `embodyrl eval --robustness` found of the run's policy."""
TENSORBOARD = "tensorboard"
"""Folder of the event files."""
WORKER_LOGS = "workers"
CHECKPOINTS = "checkpoints"
LAST, BEST = "last", "best"
"""Links to the newest checkpoint, and to the one with the best evaluation."""
_CHECKPOINT = re.compile(r"(\d{6,})(?:-\d+)?")


def episodes_file(run_dir: Path, iteration: int) -> Path:
    """Return the file with the episodes of the evaluation after an iteration."""
    return run_dir / EVALUATIONS / f"{iteration:06d}.jsonl"


def published(run_dir: Path) -> list[tuple[int, Path]]:
    """Return iteration and folder of every checkpoint of a run, the newest last, without verifying them."""
    folder = run_dir / CHECKPOINTS
    places = folder.iterdir() if folder.is_dir() else ()
    numbered = [(match, place) for place in places if (match := _CHECKPOINT.fullmatch(place.name)) and place.is_dir()]
    return sorted((int(match[1]), place) for match, place in numbered)


def runs_below(folder: Path, depth: int, *, follow_links: bool = True) -> Iterator[Path]:
    """Yield the run directories at or below a folder, at most `depth` levels down, in the order of their names. A
    folder inside a run is none, and hidden folders are left out: those of a sweep hold configs to start from."""
    if (folder / CONFIG_FILE).is_file():
        yield folder
    elif depth and folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.name.startswith(".") and (follow_links or not path.is_symlink()):
                yield from runs_below(path, depth - 1, follow_links=follow_links)
