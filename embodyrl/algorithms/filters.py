"""Which groups are worth learning from. Shapes: `P` groups of `G` episodes.

Filters look at what the simulator said, before any shaping. An episode that was lost (`played` is False) counts in
none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.config.schema import FilterMetric


def none(*, played: Tensor) -> Tensor:
    """Every group of which an episode is left."""
    return played.any(1)


def zero_variance(*, success: Tensor, total_reward: Tensor, played: Tensor, metric: FilterMetric) -> Tensor:
    """Groups whose episodes differ: the others' advantages would be 0 (Yu et al. 2025, arXiv:2503.14476, eq. 11).

    Args:
        success: bool `[P, G]`, the task was solved at least once. total_reward: `[P, G]`, sum of the simulator's own
        rewards. played: bool `[P, G]`. metric: which of the two has to differ.
    """
    outcomes = success.float() if metric is FilterMetric.success else total_reward
    highest = outcomes.masked_fill(~played, -torch.inf).amax(1)
    lowest = outcomes.masked_fill(~played, torch.inf).amin(1)
    return highest > lowest


def accuracy(*, success: Tensor, played: Tensor, accuracy_low: float, accuracy_high: float) -> Tensor:
    """Groups whose success rate is `accuracy_low` .. `accuracy_high`, both included (Cui et al. 2025,
    arXiv:2502.01456, section 3.3: neither too hard nor too easy)."""
    rate = (success & played).sum(1) / played.sum(1).clamp(min=1)
    return played.any(1) & (rate >= accuracy_low) & (rate <= accuracy_high)
