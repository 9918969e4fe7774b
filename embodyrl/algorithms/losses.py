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
from embodyrl.config.schema import Aggregation, Excess, KLEstimator, Proximal

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this, so that their exponentials stay finite [nats]."""
SEQUENCE_LOG_RATIO_LIMIT = 10.0
"""The same for GSPO, whose log-ratio is a mean over a sequence [nats]."""
DRIFT_LIMIT = 2.0
"""Largest factor of CPGD's drift term."""
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
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
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
        return 0.5 * (values - returns).square()
    return huber_loss(values, returns, reduction="none", delta=huber)


# ---- from the losses of entries to one number
#
# A sequence is an episode of a slot, or that part of it that lies in the batch. Minibatches are drawn chunk by chunk,
# so they hold pieces of sequences; a mean over each minibatch's own pieces would not be the mean over
# sequences. Therefore every entry gets its weight from the whole batch once, and a minibatch's loss is the weighted sum
# of its entries times (units in the batch) / (units in the minibatch), units being what minibatches are drawn by. In
# the mean over the minibatches of an epoch that is exactly the aggregate over the batch.


def token_weights(valid: Tensor, sequence: Tensor, how: Aggregation, longest: int) -> Tensor:
    """Return weights `w`, shaped like `valid`, such that `(w * losses).sum()` is the aggregate of a batch.

    - token_mean: sum / entries that count.
    - seq_mean_token_sum: mean over sequences of each one's sum.
    - seq_mean_token_mean: mean over sequences of each one's mean (GRPO, Shao et al. 2024, eq. 3).
    - seq_mean_token_sum_norm: seq_mean_token_sum over a constant, the length of the longest possible sequence (Liu et
      al. 2025, arXiv:2503.20783, section 3.2: long sequences are not favoured).

    A sequence of which nothing counts is left out of the mean over sequences.

    Args:
        valid: bool `[M, ...]`, entries that count, at the level of the log-probs.
        sequence: `[M]`, number of the sequence that each chunk belongs to.
        how: see above.
        longest: entries in the longest possible sequence.
    """
    counts = valid.to(torch.float32)
    if how is Aggregation.token_mean:
        return counts / counts.sum().clamp(min=1.0)
    _, member = torch.unique(sequence, return_inverse=True)
    lengths = torch.zeros(len(member), device=valid.device).index_add(0, member, counts.reshape(len(member), -1).sum(1))
    weights = counts / (lengths > 0).sum().clamp(min=1)
    if how is Aggregation.seq_mean_token_sum:
        return weights
    if how is Aggregation.seq_mean_token_sum_norm:
        return weights / longest
    own_length = lengths[member].clamp(min=1.0)
    return weights / own_length.view(-1, *[1] * (valid.dim() - 1))


def sequence_numbers(episode: Tensor) -> Tensor:
    """Number the sequences of a batch: `[K, B]` -> `[K, B]`, one number for each pair of slot and episode.

    Args:
        episode: number of each chunk's episode within its slot.
    """
    slots = torch.arange(episode.shape[1], device=episode.device)
    # One number for each pair, because sorting pairs takes torch many times as long.
    pairs = slots * (episode.max() + 1) + episode
    numbers: Tensor = torch.unique(pairs, return_inverse=True)[1]
    return numbers
