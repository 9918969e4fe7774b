"""States and actions, normalised by the statistics of the training data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodyrl.models.pi.options import Normalization
from embodyrl.models.pi.ranges import Ranges

EPSILON = 1e-6
"""Added to widths, as in public code."""


class Normalizer(nn.Module):
    """Maps numbers of a data set to about [-1, 1], and back.

    Args:
        ranges: of one data set, for actions or for states.
        normalization: what their numbers are.
    """

    centre: Tensor
    half_width: Tensor

    def __init__(self, ranges: Ranges, normalization: Normalization) -> None:
        super().__init__()
        first, second = (torch.tensor(numbers, dtype=torch.float64) for numbers in (ranges.first, ranges.second))
        if normalization is Normalization.zscore:
            centre, half_width = first, second + EPSILON
        else:
            half_width = 0.5 * (second - first + EPSILON)
            centre = first + half_width
        self.register_buffer("centre", centre.float(), persistent=False)
        self.register_buffer("half_width", half_width.float(), persistent=False)

    def __len__(self) -> int:
        return len(self.centre)

    def forward(self, numbers: Tensor) -> Tensor:
        """Normalised numbers `[..., D]`; not cut off."""
        return (numbers - self.centre) / self.half_width

    def inverse(self, numbers: Tensor) -> Tensor:
        """From normalised numbers `[..., D]` to those of the data set."""
        return numbers * self.half_width + self.centre
