"""Advantage estimators without a critic: rewards, returns, and returns relative to other episodes. Shapes: `T` steps in
time, `B` slots."""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.algorithms.advantages import discounted_sums
from embodyrl.config.schema import NormLevel


def grpo(
    *,
    rewards: Tensor,
    valid: Tensor,
    group_size: int,
    mean_level: NormLevel,
    std_level: NormLevel,
    leave_one_out: bool,
    unbiased: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Relative return of whole episodes; every step of an episode gets (return - mean) / (standard deviation + eps).

    | method | mean_level | std_level | leave_one_out |
    |---|---|---|---|
    | GRPO, Shao et al. (2024), arXiv:2402.03300, section 4.1 | group | group | no |
    | Dr.GRPO, Liu et al. (2025), arXiv:2503.20783, section 3.2 | group | none | no |
    | RLOO, Ahmadian et al. (2024), arXiv:2402.14740, section 3.2 | group | none | yes |
    | REINFORCE++-baseline, Hu et al. (2025), arXiv:2501.03262 | group | none, then `normalize_advantages` | no |

    Slots without a valid step (their episode was lost) count nowhere. An episode without another to compare it with
    gets advantage 0.

    Args:
        rewards: of each step; one whole episode per slot.
        valid: bool, True up to and including the step with which the episode ended.
        group_size: G, consecutive slots that played the same start state.
        mean_level, std_level: episodes over which mean and standard deviation are taken. The standard deviation is that
            of the deviations from the mean that is subtracted, and 1 with none.
        leave_one_out: leave the episode itself out of its mean.
        unbiased: divide squared deviations by n - 1, not n.
        eps: added to the standard deviation.

    Returns:
        Advantages, and the episodes' returns at each of their steps; float32. Where all episodes have the same return,
        advantages are exactly 0.
    """
    # Summed in float64 and rounded to float32: equal returns whose rewards came in another order are equal again.
    # Otherwise a group without any signal would get advantages of +-1 made of rounding errors.
    returns = (rewards.double() * valid).sum(0).float().double()
    played = valid.any(0)
    deviations = torch.where(played, returns - _means(returns, played, group_size, mean_level, leave_one_out), 0.0)
    relative = deviations
    if std_level is not NormLevel.none:
        # Not around a mean of their own: with std_level batch and mean_level group this is the spread within groups.
        squares, counts = _sums(deviations.square(), played, group_size, std_level)
        spread = (squares / (counts - float(unbiased)).clamp(min=1.0)).sqrt()
        relative = deviations / (spread + eps)
    return torch.where(valid, relative, 0.0).float(), torch.where(valid, returns, 0.0).float()


def _means(returns: Tensor, played: Tensor, group_size: int, level: NormLevel, leave_one_out: bool) -> Tensor:
    """Return the mean `[B]` that each of `returns [B]` is compared with; for a single episode its own return."""
    if level is NormLevel.none:
        return torch.zeros_like(returns)
    sums, counts = _sums(returns, played, group_size, level)
    if leave_one_out:
        # RLOO's baseline: independent of the episode itself, so the gradient stays unbiased.
        return torch.where(counts > 1, (sums - returns) / (counts - 1).clamp(min=1.0), returns)
    return sums / counts.clamp(min=1.0)


def _sums(column: Tensor, played: Tensor, group_size: int, level: NormLevel) -> tuple[Tensor, Tensor]:
    """Return sum and number `[B]` of the episodes in each one's group, or in the batch."""
    # Groups are consecutive slots, so a view `[B / G, G]` holds one in each row.
    size = group_size if level is NormLevel.group else max(len(column), 1)
    counted = torch.where(played, column, 0.0).view(-1, size)
    counts = played.to(column.dtype).view(-1, size)
    sums, numbers = (each.sum(1, keepdim=True).expand(-1, size).flatten() for each in (counted, counts))
    return sums, numbers


def reinforce_pp(*, rewards: Tensor, ended: Tensor, discounts: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """REINFORCE++, Hu et al. (2025), arXiv:2501.03262: the discounted return from each step to the end of its episode.
    Its baseline is the batch's mean, which `algorithm.normalize_advantages` subtracts.

    Args: as in `gae`.

    Returns:
        The returns, as advantages and as returns.
    """
    returns = discounted_sums(rewards, discounts * (~ended), valid)
    return returns, returns


def raw(*, rewards: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reward of each step unchanged, for a reward function that assigns credit itself."""
    advantages = torch.where(valid, rewards, 0.0)
    return advantages, advantages
