"""States and actions, normalised by the statistics of the training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from embodyrl.models.errors import PolicyError
from embodyrl.models.pi.files import NUMBERS
from embodyrl.models.pi.options import Normalization

EPSILON = 1e-6
"""Added to widths, as in public code."""


class Normalizer(nn.Module):
    """Maps numbers of a data set to about [-1, 1], and back.

    Args:
        statistics: of one data set, for actions or for states.
        normalization: which numbers to use.
        what: it is of, for messages.

    Raises:
        PolicyError: the statistics lack these numbers.
    """

    centre: Tensor
    half_width: Tensor

    def __init__(self, statistics: Mapping[str, Sequence[float]], normalization: Normalization, what: str) -> None:
        super().__init__()
        names = NUMBERS[normalization]
        missing = [name for name in names if name not in statistics]
        if missing:
            raise PolicyError(
                f"the statistics of {what} lack {', '.join(missing)} (have: {', '.join(statistics) or 'none'}), which "
                f"model.normalization = {normalization.value} needs"
            )
        first, second = (torch.tensor(statistics[name], dtype=torch.float64) for name in names)
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
