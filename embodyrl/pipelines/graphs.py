"""The built-in graphs. Each reads like the box diagram of its algorithm.

What a stage reads, writes and changes is declared in `builtin_stages.py`, what it does is in `stages.py`, and with
which settings is in configs/algorithm/.
"""

from __future__ import annotations

from embodyrl.config.schema import Config
from embodyrl.pipelines.graph import Graph, Node

ROLLOUT = Node("rollout", "collect")
ROLLOUT_WITH_CRITIC = Node("rollout", "collect", writes=("values", "next_values"))
FILTER = Node("filter", "filter_groups")
REWARD = Node("reward", "shape_rewards")
ADVANTAGE = Node("advantage", "estimate_advantages")
UPDATE = Node("update", "update")
IMITATE = Node("update", "imitate")


def ppo(config: Config) -> Graph:
    """Proximal policy optimisation with a critic (Schulman et al. 2017)."""
    return Graph(
        [
            ROLLOUT_WITH_CRITIC,
            REWARD,
            ADVANTAGE,
            UPDATE,
        ]
    )


def grpo(config: Config) -> Graph:
    """Group-relative policy optimisation, without a critic (Shao et al. 2024)."""
    return Graph(
        [
            ROLLOUT,
            REWARD,
            ADVANTAGE,
            UPDATE,
        ]
    )


def dapo(config: Config) -> Graph:
    """GRPO with dynamic sampling: groups that teach nothing are replaced by others (Yu et al. 2025)."""
    return Graph(
        [
            ROLLOUT,
            FILTER,
            REWARD,
            ADVANTAGE,
            UPDATE,
        ]
    )


def reinforce_pp(config: Config) -> Graph:
    """REINFORCE++: returns normalised over the whole batch (Hu 2025)."""
    return Graph(
        [
            ROLLOUT,
            REWARD,
            ADVANTAGE,
            UPDATE,
        ]
    )


def rloo(config: Config) -> Graph:
    """REINFORCE leave-one-out: each episode against the mean of the others in its group (Ahmadian et al. 2024)."""
    return Graph(
        [
            ROLLOUT,
            REWARD,
            ADVANTAGE,
            UPDATE,
        ]
    )


def cpgd(config: Config) -> Graph:
    """Clipped policy gradient with policy drift (Liu et al. 2025)."""
    return Graph(
        [
            ROLLOUT,
            REWARD,
            ADVANTAGE,
            UPDATE,
        ]
    )


def srpo(config: Config) -> Graph:
    """Self-referential policy optimisation: failures are paid by their distance to the batch's own successes."""
    return Graph(
        [
            ROLLOUT,
            REWARD,
            ADVANTAGE,
            UPDATE,
        ]
    )


def sft(config: Config) -> Graph:
    """Supervised fine-tuning on demonstrations."""
    return Graph(
        [
            IMITATE,
        ]
    )
