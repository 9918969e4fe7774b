"""Rewards that come with embodyrl, declared by name."""

from __future__ import annotations

from embodyrl.registry import REWARDS

REWARDS.register(
    "dense",
    target="embodyrl.algorithms.rewards:dense",
    whole=False,
    summary="the simulator's own reward",
)
REWARDS.register(
    "success",
    target="embodyrl.algorithms.rewards:success",
    whole=True,
    summary="1 for the action that first solves the task, else 0",
)
REWARDS.register(
    "difference",
    target="embodyrl.algorithms.rewards:difference",
    whole=True,
    summary="what the simulator's own reward gained over the action before",
)
REWARDS.register(
    "srpo",
    target="embodyrl.algorithms.rewards:srpo",
    options="embodyrl.algorithms.options:SRPORewardConfig",
    whole=True,
    summary="1 for a success; failures by their distance to successes (self-referential, Fei et al. 2025)",
)
