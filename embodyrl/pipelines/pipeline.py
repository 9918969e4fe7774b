"""A graph that fits together, and running it: every node as soon as its own predecessors are done."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from embodyrl.errors import UserError
from embodyrl.pipelines.dataflow import Dataflow, analyse
from embodyrl.pipelines.graph import RESOURCES, Graph, Node, certain, plain
from embodyrl.pipelines.iteration import Iteration

if TYPE_CHECKING:
    from embodyrl.rollout.batch import TrajectoryBatch


class NodeError(UserError):
    """Raised when a node does something else than it declares."""


class Pipeline:
    """An iteration that can be run.

    Args:
        graph: its nodes.

    Raises:
        GraphError: the nodes do not fit together; with all faults.
    """

    def __init__(self, graph: Graph) -> None:
        self.dataflow: Dataflow = analyse(graph)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """In an order in which they could run one by one."""
        return self.dataflow.nodes

    def run(self, iteration: Iteration) -> None:
        """Run every node; fills `iteration.batch`, and `iteration.metrics` with those of the nodes and
        `time/node/<name>` [s]. The times of nodes that ran at once overlap.

        The first exception of a node ends the iteration once the nodes at work are done; it says which node it is from.

        Raises:
            NodeError: a node reads, writes or changes what it does not declare, or leaves out what it does.
        """
        work = _Work(self.dataflow, iteration)
        with ThreadPoolExecutor(len(self.nodes), thread_name_prefix="node") as threads:
            work.run(threads)
        for node in self.nodes:
            iteration.metrics |= work.metrics.get(node.name, {})
        failed = [node.name for node in self.nodes if node.name in work.errors]
        if failed:
            error = work.errors[failed[0]]
            for other in failed[1:]:
                error.add_note(f"(meanwhile in node {other!r}: {work.errors[other]!r})")
            raise error


class _Work:
    """One run of a graph.

    Nodes that change a resource run in the thread that called, since simulator processes die with the thread that
    started them, and each thread has a current GPU of its own. All others run in threads of a pool.
    """

    def __init__(self, dataflow: Dataflow, iteration: Iteration) -> None:
        self.nodes = dataflow.nodes
        self.iteration = iteration
        self.metrics: dict[str, dict[str, float]] = {}
        self.errors: dict[str, BaseException] = {}
        self._waiting = {name: set(before) for name, before in dataflow.predecessors.items()}
        self._started: set[str] = set()
        self._running = 0
        self._lock = threading.Lock()
        self._mine: SimpleQueue[Node | None] = SimpleQueue()
        """Nodes for the thread that called; None: that was all."""

    def run(self, threads: ThreadPoolExecutor) -> None:
        """Run everything, or until something fails; returns once nothing runs any more."""
        with self._lock:
            self._start_those_ready(threads)
        while (node := self._mine.get()) is not None:
            self._perform(node, threads)

    def _start_those_ready(self, threads: ThreadPoolExecutor) -> None:
        """Start every node that waits for nothing; the lock is held."""
        for node in self.nodes:
            if node.name not in self._started and not self._waiting[node.name] and not self.errors:
                self._started.add(node.name)
                self._running += 1
                if set(plain(node.changes)) & set(RESOURCES):
                    self._mine.put(node)
                else:
                    threads.submit(self._perform, node, threads)
        if not self._running:
            self._mine.put(None)

    def _perform(self, node: Node, threads: ThreadPoolExecutor) -> None:
        """Run one node, and start those that waited for it."""
        try:
            self._execute(node)
        except BaseException as error:  # raised again in the thread that called
            error.add_note(f"(in node {node.name!r} of the iteration)")
            self.errors[node.name] = error
        with self._lock:
            self._running -= 1
            for before in self._waiting.values():
                before.discard(node.name)
            self._start_those_ready(threads)

    def _execute(self, node: Node) -> None:
        if self.errors:
            return  # something failed while this one was queueing
        stage = node.function()
        with self._lock:
            own = _own_iteration(node, self.iteration)
        before = _contents(own.batch)
        start = time.perf_counter()
        stage(own)
        self.metrics[node.name] = own.metrics | {f"time/node/{node.name}": time.perf_counter() - start}
        with self._lock:
            _take_over(node, own.batch, before, self.iteration)


def _own_iteration(node: Node, iteration: Iteration) -> Iteration:
    """What a node may see: the columns and resources that it declares."""
    declared = plain((*node.reads, *node.changes))
    batch = iteration.batch
    undeclared: Any = _Undeclared(node.name)
    return dataclasses.replace(
        iteration,
        collector=iteration.collector if "simulators" in declared else undeclared,
        engine=iteration.engine if "policy" in declared else undeclared,
        demonstrations=iteration.demonstrations if "demonstrations" in declared else undeclared,
        batch=None if batch is None else batch.select(*(name for name in batch.columns() if name in declared)),
        metrics={},
    )


class _Undeclared:
    """Stands where a resource would be that a node does not declare."""

    def __init__(self, node: str) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        raise NodeError(
            f"node {self._node!r} uses {name!r} of a resource that it does not declare: add 'policy' (the engine), "
            f"'simulators' (the collector) or 'demonstrations' to what it reads or changes"
        )


def _contents(batch: TrajectoryBatch | None) -> dict[str, tuple[Any, ...]]:
    """Each column with its version, which tells a column that was changed in place."""
    if batch is None:
        return {}
    return {name: (batch.data[name], *_versions(batch.data[name])) for name in batch.columns()}


def _versions(column: Any) -> list[int]:
    leaves = column.values(True, True) if hasattr(column, "batch_size") else [column]
    return [0 if leaf.is_inference() else leaf._version for leaf in leaves]


def _take_over(
    node: Node, batch: TrajectoryBatch | None, before: dict[str, tuple[Any, ...]], iteration: Iteration
) -> None:
    """Check what a node left in its batch against what it declares, and pass it on to the nodes after it."""
    contents = _contents(batch)
    changed = [name for name, content in contents.items() if not _is_same(before.get(name), content)]
    allowed = plain((*node.writes, *node.changes))
    for name in changed:
        if name not in allowed:
            verb = "changes" if name in before else "writes"
            raise NodeError(
                f"node {node.name!r} {verb} column {name!r}, which it does not declare (declared: "
                f"{', '.join(allowed) or 'none'})"
            )
    missing = [name for name in certain(node.writes) if name not in contents]
    if missing:
        raise NodeError(f"node {node.name!r} declares that it writes {', '.join(map(repr, missing))}, but did not")
    if batch is not None and changed:
        iteration.batch = _merged(node, iteration.batch, batch, changed)


def _is_same(one: tuple[Any, ...] | None, other: tuple[Any, ...]) -> bool:
    return one is not None and one[0] is other[0] and one[1:] == other[1:]


def _merged(node: Node, whole: TrajectoryBatch | None, batch: TrajectoryBatch, changed: list[str]) -> TrajectoryBatch:
    """The batch of the iteration with a node's columns laid over it."""
    if whole is None or whole.size == batch.size:
        merged = batch.select() if whole is None else whole.select(*whole.columns())
        for name in changed:
            merged[name] = batch[name]
        if "task" in changed:
            merged.sentences = list(batch.sentences)
        return merged
    left = [name for name in whole.columns() if name not in changed]
    if left:
        raise NodeError(
            f"node {node.name!r} changes the batch from [K, B] = {list(whole.size)} to {list(batch.size)}, but leaves "
            f"{', '.join(map(repr, left))} as before: declare under `changes` whatever must change with it"
        )
    return batch.select(*changed)
