"""Draws a pipeline: as Mermaid text, and as an SVG that needs nothing else to be looked at."""

from __future__ import annotations

import html
import itertools
import textwrap
from collections.abc import Iterator, Sequence

from embodyrl.pipelines.dataflow import Dataflow
from embodyrl.pipelines.graph import RESOURCES, Node, plain
from embodyrl.pipelines.layout import Edge, Item, Layout, Path, lay_out

CHARACTER = 0.62
"""Width of a monospaced character, in font sizes; a little more than any such font has."""
NAME_SIZE, NOTE_SIZE, LABEL_SIZE = 15.0, 11.0, 11.0
"""Font sizes [px]."""
LINE = 1.35
"""Height of a line, in font sizes."""
PADDING = 12.0
LABEL_CHARACTERS = 34
"""Columns on an edge are wrapped to this many characters."""
MARGIN = 20.0

STYLE = """
  .graph text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
  .graph .name { font-size: 15px; font-weight: 600; fill: #1c2330; }
  .graph .note { font-size: 11px; fill: #64748b; }
  .graph .label { font-size: 11px; fill: #334155; }
  .graph .box { fill: #f8fafc; stroke: #94a3b8; stroke-width: 1.2; }
  .graph .acts { fill: #eff6ff; stroke: #2563eb; }
  .graph .edge { fill: none; stroke: #94a3b8; stroke-width: 1.4; }
  .graph .order { stroke-dasharray: 4 4; }
  .graph .paper { fill: #ffffff; }
"""

ARROW = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" fill="#94a3b8"/></marker></defs>'
)


def edges_of(dataflow: Dataflow) -> dict[tuple[str, str], tuple[str, ...]]:
    """Columns from node to node; none where one only has to wait for the other."""
    edges = {(flow.source, flow.target): flow.columns for flow in dataflow.flows}
    for node in dataflow.nodes:
        for source in sorted(dataflow.predecessors[node.name]):
            edges.setdefault((source, node.name), ())
    return edges


def notes_of(node: Node) -> list[str]:
    """What is said below a node's name: its stage, and the resources it uses."""
    changes = [name for name in RESOURCES if name in plain(node.changes)]
    reads = [name for name in RESOURCES if name in plain(node.reads) and name not in changes]
    notes = [node.stage_name]
    notes += [f"reads {', '.join(reads)}"] if reads else []
    notes += [f"changes {', '.join(changes)}"] if changes else []
    return notes


def to_mermaid(dataflow: Dataflow) -> str:
    """The pipeline as a Mermaid flow chart, which Markdown viewers draw."""
    lines = ["flowchart TD"]
    for node in dataflow.nodes:
        notes = "<br/>".join(map(html.escape, notes_of(node)))
        lines.append(f'  {node.name}["<b>{node.name}</b><br/>{notes}"]')
    for (source, target), columns in edges_of(dataflow).items():
        link = f'-- "{", ".join(columns)}" -->' if columns else "-.->"
        lines.append(f"  {source} {link} {target}")
    return "\n".join(lines) + "\n"


def to_svg(dataflow: Dataflow) -> str:
    """The pipeline as an SVG document."""
    nodes = {node.name: node for node in dataflow.nodes}
    labels = {ends: wrapped(columns) for ends, columns in edges_of(dataflow).items()}
    edges = [Edge(*ends, (_width(lines, LABEL_SIZE), _height(lines, LABEL_SIZE))) for ends, lines in labels.items()]
    layout = lay_out({name: _box_size(node) for name, node in nodes.items()}, edges, MARGIN)
    body = [
        *(_line(path, ports) for path, ports in _with_ports(layout)),
        *(shape for path in layout.paths for shape in _label(path, labels[path.edge.source, path.edge.target])),
        *(shape for name, item in layout.boxes.items() for shape in _box(nodes[name], item)),
    ]
    width, height = round(layout.width), round(layout.height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" role="img" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">\n<style>{STYLE}</style>\n{ARROW}\n'
        f'<rect class="paper" width="{width}" height="{height}"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def wrapped(columns: Sequence[str]) -> list[str]:
    """Column names, so many to a line."""
    return textwrap.wrap(", ".join(columns), LABEL_CHARACTERS, break_long_words=False, break_on_hyphens=False)


def _width(lines: Sequence[str], size: float) -> float:
    return max((len(line) for line in lines), default=0) * size * CHARACTER


def _height(lines: Sequence[str], size: float) -> float:
    return len(lines) * size * LINE


def _box_size(node: Node) -> tuple[float, float]:
    notes = notes_of(node)
    width = max(_width([node.name], NAME_SIZE), _width(notes, NOTE_SIZE))
    return width + 2 * PADDING, NAME_SIZE * LINE + _height(notes, NOTE_SIZE) + 1.5 * PADDING


def _text(css: str, lines: Sequence[str], x: float, top: float, size: float) -> Iterator[str]:
    """Centred lines of text, the first one's upper edge at `top`."""
    for number, line in enumerate(lines):
        baseline = top + (number + 0.5) * size * LINE + 0.36 * size
        yield f'<text class="{css}" x="{x:.1f}" y="{baseline:.1f}" text-anchor="middle">{html.escape(line)}</text>'


def _box(node: Node, item: Item) -> Iterator[str]:
    css = "box acts" if set(plain(node.changes)) & set(RESOURCES) else "box"
    yield (
        f'<rect class="{css}" x="{item.x - item.width / 2:.1f}" y="{item.top:.1f}" width="{item.width:.1f}" '
        f'height="{item.height:.1f}" rx="8"/>'
    )
    top = item.top + 0.75 * PADDING
    yield from _text("name", [node.name], item.x, top, NAME_SIZE)
    yield from _text("note", notes_of(node), item.x, top + NAME_SIZE * LINE, NOTE_SIZE)


def _label(path: Path, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        item = path.label
        yield (
            f'<rect class="paper" x="{item.x - item.width / 2:.1f}" y="{item.top:.1f}" width="{item.width:.1f}" '
            f'height="{item.height:.1f}"/>'
        )
        yield from _text("label", lines, item.x, item.top, LABEL_SIZE)


def _with_ports(layout: Layout) -> Iterator[tuple[Path, tuple[float, float]]]:
    """Every path with the x at which it leaves its source and reaches its target: side by side, without crossing."""
    for path in layout.paths:
        leaving = sorted((p for p in layout.paths if p.edge.source == path.edge.source), key=lambda p: p.items[1].x)
        arriving = sorted((p for p in layout.paths if p.edge.target == path.edge.target), key=lambda p: p.items[-2].x)
        yield path, (_port(path.items[0], path, leaving), _port(path.items[-1], path, arriving))


def _port(box: Item, path: Path, side: Sequence[Path]) -> float:
    step = min(40.0, (box.width - 2 * PADDING) / max(len(side) - 1, 1))
    return box.x + (side.index(path) - (len(side) - 1) / 2) * step


def _line(path: Path, ports: tuple[float, float]) -> str:
    """A smooth line from box to box, straight down where it passes an item."""
    source, *passed, target = path.items
    points = [(ports[0], source.bottom)]
    points += [(item.x, y) for item in passed for y in (item.top, item.bottom)]
    points.append((ports[1], target.top))
    drawn = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y1 > y0:
            middle = (y0 + y1) / 2
            drawn += f" C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"
    css = "edge" if path.label.width else "edge order"
    return f'<path class="{css}" d="{drawn}" marker-end="url(#tip)"/>'
