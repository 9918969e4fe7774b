from __future__ import annotations

import pytest

from embodyrl.pipelines.dataflow import Dataflow, analyse
from embodyrl.pipelines.graph import Graph, GraphError, Node
from embodyrl.pipelines.iteration import Iteration


def nothing(iteration: Iteration) -> None:
    pass


def node(name: str, *, reads: str = "", writes: str = "", changes: str = "", after: str = "") -> Node:
    """A node; its columns are named in one text."""
    return Node(
        name,
        nothing,
        reads=tuple(reads.split()),
        writes=tuple(writes.split()),
        changes=tuple(changes.split()),
        after=tuple(after.split()),
    )


ROLLOUT = node("rollout", reads="policy", writes="rewards success values?", changes="simulators")
ADVANTAGE = node("advantage", reads="rewards values?", writes="advantages")
UPDATE = node("update", reads="advantages values?", changes="policy")


def order(*nodes: Node) -> list[str]:
    return [each.name for each in analyse(Graph(nodes)).nodes]


def faults(*nodes: Node) -> list[str]:
    with pytest.raises(GraphError) as caught:
        analyse(Graph(nodes))
    return [str(fault) for fault in caught.value.faults]


def flows(dataflow: Dataflow) -> dict[str, str]:
    return {f"{flow.source} {flow.target}": " ".join(flow.columns) for flow in dataflow.flows}


def test_nodes_run_after_those_that_write_what_they_read() -> None:
    assert order(UPDATE, ADVANTAGE, ROLLOUT) == ["rollout", "advantage", "update"]


def test_after_orders_nodes_that_share_no_column() -> None:
    assert order(node("b", after="a"), node("a")) == ["a", "b"]


def test_independent_nodes_wait_for_nothing_but_their_own_inputs() -> None:
    embed = node("embed", reads="success", writes="embeddings")
    bonus = node("bonus", reads="embeddings")
    found = analyse(Graph([ROLLOUT, ADVANTAGE, embed, bonus, UPDATE])).predecessors
    assert found == {
        "rollout": set(),
        "advantage": {"rollout"},
        "embed": {"rollout"},
        "bonus": {"embed"},
        "update": {"advantage"},
    }


def test_who_reads_a_column_follows_those_who_change_it() -> None:
    shape = node("shape", changes="rewards", reads="success")
    whiten = node("whiten", changes="rewards", after="shape")
    dataflow = analyse(Graph([ADVANTAGE, whiten, shape, ROLLOUT, UPDATE]))
    assert [each.name for each in dataflow.nodes] == ["rollout", "shape", "whiten", "advantage", "update"]
    assert flows(dataflow) == {
        "rollout shape": "success rewards",
        "shape whiten": "rewards",
        "whiten advantage": "rewards",
        "rollout advantage": "values?",
        "rollout update": "values?",
        "advantage update": "advantages",
    }


def test_a_column_can_be_read_before_it_is_changed() -> None:
    watch = node("watch", reads="rewards")
    shape = node("shape", changes="rewards", after="watch")
    dataflow = analyse(Graph([ROLLOUT, watch, shape, ADVANTAGE, UPDATE]))
    assert [each.name for each in dataflow.nodes] == ["rollout", "watch", "shape", "advantage", "update"]
    assert flows(dataflow)["rollout watch"] == flows(dataflow)["rollout shape"] == "rewards"


def test_resources_order_nodes_too() -> None:
    """The rollout reads the policy and leads to the update, so it comes first; a look at the policy comes last."""
    look = node("look", reads="policy")
    assert order(look, ROLLOUT, ADVANTAGE, UPDATE) == ["rollout", "advantage", "update", "look"]


def test_a_column_that_nobody_writes_is_named_with_a_near_match() -> None:
    assert faults(ROLLOUT, node("update", reads="reward")) == [
        "node 'update' reads column 'reward', which no node writes - did you mean 'rewards'?"
    ]
    assert faults(node("shape", changes="xyz")) == [
        "node 'shape' changes column 'xyz', which no node writes - one of demonstrations, policy, simulators"
    ]


def test_two_writers_of_a_column_are_named() -> None:
    other = node("other", writes="rewards", changes="simulators")
    assert faults(ROLLOUT, other, ADVANTAGE, UPDATE) == [
        "nodes 'rollout' and 'other' write the same column 'rewards' - let one write and the others declare it under "
        "`changes`"
    ]
    assert "node 'a' writes 'policy', which is a resource" in faults(node("a", writes="policy"))[0]


def test_a_circle_is_spelt_out() -> None:
    circle = [node("a", reads="z", writes="x"), node("b", reads="x", writes="y"), node("c", reads="y", writes="z")]
    (fault,) = faults(*circle)
    assert fault.startswith("nodes wait for each other in a circle: 'a' -> 'b' -> 'c' -> 'a'")
    assert "node 'a' waits for itself" in faults(node("a", after="a"))[0]


def test_two_that_read_what_the_other_changes_are_a_circle() -> None:
    (fault,) = faults(
        ROLLOUT, node("a", changes="rewards", reads="success"), node("b", changes="success", reads="rewards")
    )
    assert fault.startswith("nodes wait for each other in a circle: ")


def test_two_that_change_a_column_need_an_order() -> None:
    assert faults(ROLLOUT, node("a", changes="rewards"), node("b", changes="rewards"), ADVANTAGE, UPDATE) == [
        "nodes 'a' and 'b' both change 'rewards', and neither follows the other - say which comes first with "
        "`after: [a]`"
    ]


def test_only_one_node_begins_the_batch() -> None:
    stray = node("stray", writes="noise")
    assert faults(ROLLOUT, stray, node("watch", reads="noise"), ADVANTAGE, UPDATE) == [
        "nodes 'rollout' and 'stray' both begin the batch, since neither follows the other - let 'stray' read "
        "something, or say `after: [rollout]`"
    ]


def test_a_node_that_nobody_needs_is_named_with_those_that_serve_it_alone() -> None:
    embed = node("embed", reads="success", writes="embeddings")
    project = node("project", reads="embeddings", writes="points")
    assert faults(ROLLOUT, embed, project, ADVANTAGE, UPDATE) == [
        "node 'embed' leads nowhere: no node with an effect depends on the 'embeddings' it gives - drop it, or let a "
        "node read that",
        "node 'project' leads nowhere: no node with an effect depends on the 'points' it gives - drop it, or let a "
        "node read that",
    ]
    assert order(ROLLOUT, embed, node("report", reads="embeddings"), ADVANTAGE, UPDATE)


def test_names_are_checked() -> None:
    assert faults(node("a"), node("a"), node("no good")) == [
        "2 nodes are called 'a' - rename all but one",
        "'no good' is no name for a node - use letters, digits and _",
    ]
    assert faults(ROLLOUT, node("a", after="rolout")) == [
        "node 'a' follows 'rolout', which is not in the graph - did you mean 'rollout'?"
    ]
    assert "stage 'colect' is not registered - did you mean 'collect'?" in faults(Node("rollout", "colect"))[0]


def test_all_faults_come_at_once() -> None:
    found = faults(
        ROLLOUT,
        node("other", writes="rewards"),
        node("a", reads="y", writes="x"),
        node("b", reads="x", writes="y"),
        node("c", reads="nothing"),
    )
    assert len(found) == 3 and "write the same" in found[0] and "no node writes" in found[1] and "circle" in found[2]


def test_dropping_a_node_links_its_neighbours() -> None:
    graph = Graph([node("a"), node("b", after="a"), node("c", after="b")]).drop("b")
    assert graph.names() == ["a", "c"] and graph.nodes[1].after == ("a",)


def test_replacing_keeps_the_place_and_inserting_before_makes_followers() -> None:
    graph = Graph([ROLLOUT, ADVANTAGE, node("update", reads="advantages", changes="policy", after="advantage")])
    replaced = graph.replace("update", "update").nodes[2]
    assert replaced == Node("update", "update", after=("advantage",)) and "trace" in replaced.declared().reads
    inserted = graph.insert(node("watch", reads="rewards")).put_before(["advantage"], "watch")
    assert [each.name for each in analyse(inserted).nodes] == ["rollout", "watch", "advantage", "update"]
