from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from embodyrl.pipelines.layout import Edge, Item, Layout, lay_out

MARGIN = 10.0
side = st.integers(20, 300).map(float)


@st.composite
def drawings(draw: st.DrawFn) -> tuple[dict[str, tuple[float, float]], list[Edge]]:
    """Boxes and labels of any size, and edges from any box to any later one."""
    sizes = {f"n{number}": (draw(side), draw(side)) for number in range(draw(st.integers(1, 7)))}
    pairs = list(itertools.combinations(sizes, 2))
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12)) if pairs else []
    labels = st.one_of(st.just((0.0, 0.0)), st.tuples(side, side))
    return sizes, [Edge(*ends, draw(labels)) for ends in chosen]


def drawn(layout: Layout) -> list[Item]:
    """Everything that takes room."""
    return [*layout.boxes.values(), *(path.label for path in layout.paths if path.label.width)]


@settings(max_examples=150, deadline=None)
@given(drawings())
def test_nothing_overlaps_and_everything_is_on_the_paper(
    drawing: tuple[dict[str, tuple[float, float]], list[Edge]],
) -> None:
    layout = lay_out(*drawing, MARGIN)
    for one, other in itertools.combinations(drawn(layout), 2):
        apart_x = abs(one.x - other.x) - (one.width + other.width) / 2
        apart_y = abs(one.y - other.y) - (one.height + other.height) / 2
        assert max(apart_x, apart_y) > 1.0
    for item in drawn(layout):
        left, right = item.x - item.width / 2, item.x + item.width / 2
        assert left > 0.9 * MARGIN and right < layout.width - 0.9 * MARGIN
        assert item.top > 0.9 * MARGIN and item.bottom < layout.height - 0.9 * MARGIN


@settings(max_examples=150, deadline=None)
@given(drawings())
def test_edges_lead_down_and_past_other_boxes(drawing: tuple[dict[str, tuple[float, float]], list[Edge]]) -> None:
    layout = lay_out(*drawing, MARGIN)
    for path in layout.paths:
        assert path.items[0] is layout.boxes[path.edge.source] and path.items[-1] is layout.boxes[path.edge.target]
        assert path.label in path.items
        for upper, lower in itertools.pairwise(path.items):
            assert lower.layer == upper.layer + 1 and upper.y < lower.y
        for passed in path.items[1:-1]:
            for box in layout.boxes.values():
                assert box.layer != passed.layer or abs(box.x - passed.x) > (box.width + passed.width) / 2


def test_a_chain_is_straight() -> None:
    edges = [Edge("a", "b", (50.0, 10.0)), Edge("b", "c", (80.0, 10.0))]
    layout = lay_out({"a": (40.0, 20.0), "b": (90.0, 20.0), "c": (60.0, 20.0)}, edges, MARGIN)
    assert len({round(item.x, 6) for item in drawn(layout)}) == 1


def test_crossings_are_avoided() -> None:
    """a leads to d and b to c: listed crosswise, drawn side by side."""
    sizes = dict.fromkeys("abcd", (40.0, 20.0))
    boxes = lay_out(sizes, [Edge("a", "d", (0.0, 0.0)), Edge("b", "c", (0.0, 0.0))], MARGIN).boxes
    assert (boxes["a"].x < boxes["b"].x) == (boxes["d"].x < boxes["c"].x)
