"""Normalisation of observations by running statistics.

Shapes: `M` observations, `S` numbers of each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

DEMONSTRATED = "demonstrated"
"""Name of the buffer that policies which were saved before it was there do not have."""
SMALLEST_DEVIATION = 0.02
"""Smallest standard deviation by which observations are divided where critics learn from a replay, or a policy from
demonstrations: a number that has been constant so far (the place of an object, until it is pushed) must not be
magnified without bounds. In the units of the observation, mostly metres."""


class RunningNormalizer(nn.Module):
    """Scales observations to mean 0 and standard deviation 1, clipped to +-`limit`; a standard deviation below
    `smallest` counts as that.

    Statistics `of_demonstrations` are not those of rollouts: who collects leaves them as they are, because a policy
    that has imitated under them would be another one under others.

    The statistics change only in `update`, never in `forward`, and are part of the state dict. They are float64,
    because a float32 count stops growing at 2^24 and sums lose digits. Merging follows Chan et al. (1979), "Updating
    formulae".
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    shift: Tensor
    scale: Tensor
    demonstrated: Tensor

    def __init__(self, size: int, smallest: float = 0.0, limit: float = 10.0) -> None:
        super().__init__()
        self.smallest, self.limit = smallest, limit
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer(DEMONSTRATED, torch.zeros((), dtype=torch.uint8))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Read statistics that were saved before it was known of what they are, too: they go on as they did."""
        state_dict.setdefault(f"{prefix}{DEMONSTRATED}", torch.zeros_like(self.demonstrated))
        super()._load_from_state_dict(state_dict, prefix, *others)

    @property
    def of_demonstrations(self) -> bool:
        """Whether the statistics are those of demonstrations."""
        return bool(self.demonstrated)

    def begin_demonstrations(self) -> None:
        """Take what comes now for demonstrations."""
        self.demonstrated.fill_(1)

    def forward(self, observations: Tensor) -> Tensor:
        """Normalise `[..., S]`."""
        return ((observations - self.shift) * self.scale).clamp(-self.limit, self.limit)

    def clipped(self, observations: Tensor) -> Tensor:
        """Return the share of the numbers of observations `[M, S]` that lie beyond the limit, where they cannot be
        distinguished; a scalar."""
        return (self.forward(observations.float()).abs() >= self.limit).float().mean()

    @torch.no_grad()
    def update(self, observations: Tensor) -> None:
        """Update the statistics with observations `[M, S]`."""
        batch = observations.to(torch.float64)
        number = float(batch.shape[0])
        delta = batch.mean(0) - self.mean
        total = self.count + number
        sum_of_squares = (
            self.variance * self.count
            + batch.var(0, unbiased=False) * number
            + delta.square() * (self.count * number / total)
        )
        self.mean += delta * (number / total)
        self.variance.copy_(sum_of_squares / total)
        self.count.copy_(total)
        self.shift.copy_(self.mean)
        # Without a look at the flag on the host, which would wait for a GPU.
        smallest = (self.demonstrated.to(torch.float64) * SMALLEST_DEVIATION).clamp(min=self.smallest)
        self.scale.copy_((torch.maximum(self.variance, smallest.square()) + 1e-8).rsqrt())
