"""Critics with batch renormalisation (Ioffe 2017, arXiv:1702.03275) before every layer, as in CrossQ (Bhatt et al.
2024, arXiv:1902.05605).

Shapes: `M` decisions, `F` features of an observation, `N` numbers of a chunk of actions, `E` critics, `W` inputs of a
layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from embodyrl.methods.crossq.config import NormedCriticsConfig
from embodyrl.methods.replay.config import CriticsConfig
from embodyrl.models.critics.network import Critics

LARGEST_SCALE, LARGEST_SHIFT = 3.0, 5.0
"""Bounds of `r` and `d` (Ioffe 2017, section 4)."""
SMALLEST_DEVIATION = 1e-3


class BatchRenorm(nn.Module):
    """Normalises by the mean and deviation of a batch, corrected towards the running ones (Ioffe 2017, algorithm 1).

    Args:
        count: `E`.
        width: `W`.
        config: momentum, and updates without a correction.
    """

    mean: Tensor
    deviation: Tensor
    updates: Tensor

    def __init__(self, count: int, width: int, config: NormedCriticsConfig) -> None:
        super().__init__()
        self.momentum, self.plain_updates = config.momentum, config.plain_updates
        self.gain, self.shift = nn.Parameter(torch.ones(count, 1, width)), nn.Parameter(torch.zeros(count, 1, width))
        self.register_buffer("mean", torch.zeros(count, 1, width))
        self.register_buffer("deviation", torch.ones(count, 1, width))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def learned(self, x: Tensor) -> Tensor:
        """Return a batch `[E, M, W]` normalised by itself, and move the running statistics towards its own."""
        mean = x.mean(1, keepdim=True)
        deviation = (x.var(1, keepdim=True, correction=0) + SMALLEST_DEVIATION**2).sqrt()
        with torch.no_grad():
            # Constants for the gradient: r and d in algorithm 1. Before `plain_updates` they are 1 and 0.
            renormed = self.updates >= self.plain_updates
            scale = (deviation / self.deviation).clamp(1.0 / LARGEST_SCALE, LARGEST_SCALE).where(renormed, 1.0)
            shift = ((mean - self.mean) / self.deviation).clamp(-LARGEST_SHIFT, LARGEST_SHIFT).where(renormed, 0.0)
            self.mean.lerp_(mean, self.momentum)
            self.deviation.lerp_(deviation, self.momentum)
            self.updates += 1
        return torch.addcmul(self.shift, (x - mean) / deviation * scale + shift, self.gain)

    def judged(self, x: Tensor) -> Tensor:
        """Return `[E, M, W]` normalised by the running statistics; no gradient flows to gain and shift."""
        return torch.addcmul(self.shift.detach(), (x - self.mean) / self.deviation, self.gain.detach())


class NormedCritics(Critics):
    """Critics whose every layer is preceded by batch renormalisation.

    `forward` learns: normalises by the batch, and moves the running statistics. `of_actions` judges by these.

    Args:
        inputs, config, generator: see `Critics`.
    """

    def __init__(self, inputs: int, config: CriticsConfig, generator: torch.Generator) -> None:
        assert isinstance(config, NormedCriticsConfig), "its settings say so"
        super().__init__(inputs, config, generator)
        widths = [inputs, *config.hidden_sizes]
        self.norms = nn.ModuleList(BatchRenorm(config.count, width, config) for width in widths)

    def _values(self, features: Tensor, actions: Tensor, which: Tensor | None, *, frozen: bool) -> Tensor:
        """See `Critics`; of all critics."""
        hidden = torch.cat([features, actions], -1).expand(len(self.weights[0]), -1, -1)
        for layer, (weight, bias, norm) in enumerate(zip(self.weights, self.biases, self.norms, strict=True)):
            assert isinstance(norm, BatchRenorm)
            if layer:
                hidden = relu(hidden)
            hidden = norm.judged(hidden) if frozen else norm.learned(hidden)
            hidden = torch.baddbmm(*((bias.detach(), hidden, weight.detach()) if frozen else (bias, hidden, weight)))
        return hidden.squeeze(-1)
