"""Policy and value losses over `M` decisions; every tensor is `[M]`, every result a scalar."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(kw_only=True)
class LossOutput:
    """A loss and what to log about it."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Detached scalars."""


def ppo(
    *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, valid: Tensor, clip_low: float, clip_high: float
) -> LossOutput:
    """Clipped surrogate, Schulman et al. (2017), arXiv:1707.06347, eq. 7, with separate clips below and above
    (Yu et al. 2025, arXiv:2503.14476, eq. 8), averaged over valid decisions.

    Args:
        logprobs: log-probability of each whole decision under the current weights [nats].
        old_logprobs: the same when it was taken.
        advantages: advantage of each decision.
        valid: bool; other decisions do not count.
        clip_low, clip_high: the ratio is clipped to 1 - clip_low .. 1 + clip_high.
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)
    with torch.no_grad():
        approx_kl = masked_mean(ratio - 1.0 - log_ratio, valid)
        clip_fraction = masked_mean((ratio != clipped).float(), valid)
    return LossOutput(
        loss=masked_mean(surrogate, valid), metrics={"approx_kl": approx_kl, "clip_fraction": clip_fraction}
    )


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, valid: Tensor, clip: float | None = None) -> Tensor:
    """Half the mean squared error; with `clip`, the larger of it and the error of the value moved at most `clip` from
    `old_values` (Schulman et al.'s reference implementation of PPO)."""
    error = (values - returns).square()
    if clip is not None:
        limited = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (limited - returns).square())
    return 0.5 * masked_mean(error, valid)


def masked_mean(entries: Tensor, valid: Tensor) -> Tensor:
    """Mean over valid entries; 0 if there are none."""
    weights = valid.to(entries.dtype)
    return (entries * weights).sum() / weights.sum().clamp(min=1.0)
