"""Figure of success under perturbations, as SVG: bars for each kind, and a curve over its levels. Needs no package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from embodyrl.runs.robustness import Robustness
from embodyrl.tracking.report.series import COLOURS

WIDTH, PANEL = 760, 230
"""Of the figure, and height of each of its two parts [pixels]."""
LEFT, RIGHT, TOP, BOTTOM = 48, 120, 34, 34
"""Margins of a part; names of curves are at the right."""
HIGHEST = 5
"""Level at the right end."""


def robustness_svg(rows: Sequence[Robustness]) -> str:
    """Return the figure.

    Args:
        rows: the first without perturbation; success must be known.
    """
    plain, others = rows[0], [row for row in rows[1:] if row.success is not None]
    kinds = list(dict.fromkeys(row.kind or "" for row in others))
    body = [*_bars(plain, others, kinds, 0), *_curves(plain, others, kinds, PANEL + TOP)]
    height = 2 * PANEL + TOP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#5b6472" role="img" '
        'aria-label="success under perturbations">\n' + "\n".join(body) + "\n</svg>\n"
    )


def _height(rate: float, top: float) -> float:
    """Return where a rate is in a part that begins at `top`."""
    return top + TOP + (1.0 - rate) * (PANEL - TOP - BOTTOM)


def _frame(title: str, plain: Robustness, top: float) -> Iterator[str]:
    """Yield the title, lines at 0, 25, ... percent, and the success without perturbation with its interval."""
    yield f'<text x="{LEFT}" y="{top + 16}" font-size="13" font-weight="600">{escape(title)}</text>'
    end = WIDTH - RIGHT
    for percent in (0, 25, 50, 75, 100):
        y = _height(percent / 100, top)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}" stroke="#8a94a6" stroke-opacity="0.25"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>'
    if plain.success is not None and plain.success_low is not None and plain.success_high is not None:
        high, y = _height(plain.success_high, top), _height(plain.success, top)
        deep = _height(plain.success_low, top) - high
        band = f'y="{high:.1f}" width="{end - LEFT}" height="{deep:.1f}"'
        yield f'<rect x="{LEFT}" {band} fill="#8a94a6" opacity="0.14"/>'
        yield (
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}" stroke="#5b6472" stroke-dasharray="5 4"/>'
            f'<text x="{end + 6}" y="{y + 4:.1f}">none {100 * plain.success:.0f} %</text>'
        )


def _bars(plain: Robustness, rows: Sequence[Robustness], kinds: Sequence[str], top: float) -> Iterator[str]:
    """Yield a group of bars for each kind, one for each level, with 95 % intervals."""
    yield from _frame("Success by kind and level, with 95 % intervals", plain, top)
    wide = (WIDTH - RIGHT - LEFT) / max(len(kinds), 1)
    for place, kind in enumerate(kinds):
        own = [row for row in rows if row.kind == kind]
        bar, start = 0.8 * wide / len(own), LEFT + place * wide + 0.1 * wide
        for number, row in enumerate(own):
            yield from _bar(row, start + number * bar, bar, COLOURS[place % len(COLOURS)], top)
        yield (
            f'<text x="{LEFT + (place + 0.5) * wide:.1f}" y="{top + PANEL - 4}" text-anchor="middle" '
            f'font-weight="600">{escape(kind)}</text>'
        )


def _bar(row: Robustness, x: float, width: float, colour: str, top: float) -> Iterator[str]:
    assert row.success is not None, "rows without success are left out"
    y, foot, middle = _height(row.success, top), _height(0.0, top), x + width / 2
    opacity = 0.35 + 0.65 * row.level / HIGHEST
    yield (
        f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{max(width - 2, 1):.1f}" height="{foot - y:.1f}" fill="{colour}" '
        f'opacity="{opacity:.2f}"><title>{escape(row.name)}: {100 * row.success:.1f} %</title></rect>'
    )
    if row.success_low is not None and row.success_high is not None:
        low, high = _height(row.success_low, top), _height(row.success_high, top)
        ends = f'x1="{middle:.1f}" y1="{low:.1f}" x2="{middle:.1f}" y2="{high:.1f}"'
        yield f'<line {ends} stroke="#2b3240" opacity="0.7"/>'
    yield f'<text x="{middle:.1f}" y="{foot + 13:.1f}" text-anchor="middle" font-size="10">{row.level}</text>'


def _curves(plain: Robustness, rows: Sequence[Robustness], kinds: Sequence[str], top: float) -> Iterator[str]:
    """Yield the success of each kind over its levels, from that without perturbation at 0."""
    yield from _frame("Success over the level", plain, top)
    wide = (WIDTH - RIGHT - LEFT - 20) / HIGHEST
    for level in range(HIGHEST + 1):
        yield (
            f'<text x="{LEFT + 10 + level * wide:.1f}" y="{_height(0.0, top) + 16:.1f}" text-anchor="middle">'
            f"{level or 'none'}</text>"
        )
    taken: list[float] = [] if plain.success is None else [_height(plain.success, top)]
    names: list[tuple[float, str, str]] = []
    for place, kind in enumerate(kinds):
        colour = COLOURS[place % len(COLOURS)]
        points = [(0, plain.success), *((row.level, row.success) for row in rows if row.kind == kind)]
        shown = [(LEFT + 10 + level * wide, _height(rate, top)) for level, rate in points if rate is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in shown[1:])
        names.append((shown[-1][1], colour, kind))
    for wanted, colour, kind in sorted(names):  # from the top, so that names have the order of their curves
        taken.append(_free(wanted, taken))
        yield f'<text x="{WIDTH - RIGHT + 6}" y="{taken[-1] + 4:.1f}" fill="{colour}">{escape(kind)}</text>'


def _free(wanted: float, taken: Sequence[float]) -> float:
    """Return the height nearest to the wanted one at which a name covers no other, and is inside of the part."""
    foot = _height(0.0, PANEL + TOP)
    heights = (wanted + sign * far for far in range(0, 800) for sign in (1, -1))
    return next(at for at in heights if at <= foot and all(abs(at - each) >= 13 for each in taken))
