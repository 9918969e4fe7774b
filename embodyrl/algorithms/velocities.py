"""Losses of flow policies that compare velocities in place of log-probs: flow policy optimisation, and negative-aware
fine-tuning.

Velocities point from data to noise. Shapes: `M` chunks, `T` points between each and noise, `N` numbers of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.algorithms.losses import LOG_RATIO_LIMIT

SMALLEST_SIZE = 1e-5
"""Least mean size of an error that errors are divided by, as in the code of Zheng et al. (2025)."""


def matching_errors(velocities: Tensor, wanted: Tensor, executed: Tensor) -> Tensor:
    """Return the mean squared distances `[M, T]` of velocities `[M, T, N]` from those wanted: the loss of conditional
    flow matching at each point (McAllister et al. 2025, arXiv:2507.21053, eq. 8, which has the sum). A mean, so that
    ratios do not depend on how many numbers a chunk has.

    Args:
        velocities, wanted: `[M, T, N]`.
        executed: bool `[M, N]`, the numbers that were executed.
    """
    return ((velocities - wanted).square() * executed[:, None]).sum(-1) / executed.sum(1).clamp(min=1)[:, None]


def flow_log_ratios(errors: Tensor, old_errors: Tensor, *, per_point: bool) -> Tensor:
    """Return surrogates of log(pi / pi_old): how much smaller the errors `[M, T]` are than the old policy's. `[M, T]`
    for each point (Yi et al. 2026, "Flow Policy Gradients for Robot Control", arXiv:2602.02481, eq. 10), or `[M, 1]`,
    their mean (McAllister et al. 2025, eq. 6 and 7)."""
    differences = old_errors - errors
    found = differences if per_point else differences.mean(1, keepdim=True)
    return found.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def trusted_surrogate(log_ratios: Tensor, advantages: Tensor, *, low: float, high: float, asymmetric: bool) -> Tensor:
    """Return losses `[M, T]` of the clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    Args:
        log_ratios: `[M, T]`.
        advantages: `[M]`.
        low, high: how far ratios may go below and above 1.
        asymmetric: where advantages are negative, a parabola that pulls ratios back takes the place of the clip, which
            would let go of them (SPO; Yi et al. 2026, eq. 11).
    """
    ratios, gains = log_ratios.exp(), advantages[:, None]
    clipped = torch.minimum(ratios * gains, ratios.clamp(1.0 - low, 1.0 + high) * gains)
    if not asymmetric:
        return -clipped
    pulled = ratios * gains - gains.abs() / (2.0 * low) * (ratios - 1.0).square()
    return -torch.where(gains < 0.0, pulled, clipped)


def optimality(advantages: Tensor, limit: float) -> Tensor:
    """Return the probabilities `[M]` that chunks are good, from advantages `[M]` that are cut at `limit` (Zheng et al.
    2025, arXiv:2509.16117: optimality rewards)."""
    return 0.5 + 0.5 * (advantages / limit).clamp(-1.0, 1.0)


def contrasted_errors(
    velocities: Tensor,
    old_velocities: Tensor,
    wanted: Tensor,
    shares: Tensor,
    executed: Tensor,
    *,
    strength: float,
    adaptive: bool,
) -> tuple[Tensor, Tensor]:
    """Return the errors `[M, T]` of the implicit positive and negative policy (Zheng et al. 2025, theorem 3.2):
    velocities between the old ones and those that are learned, or beyond, and mirrored in the old ones. Errors are
    those of the chunks that velocities imply, means over the executed numbers.

    Args:
        velocities, old_velocities, wanted: `[M, T, N]`.
        shares: `[M, T]`, share of noise.
        executed: bool `[M, N]`.
        strength: beta, how far from the old policy the implicit ones are.
        adaptive: divide errors by their mean size, without a gradient, so that all points weigh alike.
    """
    step = strength * (velocities - old_velocities)
    count = executed.sum(1).clamp(min=1)[:, None]

    def errors(said: Tensor) -> Tensor:
        # A chunk that a velocity implies is x - s v, so its error is s times that of the velocity.
        off = shares[..., None] * (said - wanted) * executed[:, None]
        found = off.square().sum(-1) / count
        size = off.detach().abs().sum(-1) / count
        return found / size.clamp(min=SMALLEST_SIZE) if adaptive else found

    return errors(old_velocities + step), errors(old_velocities - step)


def contrast_losses(positive: Tensor, negative: Tensor, optimal: Tensor, *, strength: float) -> Tensor:
    """Return losses `[M, T]`: chunks that are good are to be the positive policy's, others the negative one's (Zheng et
    al. 2025, eq. 5). Divided by `strength`, which then changes the size of no gradient at the start.

    Args:
        positive, negative: `[M, T]`, from `contrasted_errors`.
        optimal: `[M]`, from `optimality`.
        strength: beta.
    """
    good = optimal[:, None]
    return (good * positive + (1.0 - good) * negative) / strength


def ranking_losses(positive: Tensor, negative: Tensor, advantages: Tensor, *, scale: float) -> Tensor:
    """Return losses `[M, T]` that rank the positive policy's errors below the negative one's where advantages `[M]` are
    positive, and the other way round: -log sigmoid(-scale A (E+ - E-) / 2). The ranking of pi-StepNFT (2026,
    arXiv:2603.02083), which ranks steps of stochastic denoising by it."""
    return torch.nn.functional.softplus(0.5 * scale * advantages[:, None] * (positive - negative))
