"""A reward in one file, outside the package: the simulator's own, less a cost of the actions.

    embodyrl run examples/custom_reward.yaml

The function names what it needs, columns of the batch (rollout/columns.py lists them) and options of its own, and gets
exactly that. Filters, advantages, losses and encoders are added in the same way; see custom_loss.py and
docs/algorithms.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embodyrl.config.schema import RewardConfig, setting
from embodyrl.registry import REWARDS


@dataclass(frozen=True, kw_only=True)
class GentleConfig(RewardConfig):
    """The simulator's reward, less the effort."""

    cost: float = setting(0.01, low=0.0)
    """Cost of an action of length 1."""


def gentle(*, rewards: Tensor, actions: Tensor, cost: float) -> Tensor:
    """Rewards `[K, B, C]` less a cost of the actions `[K, B, C, D]`."""
    return rewards - cost * actions.square().sum(-1)


REWARDS.register("gentle", target=gentle, options=GentleConfig, whole=False, summary="dense, less the effort")
