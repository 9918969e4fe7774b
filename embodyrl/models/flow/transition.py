"""One denoising step as a Gaussian distribution.

All of it is written for velocities that point from data to noise, and for the share of noise s that falls from 1 to 0,
so that it does not matter which way a model family's time runs. Shapes: `B` samples, `H` actions of the horizon, `A`
entries of an action in the network; shares and levels are `[B, 1, 1]`.

flow_sde: Liu et al. (2025), "Flow-GRPO", eq. 9. flow_cps: Wang & Yu (2025), "Coefficients-Preserving Sampling for
Reinforcement Learning with Flow Matching". flow_noise: Zhang et al. (2025), "ReinFlow".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Transition:
    """Where a step leads. A standard deviation of 0 means: there for certain; then log-probability and entropy are 0,
    by convention."""

    mean: Tensor
    """`[B, H, A]`"""
    std: Tensor
    """`[B, H, A]`"""

    def sample(self, noise: Tensor) -> Tensor:
        """Where standard normal `noise [B, H, A]` leads."""
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
