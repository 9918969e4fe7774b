from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from embodyrl.config import load_config
from embodyrl.pipelines.dataflow import Dataflow, analyse
from embodyrl.pipelines.drawing import to_mermaid, to_svg
from embodyrl.pipelines.graph import Graph, Node
from embodyrl.pipelines.iteration import Iteration
from embodyrl.registry import ALGORITHMS

SVG = "{http://www.w3.org/2000/svg}"


def look(iteration: Iteration) -> None:
    """A stage."""


def small() -> Dataflow:
    return analyse(
        Graph(
            [
                Node("rollout", look, writes=("rewards", "values?"), changes=("simulators",), reads=("policy",)),
                Node("learn", look, reads=("rewards", "values?"), changes=("policy",)),
                Node("look", look, after=("learn",), reads=("rewards",)),
                Node("rest", lambda iteration: None, after=("look",)),
            ]
        )
    )


def test_mermaid_names_nodes_stages_resources_and_columns() -> None:
    assert to_mermaid(small()).splitlines() == [
        "flowchart TD",
        '  rollout["<b>rollout</b><br/>look<br/>reads policy<br/>changes simulators"]',
        '  learn["<b>learn</b><br/>look<br/>changes policy"]',
        '  look["<b>look</b><br/>look"]',
        '  rest["<b>rest</b><br/>&lt;lambda&gt;"]',
        '  rollout -- "rewards, values?" --> learn',
        '  rollout -- "rewards" --> look',
        "  learn -.-> look",
        "  look -.-> rest",
    ]


@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo", "reinforce_pp", "rloo", "cpgd", "srpo"])
def test_every_node_and_column_of_a_built_in_graph_is_drawn(name: str) -> None:
    dataflow = analyse(ALGORITHMS.load(name)(load_config("experiment/gym_pendulum").config))
    root = ElementTree.fromstring(to_svg(dataflow))
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    for node in dataflow.nodes:
        assert node.name in texts
    words = [word.strip() for text in texts for word in text.split(",")]
    for column in {column for flow in dataflow.flows for column in flow.columns}:
        drawn = sum(word == column for word in words)
        assert drawn == sum(column in flow.columns for flow in dataflow.flows), column
    lines = [path for path in root.iter(f"{SVG}path") if "edge" in path.get("class", "")]
    pairs = {(flow.source, flow.target) for flow in dataflow.flows}
    assert len(lines) == len(
        pairs | {(source, node) for node in dataflow.predecessors for source in dataflow.predecessors[node]}
    )


def test_text_stays_within_its_box() -> None:
    """Monospaced characters are 0.6 font sizes wide."""
    root = ElementTree.fromstring(to_svg(small()))
    boxes = [
        tuple(float(rect.get(key, "")) for key in ("x", "y", "width", "height"))
        for rect in root.iter(f"{SVG}rect")
        if "box" in rect.get("class", "")
    ]
    assert len(boxes) == 4
    for text in root.iter(f"{SVG}text"):
        size = {"name": 15.0, "note": 11.0, "label": 11.0}[text.get("class", "")]
        x, y, half = float(text.get("x", "")), float(text.get("y", "")), 0.3 * size * len(text.text or "")
        inside = [left <= x - half and x + half <= left + w and top < y < top + h for left, top, w, h in boxes]
        assert any(inside) or text.get("class") == "label"


def test_the_same_graph_is_drawn_the_same() -> None:
    assert to_svg(small()) == to_svg(small())
