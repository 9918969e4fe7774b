"""A stage in one file, outside the package: it subtracts the cost of effort from rewards."""

from __future__ import annotations

from embodyrl.pipelines import Iteration
from embodyrl.registry import STAGES

WEIGHT = 0.05


def pay_for_effort(iteration: Iteration) -> None:
    """Subtract a price of the squared actions from shaped rewards; `mine/effort` is their mean over the rollout."""
    batch = iteration.batch
    effort = batch["actions"].square().sum(-1)  # [K, B, C, D] -> [K, B, C]
    batch["shaped_rewards"] = batch["shaped_rewards"] - WEIGHT * effort
    iteration.metrics["mine/effort"] = float(effort.mean())


STAGES.register(
    "pay_for_effort",
    target=pay_for_effort,
    reads=("actions",),
    changes=("shaped_rewards",),
    summary="subtracts the squared actions from the reward",
)
