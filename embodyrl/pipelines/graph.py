"""An iteration as a graph: nodes that say which columns and resources they read, write and change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from embodyrl.errors import UserError
from embodyrl.pipelines.iteration import Iteration
from embodyrl.registry import STAGES

Stage = Callable[[Iteration], None]

RESOURCES = ("simulators", "policy", "demonstrations")
"""What is there before the first node: `Iteration.collector`, `Iteration.engine` and `Iteration.demonstrations`."""


@dataclass(frozen=True)
class GraphFault:
    """One thing that is wrong with a graph."""

    message: str
    remedy: str
    nodes: tuple[str, ...] = ()
    """The nodes concerned, the one to change first in front."""
    setting: str = ""
    """The setting that is wrong, where it is one: `pipeline.drop.0`."""

    def __str__(self) -> str:
        return f"{self.message} - {self.remedy}"


class GraphError(UserError):
    """Raised with everything that is wrong with a graph at once, before any node runs."""

    exit_code = 2

    def __init__(self, faults: Sequence[GraphFault]) -> None:
        self.faults = tuple(faults)
        super().__init__("the iteration graph is wrong:\n" + "\n".join(f"  {fault}" for fault in faults))


@dataclass(frozen=True)
class Node:
    """A step of an iteration.

    A name with a question mark (`values?`) is one that need not be there. A stage from the registry declares what it
    reads, writes and changes where it is registered; what is said here comes on top.
    """

    name: str
    stage: str | Stage
    """What it does: a name from the registry, or a function."""
    reads: tuple[str, ...] = ()
    """Columns of the batch, or resources, that it looks at."""
    writes: tuple[str, ...] = ()
    """Columns that it adds."""
    changes: tuple[str, ...] = ()
    """Columns that it replaces, or resources that it uses up or alters; it may look at them too."""
    after: tuple[str, ...] = ()
    """Nodes that must have run before, apart from those whose columns it needs."""

    def declared(self) -> Node:
        """The node with everything that its stage declares.

        Raises:
            UnknownNameError: no such stage is registered.
        """
        if not isinstance(self.stage, str):
            return self
        entry = STAGES.entry(self.stage)
        reads, writes, changes = ((*getattr(entry, key), *getattr(self, key)) for key in ("reads", "writes", "changes"))
        return replace(self, reads=reads, writes=writes, changes=changes)

    def function(self) -> Stage:
        """The stage itself, imported if need be."""
        return STAGES.load(self.stage) if isinstance(self.stage, str) else self.stage

    @property
    def stage_name(self) -> str:
        """The stage's name, for people."""
        return self.stage if isinstance(self.stage, str) else self.stage.__name__


def plain(names: Iterable[str]) -> tuple[str, ...]:
    """Names without their question marks."""
    return tuple(name.removesuffix("?") for name in names)


def certain(names: Iterable[str]) -> tuple[str, ...]:
    """Those names that have no question mark."""
    return tuple(name for name in names if not name.endswith("?"))


@dataclass(frozen=True)
class Graph:
    """Nodes in any order; `build` looks whether they fit together.

    Nodes run once what they read has been written and changed by all who change it. To look at a column before a node
    changes it, let that node come `after`.
    """

    nodes: Sequence[Node]

    def names(self) -> list[str]:
        """The names of all nodes."""
        return [node.name for node in self.nodes]

    def insert(self, node: Node) -> Graph:
        """The graph with one more node."""
        return Graph([*self.nodes, node])

    def put_before(self, names: Sequence[str], first: str) -> Graph:
        """The graph with the nodes `names` after the node `first`."""
        return Graph([replace(each, after=(*each.after, first)) if each.name in names else each for each in self.nodes])

    def replace(self, name: str, stage: str | Stage) -> Graph:
        """The graph with another stage in a node; it says itself what it reads, writes and changes."""
        return Graph([Node(name, stage, after=node.after) if node.name == name else node for node in self.nodes])

    def drop(self, name: str) -> Graph:
        """The graph without a node; those that followed it follow what it followed."""
        gone = [node for node in self.nodes if node.name == name]
        link = tuple(each for node in gone for each in node.after)
        kept = [node for node in self.nodes if node.name != name]
        return Graph([replace(node, after=_relinked(node.after, name, link)) for node in kept])


def _relinked(after: tuple[str, ...], gone: str, link: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(new for old in after for new in (link if old == gone else (old,))))
