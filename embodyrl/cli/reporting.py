"""`embodyrl report`: pages, tables and figures of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embodyrl.cli.arguments import CommandLineError
from embodyrl.errors import UserError
from embodyrl.runs import METRICS_FILE, REPORT_FILE
from embodyrl.runs.record import RunRecord, find_runs, read_run
from embodyrl.screen import counted, say
from embodyrl.tracking.report import needs_packages
from embodyrl.tracking.report.compare import group

COMPARISON_FILE = "comparison.html"


def report(paths: Sequence[Path], out: Path | None, data: Path | None, figures: Path | None) -> int:
    """Write the page of a run, or of several side by side, and what else is asked for; returns the exit code.

    Args:
        paths: run directories, or folders with run directories below.
        out: the page; None: `report.html` in the run directory, for several runs `comparison.html`.
        data: folder for the numbers as CSV and JSON; None: none.
        figures: folder for figures as PDF and PNG; None: none.

    Raises:
        UserError: there is no run, what it holds is damaged, a package is missing, or a file cannot be written.
    """
    if out is not None and out.suffix != ".html":
        raise CommandLineError(f"--out {out}: the page is HTML, so name a file that ends in .html")
    folders = dict.fromkeys(run for path in paths for run in find_runs(path))
    runs = [read_run(folder) for folder in folders]
    with needs_packages():
        from embodyrl.tracking.report.comparison import write_comparison, write_data
        from embodyrl.tracking.report.page import write_page
    if figures is not None:
        with needs_packages("figures"):
            from embodyrl.tracking.report.figures import write_figures
    try:
        if len(runs) == 1:
            written = write_page(runs[0], out or runs[0].path / REPORT_FILE)
        else:
            written = write_comparison(runs, out or (paths[0] if len(paths) == 1 else Path()) / COMPARISON_FILE)
        say(f"written to {written}")
        if data is not None:
            say(f"numbers in {data}: {_names(write_data(runs, data))}")
        if figures is not None:
            say(f"figures in {figures}: {_names(write_figures(group(runs), figures))}")
    except OSError as error:
        what = error.filename or "a file"
        raise UserError(f"{what} cannot be written: {error.strerror}: name another place") from error
    _name_odd_lines(runs)
    return 0


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _name_odd_lines(runs: Sequence[RunRecord]) -> None:
    for run in runs:
        if run.odd_lines:
            where = f"{counted(run.odd_lines, 'line')} of {run.path / METRICS_FILE}"
            say(f"warning: left out what is no row of metrics: {where}")
