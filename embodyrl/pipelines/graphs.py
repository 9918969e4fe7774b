"""The built-in graphs. Each reads like the box diagram of its algorithm.

What a stage reads, writes and changes is declared in `builtin_stages.py`, what it does is in `stages.py`, and with
which settings is in configs/algorithm/.
"""

from __future__ import annotations

from embodyrl.config.schema import Config
from embodyrl.pipelines.builtin_stages import CRITIC
from embodyrl.pipelines.graph import Graph, Node

ROLLOUT = Node("rollout", "collect")
ROLLOUT_WITH_CRITIC = Node("rollout", "collect", writes=CRITIC)
ADVANTAGE = Node("advantage", "estimate_advantages")
UPDATE = Node("update", "update")


def ppo(config: Config) -> Graph:
    """Proximal policy optimisation with a critic (Schulman et al. 2017)."""
    return Graph(
        [
            ROLLOUT_WITH_CRITIC,
            ADVANTAGE,
            UPDATE,
        ]
    )


def grpo(config: Config) -> Graph:
    """Group-relative policy optimisation, without a critic (Shao et al. 2024)."""
    return Graph(
        [
            ROLLOUT,
            ADVANTAGE,
            UPDATE,
        ]
    )
