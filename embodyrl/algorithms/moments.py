"""Means and variances, in float64, along the first dimension.

In float32 the mean of equal numbers is not that number (0.7 seven times), and what is left over, divided by a standard
deviation of the same size, makes advantages of rounding. The sum of up to 2**29 equal float32 numbers is exact in
float64, and so is its division by their count. The count is a tensor, because a division by a Python number is a
multiplication with its rounded inverse on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean(numbers: Tensor) -> Tensor:
    """Mean of `[M, ...]`, float64 `[...]`: exactly their value where all are equal; nan of none."""
    total = numbers.double().sum(0)
    return total / torch.full_like(total, len(numbers))


def variance(numbers: Tensor, *, unbiased: bool) -> Tensor:
    """Variance of `[M, ...]`, float64 `[...]`: exactly 0 where all are equal; nan of none.

    Args:
        unbiased: divide the squared deviations by M - 1, not M.
    """
    squares = (numbers.double() - mean(numbers)).square()
    return squares.sum(0) / torch.full_like(squares[0], len(numbers) - int(unbiased))
