"""Stages of one's own, some of them wrong."""

from __future__ import annotations

from embodyrl.config.schema import Config
from embodyrl.pipelines import Stage


def build(config: Config) -> list[Stage]:
    """Collects, and that is all."""
    return [Stage("rollout", "collect")]


def divide(config: Config) -> list[Stage]:
    """Fails."""
    return [Stage("rollout", "collect")] * (1 // 0)
