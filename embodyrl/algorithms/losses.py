"""Policy losses, entry by entry, and the value loss.

A policy loss takes log-probs at the level `algorithm.logprob_level` (see `columns`); every tensor has that shape, and
so have its result and metrics. `token_weights` decides which entries count and how much: a loss needs no mask, unless
it compares whole sequences.

Shapes: `M` chunks of a minibatch; `K` chunks, `B` slots of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from embodyrl.algorithms.columns import OutputError, function_name, require_output, require_same_shape
from embodyrl.config.schema import KLEstimator

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this, so that their exponentials stay finite [nats]."""
KL_LIMIT = 10.0
"""Largest k3 estimate of one entry [nats]."""


@dataclass(kw_only=True)
class LossOutput:
    """Losses of a minibatch's entries, with metrics."""

    losses: Tensor
    """One for every entry."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """One number for every entry, detached; the mean over the entries that count is logged."""


OWN_METRICS = frozenset(
    {
        *("policy_loss", "value_loss", "entropy", "reference_kl", "approx_kl", "ratio", "ratio_max"),
        *("ratio_error", "ratio_error_first_minibatch", "explained_variance"),
        *("grad_norm", "learning_rate", "skipped_steps", "epochs"),
    }
)
"""Metrics of an update that the engine logs itself."""


def require_entries(output: LossOutput, loss: Callable[..., LossOutput], logprobs: Tensor) -> None:
    """Require that a loss has returned one number for every entry, and so have its metrics, of names of their own.

    Raises:
        OutputError: it has not; names the loss, and the shape found and the one expected, or the metric.
    """
    returned = f"loss {function_name(loss)} returned"
    if not isinstance(output, LossOutput):
        raise OutputError(
            f"{returned} a {type(output).__name__}, expected LossOutput(losses=..., metrics=...) of "
            f"embodyrl.algorithms.losses"
        )
    parts = {"losses": output.losses} | {f"metrics[{key!r}]": each for key, each in output.metrics.items()}
    for part, found in parts.items():
        require_output(
            f"{returned} {part}",
            found,
            logprobs,
            "the shape of logprobs: return one number for every entry, without `.mean()` or `.sum()`; the engine takes "
            "the mean over the entries that count (algorithm.aggregation)",
        )
    if not OWN_METRICS.isdisjoint(output.metrics):
        raise OutputError(
            f"{returned} metrics {', '.join(sorted(OWN_METRICS & output.metrics.keys()))}, which the "
            f"engine logs itself: choose other names than {', '.join(sorted(OWN_METRICS))}"
        )


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return log(pi / pi_old) of every entry, clamped to where its exponential is finite."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossOutput:
    """Clipped surrogate loss of given ratios; see `ppo`."""
    # The maximum of the two losses is the minimum of the two objectives: clipping takes the gradient away only where
    # the ratio has already moved in the direction that the advantage asks for, never where it must come back.
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    unclipped, clipped_losses = -advantages * ratio, -advantages * clipped
    # The larger one. `torch.maximum` shares the gradient where both are equal, which takes three times as long, and
    # then each half reaches the ratio all the same.
    losses = torch.where(unclipped >= clipped_losses, unclipped, clipped_losses)
    metrics = {"clip_fraction": (ratio != clipped).float()}
    if dual_clip is not None:
        # For A < 0 the loss above grows with the ratio without bound, so that one unlikely action could dominate.
        ceiling = -advantages * dual_clip
        beyond = (advantages < 0) & (losses > ceiling)
        losses = torch.where(beyond, ceiling, losses)
        metrics["dual_clip_fraction"] = beyond.float()
    return LossOutput(losses=losses, metrics=metrics)


def ppo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> LossOutput:
    """Clipped surrogate, Schulman et al. (2017), arXiv:1707.06347, eq. 7, with separate clips below and above
    (Yu et al. 2025, arXiv:2503.14476, eq. 8): max(-A r, -A clip(r, 1 - low, 1 + high)), r = pi / pi_old.

    Args:
        logprobs: under the current weights [nats].
        old_logprobs: under the weights that chose the chunk [nats].
        advantages: of each entry.
        clip_low, clip_high: the ratio is clipped to 1 - clip_low .. 1 + clip_high.
        dual_clip: where A < 0 the loss is at most -A * dual_clip (Ye et al. 2020, arXiv:1912.09729, eq. 5); None: no
            bound.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = log_ratio(logprobs, old_logprobs).exp()
    return clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def kl_divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(pi || pi_ref) from actions of pi, entry by entry (Schulman 2020, "Approximating KL divergence").

    With d = log pi - log pi_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. The expected gradient of k2 is that of
    KL(pi || pi_ref), the one of k3 that of KL(pi_ref || pi), and the one of k1 is 0: k1 is only a number to report.
    """
    require_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    difference = logprobs - reference_logprobs
    if estimator is KLEstimator.k1:
        return difference
    if estimator is KLEstimator.k2:
        return 0.5 * difference.square()
    difference = log_ratio(logprobs, reference_logprobs)
    return ((-difference).exp() - 1.0 + difference).clamp(-KL_LIMIT, KL_LIMIT)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None, huber: float | None
) -> Tensor:
    """Value loss of each chunk: half the squared error.

    Args:
        values: `[M]`, under the current weights.
        old_values: `[M]`, in the rollout.
        returns: `[M]`, the targets.
        clip: the larger of this error and that of the value moved at most `clip` from `old_values` (Schulman et al.'s
            reference implementation of PPO); None: no clipping.
        huber: errors beyond this count linearly (Huber 1964); None: squared whatever their size.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns)
    losses = _regression(values, returns, huber)
    if clip is not None:
        limited = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.maximum(losses, _regression(limited, returns, huber))
    return losses


def _regression(values: Tensor, returns: Tensor, huber: float | None) -> Tensor:
    if huber is None:
        errors = values - returns
        return 0.5 * errors * errors
    return huber_loss(values, returns, reduction="none", delta=huber)
