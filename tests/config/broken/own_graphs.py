"""Graphs of one's own, some of them wrong."""

from __future__ import annotations

from embodyrl.config.schema import Config
from embodyrl.pipelines import Graph, Node


def build(config: Config) -> Graph:
    """Collects, and that is all."""
    return Graph([Node("rollout", "collect")])


def divide(config: Config) -> Graph:
    """Fails."""
    return Graph([Node("rollout", "collect")] * (1 // 0))
