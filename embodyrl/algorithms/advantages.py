"""Advantage estimators. Shapes: `K` decisions, `B` slots; every tensor is `[K, B]` unless it says otherwise."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    ended: Tensor,
    discounts: Tensor,
    valid: Tensor,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, Schulman et al. (2016), arXiv:1506.02438, eq. 16.

    delta_k = r_k + g_k V'_k - V_k and A_k = delta_k + g_k lambda A_{k+1}, the sum stopping at the end of an episode.

    Args:
        rewards: reward of each decision (summed over its chunk).
        values: V of the observation decided on.
        next_values: V' of the observation that followed, before any reset; 0 where the episode terminated (or was
            cut off and is not to be bootstrapped).
        ended: bool, the episode ended in this decision, for whatever reason.
        discounts: g, discount from this decision to the next.
        valid: bool, False where no decision was taken (advantage and return are 0 there).
        gae_lambda: 0 .. 1.

    Returns:
        Advantages and value targets (advantages + values).
    """
    deltas = rewards + discounts * next_values - values
    decays = discounts * gae_lambda * (~ended)
    advantages = torch.zeros_like(deltas)
    following = torch.zeros_like(deltas[0])
    for k in reversed(range(deltas.shape[0])):
        following = torch.where(valid[k], deltas[k] + decays[k] * following, 0.0)
        advantages[k] = following
    return advantages, torch.where(valid, advantages + values, 0.0)


def grpo(*, rewards: Tensor, valid: Tensor, group_size: int, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Group-relative advantage, Shao et al. (2024), arXiv:2402.03300, section 4.1: every decision of an episode gets
    the episode's return, less the mean of its group, over the group's (unbiased) standard deviation.

    Args:
        rewards: reward of each decision; one whole episode per slot.
        valid: bool, True up to and including the decision in which the episode ended.
        group_size: G, consecutive slots that played the same start state.
        epsilon: added to the standard deviation, so that a group of equal returns gets advantage 0.

    Returns:
        Advantages, and the episodes' returns `[K, B]`.
    """
    returns = (rewards * valid).sum(0)
    groups = returns.view(-1, group_size)
    relative = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + epsilon)
    return relative.view(1, -1) * valid, returns.expand_as(rewards) * valid


def normalize(advantages: Tensor, valid: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Scale to mean 0 and (unbiased) standard deviation 1 over the valid entries; the others become 0."""
    chosen = advantages[valid]
    if chosen.numel() < 2:
        return torch.zeros_like(advantages)
    return torch.where(valid, (advantages - chosen.mean()) / (chosen.std() + epsilon), 0.0)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var[returns - values] / Var[returns]: 1 is a perfect critic, 0 no better than a constant; nan if returns
    do not vary."""
    variance = returns.var(unbiased=False)
    return float("nan") if variance == 0 else float(1.0 - (returns - values).var(unbiased=False) / variance)
