"""Normalisation of images, states and actions as in LeRobot."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodyrl.models.lerobot import Scale


class Normalizer(nn.Module):
    """Normalises numbers of a data set, and back. Nothing is clipped.

    Args:
        scale: of the `D` numbers, which are the last dimension.
    """

    origin: Tensor
    divisor: Tensor
    factor: Tensor

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        for name in ("origin", "divisor", "factor"):
            numbers = torch.tensor(getattr(scale, name), dtype=torch.float32)
            self.register_buffer(name, numbers, persistent=False)
        self.shift = scale.shift

    def __len__(self) -> int:
        return len(self.origin)

    def normalize(self, numbers: Tensor) -> Tensor:
        """Normalise numbers `[..., D]` of the data set."""
        return (numbers - self.origin) / self.divisor - self.shift

    def unnormalize(self, numbers: Tensor) -> Tensor:
        """Convert the network's numbers `[..., D]` to those of the data set."""
        return (numbers + self.shift) * self.factor + self.origin
