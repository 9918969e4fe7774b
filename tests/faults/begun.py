"""Runs that have begun to learn."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path


def await_rows(process: subprocess.Popen[str], run_dir: Path, rows: int = 2) -> None:
    """Wait until a run has written this many rows of metrics."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or len(metrics.read_text().splitlines()) < rows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not get going"
        time.sleep(0.05)
