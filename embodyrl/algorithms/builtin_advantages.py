"""Advantage estimators that come with embodyrl, declared by name."""

from __future__ import annotations

from embodyrl.registry import ADVANTAGES

COMPARES = "embodyrl.algorithms.check:compares_groups"
CHECK = "embodyrl.algorithms.check:check_grpo"

ADVANTAGES.register(
    "gae",
    target="embodyrl.algorithms.advantages:gae",
    options="embodyrl.algorithms.options:GAEConfig",
    critic=True,
    whole=False,
    group=False,
    actions=False,
    summary="generalised advantage estimation (Schulman et al. 2016); needs a critic",
)
ADVANTAGES.register(
    "grpo",
    target="embodyrl.algorithms.advantages:grpo",
    options="embodyrl.algorithms.options:GRPOConfig",
    critic=False,
    whole=True,
    group=COMPARES,
    actions=False,
    check=CHECK,
    summary="return relative to a group's or the batch's: GRPO, Dr.GRPO, RLOO, REINFORCE++-baseline; no critic",
)
ADVANTAGES.register(
    "reinforce_pp",
    target="embodyrl.algorithms.advantages:reinforce_pp",
    critic=False,
    whole=True,
    group=False,
    actions=True,
    summary="discounted return to the end of the episode (REINFORCE++, Hu et al. 2025); no critic",
)
ADVANTAGES.register(
    "raw",
    target="embodyrl.algorithms.advantages:raw",
    critic=False,
    whole=False,
    group=False,
    actions=True,
    summary="the reward itself, for reward functions that assign credit",
)
