"""Real-time chunking: chunks that go on from the one before (Black et al. 2025, arXiv:2506.07339).

Shapes: `B` slots of a call, `H` actions of the network's horizon, `A` numbers of an action in the network.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.models.policy import PLAN, PLAN_WEIGHTS, Policy


class Plans:
    """What a policy has planned in the episodes in progress in `num_slots` slots.

    Args:
        shape: `(H, A)`, see `Policy.plan_shape`.
        num_slots: number of slots.
        device: of the policy.
    """

    def __init__(self, shape: tuple[int, int], num_slots: int, device: torch.device) -> None:
        self._plans = torch.zeros(num_slots, *shape, device=device)
        self._has_plan = np.zeros(num_slots, np.bool_)

    @classmethod
    def of(cls, policy: Policy, num_slots: int) -> Plans | None:
        """Return the plans of a policy; None if it makes none."""
        if policy.plan_shape is None:
            return None
        return cls(policy.plan_shape, num_slots, next(policy.parameters()).device)

    def begin(self, slots: NDArray[np.int64]) -> None:
        """Forget the plans of slots that begin an episode."""
        self._has_plan[slots] = False

    def inputs(
        self, slots: NDArray[np.int64], executed: int | NDArray[np.int64], delay: int | NDArray[np.int64]
    ) -> dict[str, Tensor]:
        """Return the inputs of `Policy.act` that make some slots go on from their plans; none if there are no plans.

        Args:
            slots: `[B]`.
            executed: control steps since the last decision of each, `[B]` or the same for all.
            delay: control steps until the new chunk is there.
        """
        known = self._has_plan[slots]
        if not known.any():
            return {}
        device, horizon = self._plans.device, self._plans.shape[1]
        where, past, late, counts = (
            torch.from_numpy(np.broadcast_to(each, slots.shape).copy()).to(device)
            for each in (slots, executed, delay, known)
        )
        rows = torch.arange(horizon, device=device) + past[:, None]
        weights = plan_weights(horizon, past, late) * counts[:, None]
        # Beyond the end of a plan the weight is 0, whatever stands there.
        return {PLAN: self._plans[where[:, None], rows.clamp(max=horizon - 1)], PLAN_WEIGHTS: weights}

    def keep(self, slots: NDArray[np.int64], plans: Tensor) -> None:
        """Remember what was planned for some slots, `[B, H, A]`."""
        self._plans[torch.from_numpy(slots).to(self._plans.device)] = plans.float()
        self._has_plan[slots] = True


def plan_weights(horizon: int, executed: Tensor, delay: Tensor) -> Tensor:
    """Return how much each step of a horizon is held to what was planned for it, `[B, H]` (arXiv:2506.07339, eq. 5): 1
    where the chunk before is executed anyway, falling to 0 where it ends.

    Args:
        horizon: `H`.
        executed: steps since the chunk before was asked for, `[B]`.
        delay: steps until this one is there, `[B]`.
    """
    step = torch.arange(horizon, device=executed.device)
    left = (horizon - executed)[:, None]
    falling = ((left - step) / (left - delay[:, None] + 1)).clamp(0.0, 1.0)
    soft = falling * falling.expm1() / (math.e - 1.0)
    return torch.where(step < delay[:, None], 1.0, soft) * (step < left)
