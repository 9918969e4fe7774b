"""Denoising: the time grid from noise to actions, one step as a Gaussian distribution, and the small networks that are
trained beside a flow-matching policy (critic and noise network).

Velocities point from data to noise, and the share of noise s falls from 1 to 0, so that the direction of a model
family's own time does not matter. Shapes: `B` samples, `H` actions of the horizon, `A`
numbers of an action in the network; shares and levels are `[B, 1, 1]`.

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
    """Grid of `K` steps. Each point has a time in the model family's convention, and a share of noise s from 1 to 0:
    its sample is `(1 - s) * data + s * noise`.

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
        """Build a grid in which time 1 is noise and 0 is data (pi0).

        The time embedding is steep enough that rounding matters: 1 - 7/10 and 1 - 0.1 - ... - 0.1 give other actions.

        Args:
            steps: `K`.
            summed: add up times in float32, as openpi's sampler does; else compute each in float64, as LeRobot does
                since 0.4.3.
        """
        times = [torch.ones(())]
        for step in range(1, steps):
            times.append(times[-1] - 1.0 / steps if summed else torch.tensor(1.0 + step * (-1.0 / steps)))
        grid = torch.stack([*times, torch.zeros(())])
        return cls(grid, grid.clone())

    @classmethod
    def rising(cls, steps: int) -> TimeGrid:
        """Build a grid in which time 0 is noise and 1 is data (GR00T)."""
        times = torch.arange(steps + 1) / steps
        return cls(times, 1.0 - times)

    def __len__(self) -> int:
        return len(self.times) - 1

    def at(self, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the time `[B]` of steps `[B]`, and the shares of noise before and after each `[B, 1, 1]`."""
        before, after = (self.shares[number][:, None, None] for number in (step, step + 1))
        return self.times[step], before, after


# ---------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Transition:
    """Gaussian distribution of a step's result. Where the standard deviation is 0, the step is deterministic, and
    log-probability and entropy are 0 by convention."""

    mean: Tensor
    """`[B, H, A]`"""
    std: Tensor
    """`[B, H, A]`"""

    def sample(self, noise: Tensor) -> Tensor:
        """Return the result for standard normal `noise [B, H, A]`."""
        return self.mean + self.std * noise

    def logprob(self, reached: Tensor) -> Tensor:
        """Return the log-density `[B, H, A]` of the result `reached [B, H, A]` [nats]."""
        # The last step of a grid adds no noise. Masked before the division and not only after it: where(0, inf) has the
        # gradient NaN.
        certain = self.std == 0
        std = self.std.masked_fill(certain, 1.0)
        density = -0.5 * ((reached - self.mean) / std).square() - std.log() - 0.5 * math.log(2.0 * math.pi)
        return density.masked_fill(certain, 0.0)

    def entropy(self) -> Tensor:
        """Return the differential entropy `[B, H, A]` [nats]."""
        certain = self.std == 0
        return (self.std.masked_fill(certain, 1.0).log() + 0.5 * math.log(2.0 * math.pi * math.e)).masked_fill(
            certain, 0
        )


def prior(like: Tensor) -> Transition:
    """Return the standard normal distribution of the initial noise."""
    return Transition(torch.zeros_like(like), torch.ones_like(like))


def ends(x: Tensor, velocity: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return the data and the noise `[B, H, A]` that `x` and its velocity imply: x - s v and x + (1 - s) v."""
    return x - velocity * share, x + velocity * (1.0 - share)


def euler(x: Tensor, velocity: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the result of a deterministic step from one share of noise to the next."""
    return x - velocity * (before - after)


def flow_sde(x: Tensor, velocity: Tensor, before: Tensor, after: Tensor, level: Tensor) -> Transition:
    """Step of the stochastic differential equation with the marginals of the flow (Flow-GRPO, eq. 9)."""
    # Data and noise as the network sees them now; the step mixes them in the shares of the next point.
    data, noise = ends(x, velocity, before)
    width = before - after
    # At s = 1 the formula divides by 0; the share after the step stands in, as in Flow-GRPO's code.
    variance = level.square() * before / (1.0 - torch.where(before >= 1.0, after, before))
    mean = data * (1.0 - after) + noise * (after - variance * width / (2.0 * before))
    return Transition(mean, (variance * width).sqrt().expand_as(mean))


def flow_cps(x: Tensor, velocity: Tensor, before: Tensor, after: Tensor, level: Tensor) -> Transition:
    """Step that draws part of the remaining noise anew; data and noise keep their coefficients (Wang & Yu, 2025)."""
    data, noise = ends(x, velocity, before)
    angle = level * (math.pi / 2.0)
    # cos^2 + sin^2 = 1: old and new noise together have the coefficient s of a deterministic step, for any level.
    mean = data * (1.0 - after) + noise * after * angle.cos()
    return Transition(mean, (after * angle.sin()).expand_as(mean))


def deterministic(x: Tensor, velocity: Tensor, before: Tensor, after: Tensor) -> Transition:
    """Deterministic step."""
    mean = euler(x, velocity, before, after)
    return Transition(mean, torch.zeros_like(mean))


def flow_noise(x: Tensor, velocity: Tensor, before: Tensor, after: Tensor, std: Tensor) -> Transition:
    """Deterministic step plus noise of standard deviation `std [B, H, A]` (ReinFlow)."""
    return Transition(euler(x, velocity, before, after), std)


# ---------------------------------------------------------------------------------------------------------------- plans


def guidance_weight(share: Tensor, limit: float) -> Tensor:
    """Return how strongly a step with this share of noise is guided towards a plan (Black et al. 2025,
    arXiv:2506.07339, eq. 2 and 4), at most `limit`; the paper's time is one minus the share."""
    data = 1.0 - share
    return ((data.square() + share.square()) / (data * share)).clamp(max=limit)


# ------------------------------------------------------------------------------------------------------------- networks


class NoiseNetwork(nn.Module):
    """Predicts the standard deviation of the noise of a step from the hidden states of the action network.

    Args:
        width: `E`, width of the hidden states.
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
        # A log-density divides by this number, and bfloat16 would round it to 3 digits.
        with torch.autocast(hidden.device.type, enabled=False):
            place: Tensor = (self.mlp(hidden.float()).tanh() + 1.0) / 2.0
        return (0.5 * (self._low + (self._high - self._low) * place)).exp()


class ValueHead(nn.Module):
    """The critic: an MLP with ReLU and one output, computed in float32.

    Args:
        width: `E`, width of its input.
        sizes: widths of the hidden layers.
    """

    def __init__(self, width: int, sizes: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in sizes:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        last = nn.Linear(width, 1)
        # Values begin near 0, so that the first advantages are those of the returns.
        nn.init.normal_(last.weight, std=0.02)
        nn.init.zeros_(last.bias)
        self.mlp = nn.Sequential(*layers, last)

    def forward(self, features: Tensor) -> Tensor:
        """Values `[B]` of features `[B, E]`."""
        # Returns differ by less than bfloat16 resolves.
        with torch.autocast(features.device.type, enabled=False):
            values: Tensor = self.mlp(features.float()).squeeze(-1)
        return values
