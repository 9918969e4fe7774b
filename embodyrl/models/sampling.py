"""Distributions of samples: drawing, log-probabilities and entropies."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return an index `[...]` for each distribution `[..., n]`.

    Draws what `torch.multinomial` draws, without its checks, for which the host waits for a GPU: the first of `n`
    exponential clocks to ring, at rates `probabilities`. Numbers that are not finite give any index: see `known`.

    Args:
        probabilities: float32; rows need not sum to 1.
        generator: on their device; None: torch's own.
    """
    clocks = torch.empty_like(probabilities, memory_format=torch.contiguous_format).exponential_(generator=generator)
    return (probabilities / clocks).argmax(-1)


def known(numbers: Tensor, logprobs: Tensor) -> Tensor:
    """Return numbers `[...]` that choices stand for, NaN where the log-probability `[...]` of a choice is.

    A choice among NaN looks like any other. So marked, it is found where actions reach the host anyway, and no GPU is
    waited for.
    """
    return numbers.masked_fill(logprobs.isnan(), torch.nan)


class Gaussian(nn.Module):
    """Independent Gaussians whose standard deviations are learned and do not depend on the observation.

    Args:
        size: of the last dimension of means.
        log_std: start value of the logarithms of the standard deviations.
    """

    def __init__(self, size: int, log_std: float) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.full((size,), log_std))

    def sample(self, means: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a sample of the shape of `means [..., size]`."""
        noise = torch.randn(means.shape, generator=generator, device=means.device)
        return means + self.log_std.exp() * noise

    def logprobs(self, means: Tensor, sample: Tensor) -> Tensor:
        """Return log-probabilities of a sample, of its shape [nats]."""
        deviation = (sample - means) / self.log_std.exp()
        return torch.addcmul(-LOG_SQRT_2PI - self.log_std, deviation, deviation, value=-0.5)

    def entropy(self, means: Tensor) -> Tensor:
        """Return entropies of the shape of `means` [nats]."""
        return (self.log_std + LOG_SQRT_2PI + 0.5).expand_as(means)


LOG_STDS = (-20.0, 2.0)
"""Limits of the log standard deviations of squashed Gaussians, as in Haarnoja et al. (2018), arXiv:1812.05905."""


class Squashed(nn.Module):
    """Independent Gaussians whose means and standard deviations both depend on the observation, squashed into -1 .. 1
    by tanh. A sample is what tanh is taken of, so that no log-probability is ever that of a number that was rounded to
    the end of the range.

    Args:
        size: `N`, numbers of a sample.
        log_std: log standard deviation where the network's output is 0.
    """

    def __init__(self, size: int, log_std: float) -> None:
        super().__init__()
        self.size, self.log_std = size, log_std
        self.outputs = 2 * size
        """Numbers that the network returns."""

    def parameters_of(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and log standard deviations, `[B, N]` each."""
        means, log_stds = outputs.chunk(2, -1)
        return means, (log_stds + self.log_std).clamp(*LOG_STDS)

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw `[B, N]`."""
        means, log_stds = self.parameters_of(outputs)
        return means + log_stds.exp() * torch.randn(means.shape, generator=generator, device=means.device)

    def mode(self, outputs: Tensor) -> Tensor:
        """Return what the most likely Gaussian sample is `[B, N]`."""
        return self.parameters_of(outputs)[0]

    def logprobs(self, outputs: Tensor, sample: Tensor) -> Tensor:
        """Return log-probabilities `[B, N]` of the squashed sample, in -1 .. 1 [nats]."""
        return squashed_logprobs(sample, *self.parameters_of(outputs))

    def entropy(self, outputs: Tensor) -> Tensor:
        """Return entropies `[B, N]` of the Gaussians before squashing, which are larger: those after have no closed
        form [nats]."""
        return self.parameters_of(outputs)[1] + LOG_SQRT_2PI + 0.5

    def draw(self, outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return squashed samples `[B, N]` and their log-probabilities `[B]` [nats], both differentiable functions of
        standard normal noise `[B, N]`."""
        means, log_stds = self.parameters_of(outputs)
        sample = means + log_stds.exp() * noise
        return sample.tanh(), squashed_logprobs(sample, means, log_stds).sum(-1)


def squashed_logprobs(sample: Tensor, means: Tensor, log_stds: Tensor) -> Tensor:
    """Return log-probabilities of tanh(sample), where the sample is from independent Gaussians [nats].

    log(1 - tanh(z)^2) = 2 (log 2 - z - softplus(-2 z)) is exact for every z; computed as it stands, it is log 0 as soon
    as tanh rounds to 1.

    Args:
        sample: `[..., N]`, before tanh.
        means, log_stds: of the Gaussians, `[..., N]`.
    """
    deviations = (sample - means) * (-log_stds).exp()
    gaussian = torch.addcmul(-LOG_SQRT_2PI - log_stds, deviations, deviations, value=-0.5)
    return gaussian - 2.0 * (math.log(2.0) - sample - softplus(-2.0 * sample))
