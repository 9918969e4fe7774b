"""A reward in one file, outside the package: the simulator's own, less what the pushing costs.

    embodyrl run examples/custom_reward.yaml

The function names the columns of the batch that it needs (rollout/columns.py lists them) and gets exactly those.
Filters, advantages, losses and encoders are added in the same way; see docs/algorithms.md.
"""

from __future__ import annotations

from torch import Tensor

from embodyrl.registry import REWARDS

COST = 0.01
"""Of an action of length 1."""


def gentle(*, rewards: Tensor, actions: Tensor) -> Tensor:
    """Rewards `[K, B, C]` less a cost of the actions `[K, B, C, D]`."""
    return rewards - COST * actions.square().sum(-1)


REWARDS.register("gentle", target=gentle, facts={"whole": False}, summary="dense, less the effort")
