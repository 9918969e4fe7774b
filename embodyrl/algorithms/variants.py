"""Policy losses that take another ratio, or another policy to stay near, than PPO's."""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.algorithms.columns import require_same_shape
from embodyrl.algorithms.losses import (
    LossOutput,
    clipped_surrogate,
    log_ratio,
)
from embodyrl.config.schema import Excess, Proximal

SEQUENCE_LOG_RATIO_LIMIT = 10.0
"""As `losses.LOG_RATIO_LIMIT`, for GSPO, whose log-ratio is a mean over a sequence [nats]."""
DRIFT_LIMIT = 2.0
"""Largest factor of CPGD's drift term."""


def decoupled_ppo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    behaviour_cap: float | None,
    behaviour_excess: Excess,
) -> LossOutput:
    """PPO around a proximal policy, for chunks that an older behaviour policy chose: Hilton et al. (2021),
    arXiv:2110.00641, eq. 4; with a bounded weight as in Fu et al. (2025), arXiv:2505.24298, section 5.2.

    The ratio is pi / pi_prox; the clipped surrogate is weighted by w = pi_prox / pi_behaviour.

    Args:
        old_logprobs: of the behaviour policy.
        proximal_logprobs: under the policy that this update starts from.
        behaviour_cap: largest w that is trusted; None: any.
        behaviour_excess: treatment of entries with a larger w: mask (they count 0, but stay in the mean's denominator)
            or clamp (their w becomes the cap).
        The others as in `ppo`.
    """
    require_same_shape(
        logprobs=logprobs, old_logprobs=old_logprobs, proximal_logprobs=proximal_logprobs, advantages=advantages
    )
    ratio = log_ratio(logprobs, proximal_logprobs).exp()
    output = clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    # The importance weight of stale data; the trust region stays around the proximal policy, however old the data is.
    weight = log_ratio(proximal_logprobs, old_logprobs).exp().detach()
    output.metrics["behaviour_weight"] = weight
    if behaviour_cap is not None:
        output.metrics["behaviour_excess"] = (weight > behaviour_cap).float()
        if behaviour_excess is Excess.mask:
            weight = torch.where(weight > behaviour_cap, 0.0, weight)
        else:
            weight = weight.clamp(max=behaviour_cap)
    output.losses = output.losses * weight
    return output


def proximal_logprobs(
    logprobs: Tensor, old_logprobs: Tensor, versions: Tensor, current_version: int, method: Proximal
) -> Tensor:
    """Estimate the proximal policy's log-probs without another forward pass: log-linear between behaviour and current
    policy, by the share a = (v - 1 - v_b) / (v - v_b) of the versions in between (AReaL's "loglinear"). Detached.

    Args:
        logprobs, old_logprobs: at any level, `[M, ...]`.
        versions: v_b `[M]`, the version that chose each chunk.
        current_version: v, the version that this update makes.
        method: loglinear.
    """
    assert method is Proximal.loglinear, "the other method is a forward pass"
    # Age 1 is the newest data: its share is 0, so the proximal policy is the behaviour policy and this is plain PPO.
    age = (current_version - versions).clamp(min=1).to(logprobs.dtype)
    share = ((age - 1.0) / age).view(-1, *[1] * (logprobs.dim() - 1))
    return (old_logprobs + share * (logprobs - old_logprobs)).detach()


def cpgd(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    drift_coef: float,
) -> LossOutput:
    """Clipped policy gradient with policy drift, Liu et al. (2025), arXiv:2505.12504: no ratio, so no variance of one.

    -A log pi, where log pi may exceed log pi_old by at most log(1 + high) if A > 0 and fall below it by at most
    -log(1 - low) if A < 0; plus drift_coef times a term with the gradient of KL(pi_old || pi), its factor
    pi / pi_old - 1 cut off at 2.

    Args:
        drift_coef: weight of the drift.
        The others as in `ppo`.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    # The limits are PPO's own on the ratio, r > 1 + high and r < 1 - low, put in terms of log pi.
    highest = old_logprobs + torch.log1p(torch.tensor(clip_high))
    lowest = old_logprobs + torch.log1p(torch.tensor(-clip_low))
    limited = torch.where(advantages > 0, torch.minimum(logprobs, highest), torch.maximum(logprobs, lowest))
    drift = (log_ratio(logprobs.detach(), old_logprobs).exp() - 1.0).clamp(max=DRIFT_LIMIT)
    return LossOutput(
        losses=-advantages * limited + drift_coef * drift * logprobs,
        metrics={"clip_fraction": (limited != logprobs).float(), "drift": drift},
    )


def gspo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    sequence: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """Group sequence policy optimisation, Zheng et al. (2025), arXiv:2507.18071, eq. 5 and its token form (eq. 14):
    every entry has the ratio s = exp(mean of the log-ratios of its sequence), with the gradient of its own log-prob.

    Args:
        valid: bool, entries that count in their sequence's mean.
        sequence: `[M]`, number of the sequence that each chunk belongs to; sequences must be whole.
        The others as in `ppo`; useful clips are far smaller, because s is a geometric mean.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, valid=valid)
    # Mean log-ratio of each sequence: sums and counts by sequence number `[M]` (at most M sequences), then looked up
    # for every chunk.
    _, member = torch.unique(sequence, return_inverse=True)
    counted = torch.where(valid, logprobs.detach() - old_logprobs, 0.0)
    sums = torch.zeros(len(member), device=member.device).index_add(0, member, counted.reshape(len(member), -1).sum(1))
    counts = torch.zeros_like(sums).index_add(0, member, valid.reshape(len(member), -1).sum(1).to(sums.dtype))
    of_sequence = (sums / counts.clamp(min=1.0))[member].view(-1, *[1] * (logprobs.dim() - 1))
    # Eq. 14's stop-gradient: the value is the sequence's ratio, the gradient that of the entry's own log-prob.
    ratio = (logprobs - logprobs.detach() + of_sequence).clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    return clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
