"""Small networks beside a flow-matching policy, which learn with it; float32 whatever the rest is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class NoiseNetwork(nn.Module):
    """How much noise to add to a step, from what the policy's network thinks of each action.

    Args:
        width: `E`, of what it reads.
        action_dim: `A`.
        low, high: least and largest standard deviation.
    """

    def __init__(self, width: int, action_dim: int, low: float, high: float) -> None:
        super().__init__()
        self._low, self._high = math.log(low**2), math.log(high**2)
        self.mlp = nn.Sequential(
            nn.Linear(width, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, action_dim)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Standard deviations `[B, H, A]` for hidden states `[B, H, E]`."""
        with torch.autocast(hidden.device.type, enabled=False):
            place = (self.mlp(hidden.float()).tanh() + 1.0) / 2.0
        return (0.5 * (self._low + (self._high - self._low) * place)).exp()


class ValueHead(nn.Module):
    """The critic: hidden layers with ReLU, and one number.

    Args:
        width: `E`, of what it reads.
        sizes: widths of the hidden layers.
    """

    def __init__(self, width: int, sizes: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in sizes:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        last = nn.Linear(width, 1)
        nn.init.normal_(last.weight, std=0.02)
        nn.init.zeros_(last.bias)
        self.mlp = nn.Sequential(*layers, last)

    def forward(self, features: Tensor) -> Tensor:
        """Values `[B]` of features `[B, E]`."""
        with torch.autocast(features.device.type, enabled=False):
            values: Tensor = self.mlp(features.float()).squeeze(-1)
        return values
