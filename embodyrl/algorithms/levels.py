"""Explicit steps between the levels at which log-probs and rewards live: entries `N`, actions `C`, decisions."""

from __future__ import annotations

import torch
from torch import Tensor


def decision_logprobs(logprobs: Tensor) -> Tensor:
    """Joint log-probability of each decision: `[..., N]` -> `[...]`."""
    return logprobs.sum(-1)


def decision_rewards(rewards: Tensor, gamma_within: float) -> Tensor:
    """Reward of each decision: `[..., C]` -> `[...]`, the sum over the chunk with one factor of `gamma_within` per
    action."""
    if gamma_within == 1.0:
        return rewards.sum(-1)
    factors = gamma_within ** torch.arange(rewards.shape[-1], dtype=rewards.dtype, device=rewards.device)
    return (rewards * factors).sum(-1)
