"""An iteration as a graph: nodes that declare which columns of the batch they read and write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from embodyrl.config.schema import Config
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.errors import UserError
from embodyrl.registry import near_match
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.collector import Collector


class GraphError(UserError):
    """Raised when a graph has a cycle, reads what nobody writes, or writes something twice."""


@dataclass(kw_only=True)
class Iteration:
    """What the nodes of one iteration work with and on."""

    config: Config
    collector: Collector
    engine: HybridEngine
    batch: TrajectoryBatch | None = None
    """Set by the node that collects."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A step of an iteration."""

    name: str
    run: Callable[[Iteration], None]
    reads: tuple[str, ...] = ()
    """Columns of the batch that must be there before."""
    writes: tuple[str, ...] = ()
    """Columns that are there afterwards."""
    after: tuple[str, ...] = ()
    """Nodes that must have run before, apart from those that write what this one reads."""


class Graph:
    """Nodes in an order in which everything is written before it is read.

    Args:
        nodes: in any order.

    Raises:
        GraphError: names the nodes and columns at fault.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        by_name = {node.name: node for node in nodes}
        if len(by_name) < len(nodes):
            names = [node.name for node in nodes]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise GraphError(f"two nodes have the same name: {', '.join(twice)}")
        writer = _writers(nodes)
        edges = {node.name: _predecessors(node, writer, by_name) for node in nodes}
        try:
            self.nodes = [by_name[name] for name in TopologicalSorter(edges).static_order()]
        except CycleError as error:
            raise GraphError(f"the nodes wait for each other in a circle: {' -> '.join(error.args[1])}") from error

    def run(self, iteration: Iteration) -> None:
        """Run every node; adds `time/<node>` [s] to the metrics."""
        for node in self.nodes:
            start = time.perf_counter()
            node.run(iteration)
            iteration.metrics[f"time/{node.name}"] = time.perf_counter() - start
            missing = [name for name in node.writes if iteration.batch is None or name not in iteration.batch]
            if missing:
                raise GraphError(f"node {node.name!r} declares that it writes {', '.join(missing)}, but did not")


def _writers(nodes: Sequence[Node]) -> dict[str, str]:
    writer: dict[str, str] = {}
    for node in nodes:
        for column in node.writes:
            if column in writer:
                raise GraphError(f"column {column!r} is written by two nodes: {writer[column]!r} and {node.name!r}")
            writer[column] = node.name
    return writer


def _predecessors(node: Node, writer: dict[str, str], by_name: dict[str, Node]) -> set[str]:
    predecessors = set()
    for column in node.reads:
        if column not in writer:
            near = near_match(column, list(writer))
            hint = f" - did you mean {near!r}?" if near else ""
            raise GraphError(
                f"node {node.name!r} reads column {column!r}, which no node writes{hint} "
                f"(written: {', '.join(sorted(writer)) or 'nothing'})"
            )
        predecessors.add(writer[column])
    for name in node.after:
        if name not in by_name:
            raise GraphError(f"node {node.name!r} follows {name!r}, which is not in the graph")
        predecessors.add(name)
    return predecessors
