"""Charts of a page, drawn by Bokeh in the reader's browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, HoverTool, Legend, NumeralTickFormatter, Range1d, Whisker
from bokeh.plotting import figure
from bokeh.resources import Resources

from embodyrl.tracking.clock import Phase
from embodyrl.tracking.report.series import COLOURS, MARKED, Series, short

Item = dict[str, Any]
"""What `Bokeh.embed.embed_item` draws."""
WALL_CLOCK = "wall clock [min]"
HEIGHT = 250
"""Of a chart [pixels]; its width is that of the page's column."""
ROW_OF_LEGEND = 44
"""Letters of all names in a legend up to which they stand in a row."""
MOST_STACKS = 80
"""Largest number of stacks; longer runs get several iterations in each."""
PHASE_COLOURS: Mapping[Phase, str] = {
    Phase.simulate: "#3b82f6",
    Phase.render: "#93c5fd",
    Phase.infer: "#e0721c",
    Phase.preprocess: "#f6b26b",
    Phase.record: "#8a94a6",
    Phase.train: "#1f9d55",
    Phase.sync: "#9a5bd6",
    Phase.save: "#c99700",
    Phase.idle: "#c3cad6",
}


def library() -> str:
    """Return the script that draws charts, without the parts for maps, tables and widgets."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def chart(series: Sequence[Series], *, x_label: str, percent: bool = False, whole: bool = False) -> Item:
    """Draw lines, bands and points; where all have the time, a button of the page draws them over it.

    Args:
        series: what is drawn, the first one undermost.
        x_label: of the horizontal axis.
        percent: values are shares of 1.
        whole: the vertical axis goes from 0 to 1 whatever the values are.
    """
    plot = _figure(x_label, percent=percent)
    values = {value for each in series for value in each.y}
    if whole:
        plot.y_range = Range1d(-0.02, 1.02, bounds=(-0.05, 1.05))
    elif len(values) == 1 and (value := values.pop()):  # else a constant of 0.001 would be drawn at 0, between -1 and 1
        plot.y_range = Range1d(min(0.0, 2.0 * value), max(0.0, 2.0 * value))
    legends = []
    if not all(len(each.minutes) for each in series):
        series = [replace(each, minutes=()) for each in series]
    else:
        plot.xaxis.tags = [x_label, WALL_CLOCK]
    for each in series:
        shapes = _points(plot, each) if each.points else _line(plot, each)
        # The first shape answers the mouse: the band and the bars have the same numbers.
        plot.add_tools(HoverTool(renderers=[shapes[0]], tooltips=_tooltips(each, x_label, percent), mode=_mode(each)))
        if each.name:
            legends.append((short(each.name), shapes))
    if len(legends) > 1:
        names = sum(len(name) for name, _ in legends)
        plot.add_layout(_legend(legends, below_each_other=names > ROW_OF_LEGEND), "above")
    return _item(plot)


def stacks(groups: Sequence[Mapping[Phase, float]], iterations: Sequence[int], per_stack: int) -> Item:
    """Draw seconds by phase of each iteration, or of each group of `per_stack` consecutive ones (their mean)."""
    plot = _figure("iteration", percent=False)
    phases = [phase for phase in Phase if any(group[phase] > 0.0 for group in groups)]
    columns: dict[str, Any] = {phase.value: [group[phase] for group in groups] for phase in phases}
    source = ColumnDataSource(columns | {"x": list(iterations), "all": [sum(group.values()) for group in groups]})
    drawn = plot.vbar_stack(
        [phase.value for phase in phases],
        x="x",
        width=0.85 * per_stack,
        color=[PHASE_COLOURS[phase] for phase in phases],
        source=source,
        line_color=None,
    )
    parts = [(phase.value, f"@{phase.value}{{0.000}} s") for phase in phases]
    plot.add_tools(HoverTool(tooltips=[("iteration", "@x"), ("all", "@all{0.000} s"), *parts], mode="mouse"))
    plot.add_layout(_legend([(phase.value, [shape]) for phase, shape in zip(phases, drawn, strict=True)]), "above")
    plot.legend.ncols = 5  # all in a row are wider than the chart
    plot.yaxis.axis_label = "seconds"
    plot.y_range.start = 0.0
    return _item(plot)


def _figure(x_label: str, *, percent: bool) -> Any:
    plot = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,xwheel_zoom,reset,save",
        active_drag="box_zoom",
        active_scroll=None,
        toolbar_location="right",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_right=4,
    )
    plot.toolbar.autohide, plot.toolbar.logo, plot.toolbar_inner = True, None, True
    plot.xaxis.axis_label = x_label
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[0]a")
    for axis in (plot.xaxis, plot.yaxis):
        axis.minor_tick_line_color = None
        axis.axis_label_text_font_style = "normal"
        axis.axis_line_color = None
        axis.major_tick_line_color = None
    plot.xgrid.grid_line_color = None
    if percent:
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0] %")
    return plot


def _source(series: Series) -> ColumnDataSource:
    columns: dict[str, Any] = {"x": series.x, "y": series.y, "iteration": series.iterations}
    if len(series.minutes):  # the page's button puts one or the other into x
        columns |= {"steps": series.x, "minutes": series.minutes}
    return ColumnDataSource(columns | ({"low": series.low, "high": series.high} if len(series.low) else {}))


def _line(plot: Any, series: Series) -> list[Any]:
    source, colour = _source(series), COLOURS[series.colour % len(COLOURS)]
    alpha, width = (0.28, 1.0) if series.faint else (1.0, 2.0)
    shapes = [plot.line("x", "y", source=source, line_color=colour, line_alpha=alpha, line_width=width)]
    if len(series.x) <= MARKED:
        shapes.append(plot.scatter("x", "y", source=source, size=6, color=colour))
    if len(series.low):
        shapes.append(plot.varea("x", "low", "high", source=source, fill_color=colour, fill_alpha=0.18))
    return shapes


def _points(plot: Any, series: Series) -> list[Any]:
    source, colour = _source(series), COLOURS[series.colour % len(COLOURS)]
    shapes = [plot.scatter("x", "y", source=source, size=8, color=colour)]
    shapes.append(plot.line("x", "y", source=source, line_color=colour, line_width=1.0, line_dash=[4, 3]))
    if len(series.low):
        bars = Whisker(base="x", lower="low", upper="high", source=source, line_color=colour, line_width=1.6)
        for head in (bars.upper_head, bars.lower_head):
            head.line_color, head.size = colour, 9
        plot.add_layout(bars)
    return shapes


def _tooltips(series: Series, x_label: str, percent: bool) -> list[tuple[str, str]]:
    form = "{0.0 %}" if percent else "{0.[0000]}"
    rows = [("value", f"@y{form}")]
    if len(series.low):
        rows.append(("from, to" if not series.points else "95 % interval", f"@low{form} to @high{form}"))
    rows.append(("iteration", "@iteration"))
    where = [] if x_label == "iteration" else [(x_label, "@steps{0,0}" if len(series.minutes) else "@x{0,0}")]
    return [*rows, *where, *([("minutes", "@minutes{0.0}")] if len(series.minutes) else [])]


def _mode(series: Series) -> str:
    return "mouse" if series.points or series.faint else "vline"


def _legend(entries: Sequence[tuple[str, Sequence[Any]]], *, below_each_other: bool = False) -> Legend:
    return Legend(
        items=[(name, list(shapes)) for name, shapes in entries],
        orientation="vertical" if below_each_other else "horizontal",
        location="left",
        click_policy="hide",
        border_line_color=None,
        background_fill_color=None,
        margin=0,
        padding=2,
        spacing=12,
        label_text_font_size="12px",
        ncols="auto",
    )


def _item(plot: Any) -> Item:
    return dict(json_item(plot))
