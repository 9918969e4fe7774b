"""Advantage estimators. Shapes: `T` steps in time, `B` slots; every tensor is `[T, B]` unless noted otherwise.

A step is a chunk (`T = K`), or an action with `algorithm.reward_level: action` (`T = K*C`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embodyrl.algorithms.columns import Bound, OutputError, function_name, require_finite, require_output


def advantages_by(estimator: Bound[tuple[Tensor, Tensor]], columns: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of a registered estimator, `[T, B]` each.

    Args:
        estimator: the function.
        columns: of the steps, `rewards` and `valid` among them.

    Raises:
        OutputError: it does not return a pair with a finite number for every valid step in both.
    """
    returned = f"advantage {function_name(estimator.function)} returned"
    pair, valid = estimator(columns), columns["valid"]
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise OutputError(f"{returned} {type(pair).__name__}, expected a pair: return advantages, returns")
    parts = dict(zip(("advantages", "returns"), pair, strict=True))
    for name, part in parts.items():
        what = f"{returned} {name}"
        require_output(what, part, valid, "[T, B]: return one number for every step, as `rewards` has them")
        require_finite(what, part, valid, estimator.given(columns))
    return parts["advantages"], parts["returns"]


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

    delta_k = r_k + g_k V'_k - V_k and A_k = delta_k + g_k lambda A_{k+1}; the sum stops at the end of an episode.

    Args:
        rewards: reward of each chunk, summed over its actions.
        values: V of the observation that the chunk was chosen for.
        next_values: V' of the observation that followed, before any reset; 0 where the episode terminated (or was
            cut off and is not to be bootstrapped).
        ended: bool, the episode ended in this chunk, for whatever reason.
        discounts: g, discount from this chunk to the next.
        valid: bool, False where no chunk was chosen (advantage and return are 0 there).
        gae_lambda: 0 .. 1.

    Returns:
        Advantages and value targets (advantages + values).
    """
    # `next_values` instead of `values` shifted by one row: at a time limit the next row is another episode's, while the
    # value to bootstrap from is that of the observation before the reset. `ended` only stops the sum.
    deltas = rewards + discounts * next_values - values
    advantages = discounted_sums(deltas, discounts * gae_lambda * (~ended), valid)
    return advantages, torch.where(valid, advantages + values, 0.0)


def discounted_sums(terms: Tensor, factors: Tensor, valid: Tensor) -> Tensor:
    """Return S_k = terms_k + factors_k S_{k+1}, and 0 where no step is valid."""
    sums = torch.zeros_like(terms)
    following = torch.zeros_like(terms[0])
    for k in reversed(range(terms.shape[0])):
        following = torch.where(valid[k], terms[k] + factors[k] * following, 0.0)
        sums[k] = following
    return sums


def normalize(advantages: Tensor, valid: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Scale to mean 0 and (unbiased) standard deviation 1 over the valid entries; the others become 0.

    Returns:
        float32; exactly 0 where all valid entries are equal.
    """
    chosen = advantages[valid]
    if chosen.numel() < 2:
        return torch.zeros_like(advantages, dtype=torch.float32)
    spread = variance(chosen, unbiased=True).sqrt()
    return torch.where(valid, (advantages.double() - mean(chosen)) / (spread + epsilon), 0.0).float()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var[returns - values] / Var[returns]: 1 for a perfect critic, 0 for one no better than a constant,
    nan if returns do not vary."""
    total = variance(returns, unbiased=False)
    left = variance(returns.double() - values.double(), unbiased=False)
    return float("nan") if total == 0 else float(1.0 - left / total)


# ---- means and variances, in float64, along the first dimension
#
# In float32 the mean of equal numbers is not that number (0.7 seven times), and what is left over, divided by a
# standard deviation of the same size, makes advantages of rounding. The sum of up to 2**29 equal float32 numbers is
# exact in float64, and so is its division by their count. The count is a tensor, because a division by a Python number
# is a multiplication with its rounded inverse on a GPU.


def mean(numbers: Tensor) -> Tensor:
    """Return the mean of `[M, ...]`, float64 `[...]`: exactly their value where all are equal; nan of none."""
    total = numbers.double().sum(0)
    return total / torch.full_like(total, len(numbers))


def variance(numbers: Tensor, *, unbiased: bool) -> Tensor:
    """Return the variance of `[M, ...]`, float64 `[...]`: exactly 0 where all are equal; nan of none.

    Args:
        unbiased: divide the squared deviations by M - 1, not M.
    """
    squares = (numbers.double() - mean(numbers)).square()
    return squares.sum(0) / torch.full_like(squares[0], len(numbers) - int(unbiased))
