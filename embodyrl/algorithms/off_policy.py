"""Soft actor-critic in formulas, Haarnoja et al. (2018), arXiv:1812.05905, for chunks of actions.

A decision is a chunk of `C` actions, `k` of which were executed (fewer than `C` only where the episode ended inside the
chunk). The critics value whole chunks, so that the return of `k` steps needs no correction for what another policy
would have done in between (Li et al. 2025, "Q-chunking", arXiv:2507.07969). Only two numbers of a decision differ from
SAC for single actions: its return, and the factor of what follows.

Shapes: `M` decisions, `C` actions in a chunk, `E` critics.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embodyrl.algorithms.columns import chunk_rewards, require_same_shape
from embodyrl.config.schema import Bootstrap, CriticUse, DiscountPer


def decision_returns(rewards: Tensor, *, gamma: float, discount_per: DiscountPer) -> Tensor:
    """Return the return `[M]` of each decision: its rewards, discounted within the chunk if gamma is per action.

    Args:
        rewards: `[M, C]`, 0 for actions that were not executed.
        gamma: discount factor, 0 .. 1.
        discount_per: unit of a factor of gamma.
    """
    return chunk_rewards(rewards, gamma if discount_per is DiscountPer.action else 1.0)


def following_factors(
    steps: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    discount_per: DiscountPer,
    bootstrap: Bootstrap,
) -> Tensor:
    """Return the factor `[M]` of the value that follows each decision: gamma for the chunk or for each of its `k`
    executed actions, and 0 after the end of the task.

    A time limit is no end of the task (Pardo et al. 2018, arXiv:1712.00378), unless `bootstrap` is none.

    Args:
        steps: int `[M]`, `k`.
        terminated, truncated: bool `[M]`.
        gamma, discount_per: see `decision_returns`.
        bootstrap: whether the value of the observation before a time limit counts.
    """
    factors = gamma ** (steps.float() if discount_per is DiscountPer.action else torch.ones_like(steps).float())
    over = terminated if bootstrap is Bootstrap.truncation else terminated | truncated
    return factors.masked_fill(over, 0.0)


def soft_targets(
    returns: Tensor, factors: Tensor, values: Tensor, logprobs: Tensor, *, temperature: Tensor, entropy: bool
) -> Tensor:
    """Return the targets `[M]` of all critics: R + Gam (min_j Q'_j(s', a') - alpha log pi(a'|s')), eq. 5 and 6.

    Args:
        returns: `[M]`, R.
        factors: `[M]`, Gam.
        values: `[E, M]`, of the target critics that count, for actions a' of the present policy.
        logprobs: `[M]`, log pi(a'|s') [nats].
        temperature: scalar, alpha.
        entropy: whether the entropy of what follows counts; without it the values are those of the rewards alone, as
            Ball et al. (2023), arXiv:2302.02948, have it for sparse rewards.
    """
    following = values.amin(0)
    require_same_shape(returns=returns, factors=factors, values=following, logprobs=logprobs)
    if entropy:
        following = following - temperature * logprobs
    return returns + factors * following


def implicit_targets(returns: Tensor, factors: Tensor, values: Tensor) -> Tensor:
    """Return the targets `[M]` of all critics: R + Gam V(s'), which no action outside of the data is asked for
    (Kostrikov et al. 2021, arXiv:2110.06169, eq. 6).

    Args:
        returns: `[M]`, R.
        factors: `[M]`, Gam.
        values: `[M]`, V(s').
    """
    require_same_shape(returns=returns, factors=factors, values=values)
    return returns + factors * values


def agreed_values(values: Tensor, use: CriticUse) -> Tensor:
    """Return the value `[M]` of each action by several critics `[E, M]`: the smallest, or their mean."""
    return values.amin(0) if use is CriticUse.min else values.mean(0)


def critic_losses(values: Tensor, targets: Tensor) -> Tensor:
    """Return the loss `[M]` of each decision: the sum of (Q_j - y)^2 over critics.

    Args:
        values: `[E, M]`. targets: `[M]`.
    """
    require_same_shape(values=values[0], targets=targets)
    return (values - targets).square().sum(0)


def actor_losses(values: Tensor, logprobs: Tensor, *, temperature: Tensor, use: CriticUse) -> Tensor:
    """Return the loss `[M]` of the policy in each observation: alpha log pi(a|s) - Q(s, a), eq. 9.

    Args:
        values: `[E, M]`, of all critics, for actions of the policy.
        logprobs: `[M]` [nats].
        temperature: scalar, alpha.
        use: Q is the smallest of the critics' values, or their mean.
    """
    agreed = agreed_values(values, use)
    require_same_shape(values=agreed, logprobs=logprobs)
    return temperature * logprobs - agreed


def one_step_losses(
    values: Tensor, distances: Tensor, *, distillation: float, use: CriticUse, size: Tensor | None
) -> Tensor:
    """Return the loss `[M]` of a policy of one step: alpha |mu(s, z) - flow(s, z)|^2 - Q(s, mu(s, z)) (Park et al.
    2025, "Flow Q-Learning", arXiv:2502.02538, section 4).

    Args:
        values: `[E, M]`, of all critics, for chunks of the policy.
        distances: `[M]`, from the chunks of the flow policy for the same noise.
        distillation: alpha.
        use: Q is the smallest of the critics' values, or their mean.
        size: scalar by which Q is divided, so that one alpha suits all rewards; None: by nothing.
    """
    agreed = agreed_values(values, use)
    require_same_shape(values=agreed, distances=distances)
    return distillation * distances - (agreed if size is None else agreed / size.clamp(min=1e-6))


def imitation_losses(errors: Tensor, labelled: Tensor, count: Tensor, size: int) -> Tensor:
    """Return the imitation loss `[M]` of each decision, such that the mean over a minibatch is the mean error of its
    demonstrated decisions; 0 where nobody has demonstrated one.

    Args:
        errors: `[M]`, of the policy's action.
        labelled: bool `[M]`, whether there is a demonstrated action to imitate.
        count: scalar, how many there are in the whole minibatch.
        size: decisions of the whole minibatch.
    """
    require_same_shape(errors=errors, labelled=labelled)
    return errors.where(labelled, errors.new_zeros(())) * (size / count.clamp(min=1))


def expectile_losses(differences: Tensor, *, expectile: float) -> Tensor:
    """Return the loss `[M]` of the values of states: |tau - 1(d < 0)| d^2, whose minimum is an expectile of what the
    actions taken there are worth (Kostrikov et al. 2021, "IQL", arXiv:2110.06169, eq. 5).

    Args:
        differences: `[M]`, d = Q(s, a) - V(s).
        expectile: tau, 0 .. 1.
    """
    return torch.where(differences < 0.0, 1.0 - expectile, expectile) * differences.square()


def advantage_weights(advantages: Tensor, *, scale: float, largest: float) -> Tensor:
    """Return the weight `[M]` of imitating each action: exp(beta (Q(s, a) - V(s))), bounded (Kostrikov et al. 2021,
    arXiv:2110.06169, eq. 7; Peng et al. 2019, "AWR", arXiv:1910.00177).

    Args:
        advantages: `[M]`, Q(s, a) - V(s).
        scale: beta.
        largest: bound of the weights.
    """
    return (scale * advantages).clamp(max=math.log(largest)).exp()


def temperature_losses(log_temperature: Tensor, logprobs: Tensor, *, target_entropy: float) -> Tensor:
    """Return the loss `[M]` of the temperature: -alpha (log pi + H), eq. 18; it grows while the policy's entropy is
    below the target.

    Args:
        log_temperature: scalar, log alpha.
        logprobs: `[M]` [nats].
        target_entropy: H [nats].
    """
    return -log_temperature.exp() * (logprobs.detach() + target_entropy)
