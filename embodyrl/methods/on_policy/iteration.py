"""Iterations of methods that learn from their newest rollout, each as a list of stages. Imports no torch."""

from __future__ import annotations

from embodyrl.config.schema import Config
from embodyrl.pipelines.pipeline import Stage

COLLECT = Stage("rollout", "collect")
COLLECT_WITH_CRITIC = Stage("rollout", "collect", writes=("values", "next_values"))
FILTER = Stage("filter", "filter_groups")
LEARN = [Stage("reward", "shape_rewards"), Stage("advantage", "estimate_advantages"), Stage("update", "update")]


def ppo(config: Config) -> list[Stage]:
    """Proximal policy optimisation with a critic (Schulman et al. 2017)."""
    return [COLLECT_WITH_CRITIC, *LEARN]


def grpo(config: Config) -> list[Stage]:
    """Group-relative policy optimisation, without a critic (Shao et al. 2024)."""
    return [COLLECT, *LEARN]


def dapo(config: Config) -> list[Stage]:
    """GRPO with dynamic sampling: groups without a learning signal are replaced by others (Yu et al. 2025)."""
    return [COLLECT, FILTER, *LEARN]
