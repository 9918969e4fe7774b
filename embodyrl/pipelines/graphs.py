"""The built-in graphs. Each reads like the box diagram of its algorithm."""

from __future__ import annotations

from embodyrl.config.schema import Config
from embodyrl.pipelines.graph import Graph, Node
from embodyrl.pipelines.stages import collect, estimate_advantages, update

DECISIONS = ("task", "actions", "logprobs", "rewards", "success", "terminated", "truncated", "steps", "valid", "trace")
CRITIC = ("values", "next_values")
LEARNED_FROM = ("task", "trace", "logprobs", "valid", "advantages", "returns")


def ppo(config: Config) -> Graph:
    """Proximal policy optimisation with a critic (Schulman et al. 2017)."""
    return Graph(
        [
            Node(name="rollout", run=collect, writes=(*DECISIONS, *CRITIC)),
            Node(
                name="advantage",
                run=estimate_advantages,
                reads=("rewards", "terminated", "truncated", "steps", "valid", *CRITIC),
                writes=("advantages", "returns"),
            ),
            Node(name="update", run=update, reads=(*LEARNED_FROM, *CRITIC)),
        ]
    )


def grpo(config: Config) -> Graph:
    """Group-relative policy optimisation, without a critic (Shao et al. 2024)."""
    return Graph(
        [
            Node(name="rollout", run=collect, writes=DECISIONS),
            Node(
                name="advantage",
                run=estimate_advantages,
                reads=("rewards", "terminated", "truncated", "steps", "valid"),
                writes=("advantages", "returns"),
            ),
            Node(name="update", run=update, reads=LEARNED_FROM),
        ]
    )
