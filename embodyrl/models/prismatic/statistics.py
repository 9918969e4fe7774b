"""The ranges of a training data set, with which actions and states are normalised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from embodyrl.models.errors import PolicyError

Bounds = Literal["q99", "min_max"]
_ENDS = {"q99": ("q01", "q99"), "min_max": ("min", "max")}


class Range(nn.Module):
    """Maps numbers of a data set to [-1, 1] and back. Entries outside the mask stay as they are.

    Args:
        statistics: of one data set, for actions or for states.
        bounds: which numbers -1 and 1 stand for.
        epsilon: added to the width; public code of OpenVLA-OFT does so, that of OpenVLA does not.
    """

    low: Tensor
    width: Tensor
    mask: Tensor

    def __init__(self, statistics: Mapping[str, Sequence[float]], bounds: Bounds, epsilon: float) -> None:
        super().__init__()
        names = _ENDS[bounds]
        missing = [name for name in names if name not in statistics]
        if missing:
            raise PolicyError(f"the checkpoint's statistics lack {', '.join(missing)} (have: {', '.join(statistics)})")
        low, high = (torch.tensor(statistics[name], dtype=torch.float64) for name in names)
        mask = torch.tensor(statistics.get("mask", [True] * len(low)), dtype=torch.bool)
        self.register_buffer("low", low.float(), persistent=False)
        self.register_buffer("width", (high - low + epsilon).float(), persistent=False)
        self.register_buffer("mask", mask, persistent=False)

    def __len__(self) -> int:
        return len(self.low)

    def expand(self, numbers: Tensor) -> Tensor:
        """From [-1, 1] `[..., D]` to the data set's range."""
        return torch.where(self.mask, 0.5 * (numbers + 1.0) * self.width + self.low, numbers)

    def shrink(self, numbers: Tensor) -> Tensor:
        """From the data set's range `[..., D]` to [-1, 1], cutting off what lies outside."""
        shrunk = torch.where(self.mask, 2.0 * (numbers - self.low) / self.width - 1.0, numbers)
        return shrunk.clamp(-1.0, 1.0)
