"""The times at which a network is asked on the way from noise to actions."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TimeGrid(nn.Module):
    """`K` steps. Each point has a time, by the model family's clock, and a share of noise, 1 at the start and 0 at the
    end: a sample of share s is `(1 - s) * data + s * noise`.

    Args:
        times: `[K+1]` float32.
        shares: `[K+1]` float32, falling.
    """

    times: Tensor
    shares: Tensor

    def __init__(self, times: Tensor, shares: Tensor) -> None:
        super().__init__()
        self.register_buffer("times", times, persistent=False)
        self.register_buffer("shares", shares, persistent=False)

    @classmethod
    def falling(cls, steps: int, *, summed: bool = True) -> TimeGrid:
        """Time 1 is noise, 0 is data (pi0). The time embedding is steep enough to tell 1 - 7/10 from
        1 - 0.1 - ... - 0.1.

        Args:
            steps: `K`.
            summed: times add up in float32, like those of openpi's sampler; else each is computed in float64, like
                those of LeRobot's since 0.4.3.
        """
        times = [torch.ones(())]
        for step in range(1, steps):
            times.append(times[-1] - 1.0 / steps if summed else torch.tensor(1.0 + step * (-1.0 / steps)))
        grid = torch.stack([*times, torch.zeros(())])
        return cls(grid, grid.clone())

    @classmethod
    def rising(cls, steps: int) -> TimeGrid:
        """Time 0 is noise, 1 is data (GR00T)."""
        times = torch.arange(steps + 1) / steps
        return cls(times, 1.0 - times)

    def __len__(self) -> int:
        return len(self.times) - 1

    def at(self, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Time `[B]` of steps `[B]`, and the shares of noise before and after it `[B, 1, 1]`."""
        before, after = (self.shares[number][:, None, None] for number in (step, step + 1))
        return self.times[step], before, after
