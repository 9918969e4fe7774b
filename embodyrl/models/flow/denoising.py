"""Denoising: the times at which a network is asked on the way from noise to actions, one step as a Gaussian
distribution, and the small networks that learn beside a flow-matching policy.

All of it is written for velocities that point from data to noise, and for the share of noise s that falls from 1 to 0,
so that it does not matter which way a model family's time runs. Shapes: `B` samples, `H` actions of the horizon, `A`
entries of an action in the network; shares and levels are `[B, 1, 1]`.

flow_sde: Liu et al. (2025), "Flow-GRPO", eq. 9. flow_cps: Wang & Yu (2025), "Coefficients-Preserving Sampling for
Reinforcement Learning with Flow Matching". flow_noise: Zhang et al. (2025), "ReinFlow".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------------------- times


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


# ---------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Transition:
    """Where a step leads. A standard deviation of 0 means: there for certain; then log-probability and entropy are 0,
    by convention."""

    mean: Tensor
    """`[B, H, A]`"""
    std: Tensor
    """`[B, H, A]`"""

    def sample(self, noise: Tensor) -> Tensor:
        """Return where standard normal `noise [B, H, A]` leads."""
        return self.mean + self.std * noise

    def logprob(self, reached: Tensor) -> Tensor:
        """Log-density `[B, H, A]` of having arrived at `reached [B, H, A]` [nats]."""
        certain = self.std == 0
        std = self.std.masked_fill(certain, 1.0)
        density = -0.5 * ((reached - self.mean) / std).square() - std.log() - 0.5 * math.log(2.0 * math.pi)
        return density.masked_fill(certain, 0.0)

    def entropy(self) -> Tensor:
        """Differential entropy `[B, H, A]` [nats]."""
        certain = self.std == 0
        return (self.std.masked_fill(certain, 1.0).log() + 0.5 * math.log(2.0 * math.pi * math.e)).masked_fill(
            certain, 0
        )


def prior(like: Tensor) -> Transition:
    """The standard normal distribution that denoising begins with."""
    return Transition(torch.zeros_like(like), torch.ones_like(like))


def ends(x: Tensor, velocity: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The data and the noise `[B, H, A]` between which `x` lies, if the velocity is right."""
    return x - velocity * share, x + velocity * (1.0 - share)


def euler(x: Tensor, velocity: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """The deterministic step from one share of noise to the next."""
    return x - velocity * (before - after)


def flow_sde(x: Tensor, velocity: Tensor, before: Tensor, after: Tensor, level: Tensor) -> Transition:
    """A step of the stochastic differential equation that has the same marginals as the flow."""
    data, noise = ends(x, velocity, before)
    width = before - after
    variance = level.square() * before / (1.0 - torch.where(before >= 1.0, after, before))
    mean = data * (1.0 - after) + noise * (after - variance * width / (2.0 * before))
    return Transition(mean, (variance * width).sqrt().expand_as(mean))


def flow_cps(x: Tensor, velocity: Tensor, before: Tensor, after: Tensor, level: Tensor) -> Transition:
    """Draw part of the remaining noise anew, so that data and noise keep their coefficients."""
    data, noise = ends(x, velocity, before)
    angle = level * (math.pi / 2.0)
    mean = data * (1.0 - after) + noise * after * angle.cos()
    return Transition(mean, (after * angle.sin()).expand_as(mean))


def flow_noise(x: Tensor, velocity: Tensor, before: Tensor, after: Tensor, std: Tensor) -> Transition:
    """The deterministic step, and noise of standard deviation `std [B, H, A]` on top."""
    return Transition(euler(x, velocity, before, after), std)


# ------------------------------------------------------------------------------------------------------------- networks


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
            place: Tensor = (self.mlp(hidden.float()).tanh() + 1.0) / 2.0
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
