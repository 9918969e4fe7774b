"""report.html: the results of a run, or of several side by side, in one file that needs no other files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embodyrl.errors import MissingPackageError
from embodyrl.runs import REPORT_FILE
from embodyrl.runs.record import read_run


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
