"""report.html: the results of a run, or of several side by side, in one file that needs no other files."""

from __future__ import annotations

from pathlib import Path

from embodyrl.tracking.report.record import RecordError, read_run
from embodyrl.tracking.report.summary import (
    EVALUATIONS,
    GRAPH_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    VIDEOS,
    SummaryError,
    needs_packages,
    read_summary,
    sorted_evaluations,
)

__all__ = [
    "EVALUATIONS",
    "GRAPH_FILE",
    "REPORT_FILE",
    "SUMMARY_FILE",
    "VIDEOS",
    "RecordError",
    "SummaryError",
    "read_summary",
    "sorted_evaluations",
    "write_report",
]


def write_report(run_dir: Path) -> Path:
    """Build report.html from what a run directory holds, also of a run that has not ended; returns its path.

    Raises:
        SummaryError: summary.json is damaged.
        RecordError: there is no run, or nothing of it yet.
        MissingPackageError: Bokeh or Jinja is not installed.
    """
    with needs_packages():
        from embodyrl.tracking.report.page import write_page  # Jinja and Bokeh, which only a report needs
    return write_page(read_run(run_dir), run_dir / REPORT_FILE)
