"""The critic on a language model's hidden state."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """Two hidden layers with GELU; float32 whatever the rest of the model is. Values start at nearly zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        last = nn.Linear(128, 1, bias=False)
        nn.init.normal_(last.weight, std=0.02)
        self.mlp = nn.Sequential(nn.Linear(width, 512), nn.GELU(), nn.Linear(512, 128), nn.GELU(), last)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values `[B]` of hidden states `[B, E]`."""
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.mlp(hidden.float()).squeeze(-1)
        return values
