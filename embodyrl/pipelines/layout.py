"""Places the boxes and labels of a drawing in layers, from top to bottom, so that nothing overlaps.

The method of Sugiyama et al. (1981): every node gets a layer, every edge an item in each layer that it passes, one of
them its label, which takes as much room as its text. The order within a layer reduces crossings; then each item moves
as near to its neighbours as the items beside it allow.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ORDER_SWEEPS, PLACE_SWEEPS = 12, 200
"""How often the layers are gone through, down and up."""
GAP_X, GAP_Y = 28.0, 26.0
"""Room between neighbours in a layer, and between layers [px]."""


@dataclass
class Item:
    """A box, a label, or the place where an edge passes a layer."""

    width: float
    height: float
    layer: int
    x: float = 0.0
    """Centre, from the left [px]."""
    y: float = 0.0
    """Centre, from the top [px]."""

    @property
    def top(self) -> float:
        """Upper edge [px]."""
        return self.y - self.height / 2

    @property
    def bottom(self) -> float:
        """Lower edge [px]."""
        return self.y + self.height / 2


@dataclass(frozen=True)
class Edge:
    """A connection to be drawn."""

    source: str
    target: str
    label: tuple[float, float]
    """Width and height of its text [px]; 0, 0 without one."""


@dataclass(frozen=True)
class Path:
    """A connection with its place."""

    edge: Edge
    items: tuple[Item, ...]
    """Source box, what it passes, target box."""
    label: Item
    """The one of them that has room for the text."""


@dataclass(frozen=True)
class Layout:
    """Where everything goes."""

    width: float
    height: float
    boxes: Mapping[str, Item]
    paths: tuple[Path, ...]


def lay_out(sizes: Mapping[str, tuple[float, float]], edges: Sequence[Edge], margin: float) -> Layout:
    """Place boxes and edges.

    Args:
        sizes: width and height of every box [px], in an order in which each comes after those with edges to it.
        edges: connections.
        margin: room around the drawing [px].
    """
    boxes = {name: Item(*size, layer) for (name, size), layer in zip(sizes.items(), _layers(sizes, edges), strict=True)}
    paths = tuple(_path(edge, boxes) for edge in edges)
    items = list(boxes.values()) + [item for path in paths for item in path.items[1:-1]]
    layers = [[item for item in items if item.layer == number] for number in range(max(i.layer for i in items) + 1)]
    links = [pair for path in paths for pair in itertools.pairwise(path.items)]
    _order(layers, links)
    _place_across(layers, links)
    _place_down(layers, margin)
    left = min(item.x - item.width / 2 for item in items) - margin
    for item in items:
        item.x -= left
    width = max(item.x + item.width / 2 for item in items) + margin
    return Layout(width, max(item.bottom for item in items) + margin, boxes, paths)


def _layers(sizes: Mapping[str, tuple[float, float]], edges: Sequence[Edge]) -> list[int]:
    """Even layers hold boxes, each below all that lead to it; odd ones hold what is between."""
    layers: dict[str, int] = {}
    for name in sizes:
        layers[name] = max((layers[edge.source] + 2 for edge in edges if edge.target == name), default=0)
    return list(layers.values())


def _path(edge: Edge, boxes: Mapping[str, Item]) -> Path:
    """An edge with an item in every layer that it passes; its label stands right above the target."""
    source, target = boxes[edge.source], boxes[edge.target]
    passed = [Item(0.0, 0.0, layer) for layer in range(source.layer + 1, target.layer - 1)]
    label = Item(*edge.label, target.layer - 1)
    return Path(edge, (source, *passed, label, target), label)


Links = Sequence[tuple[Item, Item]]


def _neighbours(links: Links) -> dict[int, tuple[list[Item], list[Item]]]:
    """For each item (by id) those it is linked to above and below."""
    found: dict[int, tuple[list[Item], list[Item]]] = defaultdict(lambda: ([], []))
    for upper, lower in links:
        found[id(upper)][1].append(lower)
        found[id(lower)][0].append(upper)
    return found


def _order(layers: list[list[Item]], links: Links) -> None:
    """Sort each layer by the mean place of its neighbours in the layer gone through before; keeps the best order."""
    neighbours = _neighbours(links)
    best = [list(layer) for layer in layers]
    for sweep in range(ORDER_SWEEPS):
        side = sweep % 2
        for layer in layers if side == 0 else reversed(layers):
            rank = _ranks(layers)
            wanted = {}
            for item in layer:
                linked = [rank[id(other)] for other in neighbours[id(item)][side]] or [rank[id(item)]]
                wanted[id(item)] = sum(linked) / len(linked)
            layer.sort(key=lambda item, wanted=wanted: wanted[id(item)])  # type: ignore[misc]
        if _crossings(layers, links) < _crossings(best, links):
            best = [list(layer) for layer in layers]
    layers[:] = best


def _ranks(layers: Sequence[Sequence[Item]]) -> dict[int, int]:
    """The place of every item (by id) in its layer."""
    return {id(item): place for layer in layers for place, item in enumerate(layer)}


def _crossings(layers: Sequence[Sequence[Item]], links: Links) -> int:
    """How many pairs of links cross."""
    rank = _ranks(layers)
    ends = [(upper.layer, rank[id(upper)], rank[id(lower)]) for upper, lower in links]
    return sum(a[0] == b[0] and (a[1] - b[1]) * (a[2] - b[2]) < 0 for a, b in itertools.combinations(ends, 2))


def _place_across(layers: Sequence[Sequence[Item]], links: Links) -> None:
    """Give every item an x near the mean of its neighbours'."""
    neighbours = _neighbours(links)
    for layer in layers:
        _spread(layer, [0.0] * len(layer))
    for sweep in range(PLACE_SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            _spread(layer, [_pull(item, neighbours[id(item)]) for item in layer])


def _pull(item: Item, linked: tuple[list[Item], list[Item]]) -> float:
    """The mean x of an item's neighbours."""
    places = [other.x for side in linked for other in side]
    return sum(places) / len(places) if places else item.x


def _spread(layer: Sequence[Item], wanted: Sequence[float]) -> None:
    """Put items in a row as near to the wanted places as their widths allow (least squares).

    With the room that each needs taken off its wanted place, the places must not decrease; where they would, neighbours
    are pooled and share their mean (isotonic regression).
    """
    offsets = [0.0]
    for left, right in itertools.pairwise(layer):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + GAP_X)
    pools: list[tuple[float, int]] = []
    for offset, place in zip(offsets, wanted, strict=True):
        mean, count = place - offset, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    for item, mean, offset in zip(layer, means, offsets, strict=True):
        item.x = mean + offset


def _place_down(layers: Sequence[Sequence[Item]], margin: float) -> None:
    """Stack the layers; what belongs to one layer is centred in it, and edges pass it straight."""
    top = margin
    for layer in layers:
        height = max((item.height for item in layer), default=0.0)
        for item in layer:
            item.y = top + height / 2
            if item.width == 0.0:
                item.height = height
        top += height + GAP_Y
