"""Finds out in which order the nodes of a graph may run, what flows between them, and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from embodyrl.errors import UnknownNameError
from embodyrl.pipelines.graph import RESOURCES, Graph, GraphError, GraphFault, Node, certain, plain
from embodyrl.registry import near_match

Edges = dict[str, set[str]]
"""For each node the nodes that must have run before it."""

NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True)
class Flow:
    """Columns that one node has from another."""

    source: str
    target: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Dataflow:
    """A graph without faults."""

    nodes: tuple[Node, ...]
    """In an order in which they can run one by one; otherwise as listed. With everything their stages declare."""
    predecessors: Mapping[str, frozenset[str]]
    """For each node those that must have run before it; only direct ones."""
    flows: tuple[Flow, ...]


def analyse(graph: Graph) -> Dataflow:
    """Look whether the nodes fit together.

    Raises:
        GraphError: with all faults: names, duplicate writers, unknown inputs, circles, nodes that nobody needs.
    """
    nodes, faults = _declared(graph)
    analysis = _Analysis(nodes)
    if not faults:
        faults = [*analysis.duplicate_writers(), *analysis.unknown_inputs()]
    faults += _circles(analysis.first_edges)
    if not faults:
        faults = [*analysis.contested(), *analysis.beginnings(), *_circles(analysis.edges)]
    if not faults:
        faults = [*analysis.unneeded()]
    if faults:
        raise GraphError(faults)
    order = tuple(analysis.by_name[name] for name in analysis.order)
    direct = {name: frozenset(_direct(before, analysis.ancestors)) for name, before in analysis.edges.items()}
    return Dataflow(order, direct, tuple(analysis.flows))


def _declared(graph: Graph) -> tuple[list[Node], list[GraphFault]]:
    """The nodes with what their stages declare, and what is wrong with single ones."""
    names = graph.names()
    nodes, faults = [], []
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            faults.append(GraphFault(f"{names.count(name)} nodes are called {name!r}", "rename all but one", (name,)))
        if not NAME.fullmatch(name):
            faults.append(GraphFault(f"{name!r} is no name for a node", "use letters, digits and _", (name,)))
    for node in graph.nodes:
        for other in node.after:
            if other not in names:
                message = f"node {node.name!r} follows {other!r}, which is not in the graph"
                faults.append(GraphFault(message, did_you_mean(other, names), (node.name,)))
        try:
            nodes.append(node.declared())
        except UnknownNameError as error:
            faults.append(GraphFault(f"node {node.name!r}: {error}", "name one of them", (node.name,)))
            nodes.append(node)
    return nodes, faults


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name."""
    listed = sorted(set(known))
    near = near_match(name, listed)
    return f"did you mean {near!r}?" if near else f"one of {', '.join(listed) or 'none'}"


@dataclass
class _Analysis:
    """One look at a graph, step by step."""

    nodes: Sequence[Node]
    by_name: dict[str, Node] = field(init=False)
    writers: dict[str, list[str]] = field(init=False)
    """Nodes that add a column, as listed."""

    def __post_init__(self) -> None:
        self.by_name = {node.name: node for node in self.nodes}
        self.writers = {}
        for node in self.nodes:
            for column in dict.fromkeys(plain(node.writes)):
                self.writers.setdefault(column, []).append(node.name)

    def duplicate_writers(self) -> Iterator[GraphFault]:
        """Columns that are not written once and for all."""
        shared: dict[tuple[str, ...], list[str]] = {}
        for column, names in self.writers.items():
            if column in RESOURCES:
                message = f"node {names[0]!r} writes {column!r}, which is a resource"
                yield GraphFault(message, "declare it under `changes`", tuple(names))
            elif len(names) > 1:
                shared.setdefault(tuple(names), []).append(column)
        for writers, columns in shared.items():
            what = "column" if len(columns) == 1 else "columns"
            message = f"nodes {' and '.join(map(repr, writers))} write the same {what} {_listed(columns)}"
            yield GraphFault(message, "let one write and the others declare it under `changes`", writers)

    def unknown_inputs(self) -> Iterator[GraphFault]:
        """What is read and neither written nor a resource."""
        known = [*self.writers, *RESOURCES]
        for node in self.nodes:
            for verb, names in (("reads", node.reads), ("changes", node.changes)):
                for column in certain(names):
                    if column not in known:
                        message = f"node {node.name!r} {verb} column {column!r}, which no node writes"
                        yield GraphFault(message, did_you_mean(column, known), (node.name,))

    def changers(self, column: str) -> list[str]:
        """Nodes that change a column or resource, as listed."""
        return [node.name for node in self.nodes if column in plain(node.changes)]

    @cached_property
    def first_edges(self) -> Edges:
        """Nodes follow what they say, and those that write what they read."""
        edges: Edges = {}
        for node in self.nodes:
            needs = plain((*node.reads, *node.changes))
            writers = {name for column in needs for name in self.writers.get(column, ())}
            edges.setdefault(node.name, set()).update(writers, set(node.after) & self.by_name.keys())
        return edges

    @cached_property
    def edges(self) -> Edges:
        """All edges: who reads something follows those who change it, except those that follow the reader anyway.

        Columns come first: who uses the policy before it learns is a matter of what it learns from.
        """
        edges = {name: set(earlier) for name, earlier in self.first_edges.items()}
        for of_resources in (False, True):
            before = closure(edges)
            for node in self.nodes:
                for name in plain(node.reads):
                    if (name in RESOURCES) is of_resources:
                        changers = {other for other in self.changers(name) if node.name not in before[other]}
                        edges[node.name] |= changers - {node.name}
        return edges

    @cached_property
    def ancestors(self) -> Edges:
        """All nodes that have run before each node."""
        return closure(self.edges)

    def contested(self) -> Iterator[GraphFault]:
        """What two nodes change, neither of which follows the other."""
        everything = [column for node in self.nodes for column in plain(node.changes)]
        for column in dict.fromkeys(everything):
            changers = self.changers(column)
            for index, one in enumerate(changers):
                for other in changers[index + 1 :]:
                    if one not in self.ancestors[other] and other not in self.ancestors[one]:
                        message = f"nodes {one!r} and {other!r} both change {column!r}, and neither follows the other"
                        yield GraphFault(message, f"say which comes first with `after: [{one}]`", (other, one))

    def beginnings(self) -> Iterator[GraphFault]:
        """Nodes that add columns to a batch which nobody before them begins, beside the first of them."""
        writing = [node.name for node in self.nodes if node.writes]
        roots = [name for name in writing if not self.ancestors[name] & set(writing)]
        for other in roots[1:]:
            message = f"nodes {roots[0]!r} and {other!r} both begin the batch, since neither follows the other"
            yield GraphFault(message, f"let {other!r} read something, or say `after: [{roots[0]}]`", (other, roots[0]))

    @cached_property
    def order(self) -> list[str]:
        """Every node after its predecessors; where there is a choice, as listed."""
        done: list[str] = []
        while len(done) < len(self.by_name):
            done.append(next(name for name in self.by_name if name not in done and self.edges[name] <= set(done)))
        return done

    @cached_property
    def flows(self) -> list[Flow]:
        """What goes from node to node: each column from the last node before that wrote or changed it."""
        flows: dict[tuple[str, str], list[str]] = {}
        for target in self.order:
            node = self.by_name[target]
            for column in dict.fromkeys(plain((*node.reads, *node.changes))):
                hands = {*self.writers.get(column, ()), *self.changers(column)} & self.ancestors[target]
                if column in self.writers and hands:
                    source = max(hands, key=self.order.index)
                    flows.setdefault((source, target), []).append(self._shown(column))
        return [Flow(*ends, tuple(columns)) for ends, columns in flows.items()]

    def _shown(self, column: str) -> str:
        """A column, with a question mark if even its writer may leave it out."""
        written = [name for writer in self.writers[column] for name in self.by_name[writer].writes]
        return column if column in written else f"{column}?"

    def unneeded(self) -> Iterator[GraphFault]:
        """Nodes whose columns reach no node that has an effect: that changes a resource, or reports metrics only."""
        needed = {node.name for node in self.nodes if not (node.writes or node.changes) or _acts(node)}
        for name in reversed(self.order):
            needed |= {flow.source for flow in self.flows if flow.target == name and name in needed}
        for name in self.order:
            if name not in needed:
                node = self.by_name[name]
                columns = _listed(plain((*node.writes, *node.changes)))
                message = f"node {name!r} leads nowhere: no node with an effect depends on the {columns} it gives"
                yield GraphFault(message, "drop it, or let a node read that", (name,))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _acts(node: Node) -> bool:
    return any(column in RESOURCES for column in plain(node.changes))


def closure(edges: Edges) -> Edges:
    """From direct predecessors to all of them."""
    reached = {name: set(before) for name, before in edges.items()}
    grew = True
    while grew:
        grew = False
        for before in reached.values():
            more = before.union(*(reached[name] for name in before))
            grew |= len(more) > len(before)
            before |= more
    return reached


def _direct(before: set[str], ancestors: Edges) -> set[str]:
    """Predecessors that are not predecessors of another predecessor."""
    return {name for name in before if not any(name in ancestors[other] for other in before)}


def _circles(edges: Edges) -> Iterator[GraphFault]:
    """Nodes that wait for each other, each circle once."""
    before = closure(edges)
    reported: set[str] = set()
    for name in edges:
        if name in before[name] and name not in reported:
            ring = {other for other in before[name] if name in before[other]}
            reported |= ring
            path = _walk(name, edges, ring)
            message = f"nodes wait for each other in a circle: {' -> '.join(map(repr, path))}"
            if len(path) == 2:
                message = f"node {name!r} waits for itself"
            yield GraphFault(message, "let one of them read or follow something else", tuple(path[:-1]))


def _walk(start: str, edges: Edges, ring: set[str]) -> list[str]:
    """Once around a circle, in the order in which the nodes would run."""
    path = [start]
    while path.count(path[-1]) == 1:
        path.append(next(name for name in edges if name in edges[path[-1]] and name in ring))
    return path[path.index(path[-1]) :][::-1]
