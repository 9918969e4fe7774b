"""States and actions between their own numbers and those that the network works with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodyrl.models.gr00t.options import Normalization
from embodyrl.models.gr00t.statistics import Ranges


class Normalizer(nn.Module):
    """min_max: -1 and 1 are the ends of the range. mean_std: mean 0, standard deviation 1. Numbers that never changed
    become 0. Nothing is cut off."""

    centre: Tensor
    spread: Tensor

    def __init__(self, ranges: Ranges, mode: Normalization) -> None:
        super().__init__()
        low, high, mean, std = (
            torch.tensor(column, dtype=torch.float64) for column in (ranges.min, ranges.max, ranges.mean, ranges.std)
        )
        by_range = mode is Normalization.min_max
        self.register_buffer("centre", (0.5 * (low + high) if by_range else mean).float(), persistent=False)
        self.register_buffer("spread", (0.5 * (high - low) if by_range else std).float(), persistent=False)

    def __len__(self) -> int:
        return len(self.centre)

    def shrink(self, numbers: Tensor) -> Tensor:
        """What the network takes for numbers `[..., D]` of the robot."""
        still = self.spread == 0
        return ((numbers - self.centre) / self.spread.masked_fill(still, 1.0)).masked_fill(still, 0.0)

    def expand(self, numbers: Tensor) -> Tensor:
        """The robot's numbers `[..., D]` for what the network says."""
        return self.spread * numbers + self.centre
