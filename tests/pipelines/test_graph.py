from __future__ import annotations

import pytest

from embodyrl.pipelines.graph import Graph, GraphError, Iteration, Node


def node(name: str, *, reads: str = "", writes: str = "", after: str = "") -> Node:
    def run(iteration: Iteration) -> None:
        iteration.metrics[name] = float(len(iteration.metrics))

    return Node(
        name=name, run=run, reads=tuple(reads.split()), writes=tuple(writes.split()), after=tuple(after.split())
    )


def names(graph: Graph) -> list[str]:
    return [each.name for each in graph.nodes]


def test_nodes_run_after_those_that_write_what_they_read() -> None:
    graph = Graph(
        [
            node("update", reads="advantages values"),
            node("advantage", reads="rewards", writes="advantages"),
            node("rollout", writes="rewards values"),
        ]
    )
    assert names(graph) == ["rollout", "advantage", "update"]


def test_after_orders_nodes_that_share_no_column() -> None:
    assert names(Graph([node("b", after="a"), node("a")])) == ["a", "b"]


def test_a_column_that_nobody_writes_is_named_with_a_near_match() -> None:
    with pytest.raises(GraphError, match=r"'update' reads column 'advantage', .* did you mean 'advantages'\?"):
        Graph([node("a", writes="advantages"), node("update", reads="advantage")])


def test_two_writers_of_a_column_are_named() -> None:
    with pytest.raises(GraphError, match="'rewards' is written by two nodes: 'a' and 'b'"):
        Graph([node("a", writes="rewards"), node("b", writes="rewards")])


def test_a_circle_is_spelt_out() -> None:
    with pytest.raises(GraphError, match="circle: "):
        Graph([node("a", reads="y", writes="x"), node("b", reads="x", writes="y")])


def test_two_nodes_of_one_name_and_an_unknown_predecessor_are_refused() -> None:
    with pytest.raises(GraphError, match="same name: a"):
        Graph([node("a"), node("a")])
    with pytest.raises(GraphError, match="'a' follows 'z', which is not in the graph"):
        Graph([node("a", after="z")])


def test_a_node_that_does_not_write_what_it_declares_is_caught() -> None:
    iteration = Iteration(config=None, collector=None, engine=None)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="'rollout' declares that it writes rewards, but did not"):
        Graph([node("rollout", writes="rewards")]).run(iteration)


def test_every_node_is_timed() -> None:
    iteration = Iteration(config=None, collector=None, engine=None)  # type: ignore[arg-type]
    Graph([node("a"), node("b", after="a")]).run(iteration)
    assert {"time/a", "time/b"} <= iteration.metrics.keys()
