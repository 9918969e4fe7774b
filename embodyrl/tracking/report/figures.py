"""Figures for papers and documents, drawn by matplotlib from the same numbers as the pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from embodyrl.files import replacing
from embodyrl.tracking.report.compare import Experiment, evaluations_of, training_of, x_key_of
from embodyrl.tracking.report.series import COLOURS, CURVES, MARKED, Curve, Series, curves_of, short

FORMATS = ("pdf", "png")
SIZE = 4.6, 3.1
"""Width and height of a figure [inches]: a column of most papers, at 10 points."""
DOTS = 220
"""Resolution of PNG files [dots per inch]."""
STYLE: Any = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dfe3ea",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "pdf.fonttype": 42,  # letters stay text that can be searched and edited
    "svg.fonttype": "none",
    "svg.hashsalt": "embodyrl",  # the same figure is the same file
    "text.parse_math": False,  # names from files are no formulas
}


@contextmanager
def figure(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = SIZE, **shared: Any
) -> Iterator[tuple[Any, Any]]:
    """Give a figure and its axes, `[rows, columns]` unless there is only one, in the style of this project."""
    with rc_context(STYLE):
        drawn = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(drawn)
        yield drawn, drawn.subplots(rows, columns, **shared)


def draw(axes: Any, series: Sequence[Series], *, x_label: str, percent: bool = False, whole: bool = False) -> None:
    """Draw lines with bands and points with error bars, and the legend if there are several."""
    for each in series:
        colour = COLOURS[each.colour % len(COLOURS)]
        if each.points:
            bars = None
            if len(each.low):
                below = [max(0.0, y - low) for y, low in zip(each.y, each.low, strict=True)]
                above = [max(0.0, high - y) for y, high in zip(each.y, each.high, strict=True)]
                bars = [below, above]
            style = {"fmt": "o", "ms": 4.5, "capsize": 2.5, "lw": 1.2}
            axes.errorbar(each.x, each.y, yerr=bars, color=colour, label=short(each.name) or None, zorder=3, **style)
            continue
        marker = "o" if len(each.x) <= MARKED else None
        alpha, width = (0.45, 1.0) if each.faint else (1.0, 1.6)
        axes.plot(
            each.x, each.y, color=colour, lw=width, alpha=alpha, label=short(each.name) or None, marker=marker, ms=4
        )
        if len(each.low):
            axes.fill_between(each.x, each.low, each.high, color=colour, alpha=0.18, lw=0)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if whole:
        axes.set_ylim(-0.02, 1.03)
    if sum(bool(each.name) for each in series) > 1:
        axes.legend()


def write_figures(experiments: Sequence[Experiment], folder: Path) -> list[Path]:
    """Draw every diagram of the runs into a folder, each as PDF and PNG; returns their paths. One run has its
    evaluations and training in one diagram, several have their means and bands."""
    folder.mkdir(parents=True, exist_ok=True)
    single = len(experiments) == 1 and len(experiments[0].runs) == 1
    x_key = x_key_of(experiments)
    x_label = "iteration" if x_key == "iteration" else "env steps"
    found = []
    for curve in CURVES:
        if single:
            parts = [("", curves_of(experiments[0].runs[0], curve))]
        else:
            parts = [("", training_of(experiments, curve)[0])]
            if curve.evaluated:
                parts = [("_training", parts[0][1]), ("", evaluations_of(experiments, curve.evaluated, x_key))]
        for suffix, series in parts:
            if series:
                with figure() as (drawn, axes):
                    draw(axes, series, x_label=x_label, percent=curve.percent, whole=curve.whole)
                    axes.set_ylabel(curve.title)
                    found += [save(drawn, folder / f"{file_name(curve)}{suffix}.{form}") for form in FORMATS]
    return found


def save(drawn: Any, path: Path) -> Path:
    """Write a figure in the format of its file's name; the same figure gives the same bytes."""
    form = path.suffix.removeprefix(".")
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}
    with replacing(path) as temporary:
        drawn.savefig(temporary, format=form, dpi=DOTS, metadata=undated[form])
    return path


def file_name(curve: Curve) -> str:
    """Return a diagram's title as the name of a file, without units."""
    words = "".join(letter if letter.isalnum() else " " for letter in curve.title.partition(" [")[0].lower())
    return "_".join(words.split())
