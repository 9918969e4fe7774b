"""Distributions of samples: drawing, log-probabilities and entropies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True)
class Choice:
    """Tokens `[...]` and their log-probabilities `[...]`."""

    tokens: Tensor
    logprobs: Tensor

    @classmethod
    def joined(cls, choices: Sequence[Choice]) -> Choice:
        """Return choices `[B]` that follow each other as one, `[B, N]`."""
        tokens, logprobs = zip(*((each.tokens, each.logprobs) for each in choices), strict=True)
        return cls(torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1))


class TokenDistribution:
    """Distribution over the next token, restricted to those that may be chosen.

    Args:
        logits: `[..., n]` of the tokens that may be chosen.
        temperature: divides them.
        top_k: keep this many of the most likely tokens; 0: all.
        top_p: keep the most likely tokens that together have this probability.
        chosen: `[...]` tokens that are always kept: those sampled in the rollout. Otherwise a small change of the
            weights could exclude them and make their log-probability minus infinity. At the weights of the rollout
            this has no effect.
    """

    def __init__(
        self, logits: Tensor, *, temperature: float, top_k: int, top_p: float, chosen: Tensor | None = None
    ) -> None:
        scaled = logits.float() / temperature
        kept = torch.ones_like(scaled, dtype=torch.bool)
        if top_k:
            kept &= scaled >= scaled.topk(top_k, dim=-1).values[..., -1:]
        if top_p < 1.0:
            kept &= _nucleus(scaled.masked_fill(~kept, -torch.inf), top_p)
        if chosen is not None:
            kept = kept.scatter(-1, chosen.unsqueeze(-1), True)
        self._kept = kept
        self._logprobs = scaled.masked_fill(~kept, -torch.inf).log_softmax(-1)

    def choose(self, mode: Literal["train", "eval"], generator: torch.Generator | None) -> Choice:
        """Draw tokens, or take the most likely ones in `eval`."""
        tokens = self.sample(generator) if mode == "train" else self.mode()
        return Choice(tokens, self.logprobs(tokens))

    def sample(self, generator: torch.Generator | None) -> Tensor:
        """Draw tokens `[...]`."""
        return draw(self._logprobs.exp(), generator)

    def mode(self) -> Tensor:
        """Return the most likely tokens `[...]`."""
        return self._logprobs.argmax(-1)

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities `[...]` of tokens `[...]` [nats]."""
        return self._logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return the entropies `[...]` [nats]."""
        terms = self._logprobs.exp() * self._logprobs.masked_fill(~self._kept, 0.0)
        return -terms.sum(-1)


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Return whether each token is among the most likely ones that together have probability `top_p`; the most likely
    always is."""
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before < top_p)


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
