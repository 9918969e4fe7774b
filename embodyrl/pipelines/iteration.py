"""What the nodes of an iteration work with and on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from embodyrl.config.schema import Config

if TYPE_CHECKING:  # the structure of a graph can be looked at without torch
    from embodyrl.data.batches import Demonstrations
    from embodyrl.engine.hybrid import HybridEngine
    from embodyrl.rollout.batch import TrajectoryBatch
    from embodyrl.rollout.collector import Collector, Rollout


@dataclass(kw_only=True)
class Iteration:
    """What a node is given. Each node has its own: with the columns and resources that it declares, no others."""

    config: Config
    collector: Collector
    """The resource `simulators`."""
    engine: HybridEngine
    """The resource `policy`."""
    demonstrations: Demonstrations | None = None
    """The resource `demonstrations`, where the config names some."""
    batch: TrajectoryBatch | None = None
    """Set by the node that collects; others add columns to it or put another one in its place."""
    rollouts: list[Rollout] = field(default_factory=list)
    """What was collected; nodes share it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Where the node leaves its metrics."""
    warn: Callable[[str, str], None] = lambda kind, text: None
    """Says a warning on screen and in run.log at once; of each kind the first one alone."""
