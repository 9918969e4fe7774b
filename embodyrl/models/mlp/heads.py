"""Output distributions of the MLP policy: Gaussians over continuous actions, or a categorical choice among n.

Shapes: `B` samples, `C` actions in a chunk, `D` action dims, `N` log-probs per chunk (`C*D` for Gaussians, `C` for
choices)."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import from_unit_range, unit_range

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class Head(Protocol):
    """A distribution over chunks of actions, given the network's outputs `[B, outputs]`."""

    kind: str
    outputs: int

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw `[B, N]`."""
        ...

    def mode(self, outputs: Tensor) -> Tensor:
        """Return the most likely sample `[B, N]`."""
        ...

    def logprobs(self, outputs: Tensor, sample: Tensor) -> Tensor:
        """Return log-probabilities `[B, N]` of a sample [nats]."""
        ...

    def entropy(self, outputs: Tensor) -> Tensor:
        """Return entropies `[B, N]` [nats]."""
        ...

    def actions(self, sample: Tensor) -> Tensor:
        """Convert samples to actions `[B, C, D]` in the simulator's units."""
        ...

    def sft_loss(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Return the supervised loss for demonstrated `actions [B, C, D]`; a scalar."""
        ...


class GaussianHead(nn.Module):
    """Independent Gaussians, in units where -1 .. 1 spans the simulator's action range. Samples outside are clipped by
    the conversion to actions, not by the distribution. The standard deviations do not depend on the observation."""

    kind = "gaussian"
    centre: Tensor
    half_width: Tensor

    def __init__(self, simulator: SimulatorSpec, chunk_size: int, log_std: float) -> None:
        super().__init__()
        self.chunk_size = chunk_size
        self.outputs = chunk_size * simulator.action_dim
        self.log_std = nn.Parameter(torch.full((self.outputs,), log_std))
        centre, half_width = unit_range(simulator)
        self.register_buffer("centre", torch.from_numpy(centre))
        self.register_buffer("half_width", torch.from_numpy(half_width))

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """See `Head`."""
        noise = torch.randn(outputs.shape, generator=generator, device=outputs.device)
        return outputs + self.log_std.exp() * noise

    def mode(self, outputs: Tensor) -> Tensor:
        """See `Head`."""
        return outputs

    def logprobs(self, outputs: Tensor, sample: Tensor) -> Tensor:
        """See `Head`."""
        deviation = (sample - outputs) / self.log_std.exp()
        return torch.addcmul(-LOG_SQRT_2PI - self.log_std, deviation, deviation, value=-0.5)

    def entropy(self, outputs: Tensor) -> Tensor:
        """See `Head`."""
        return (self.log_std + LOG_SQRT_2PI + 0.5).expand_as(outputs)

    def actions(self, sample: Tensor) -> Tensor:
        """See `Head`."""
        chunk = sample.view(*sample.shape[:-1], self.chunk_size, -1)
        return from_unit_range(chunk, self.centre, self.half_width)

    def sft_loss(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Mean squared error of the means, in units of half the action range. The standard deviations get no gradient:
        demonstrations do not determine how much to explore."""
        return (outputs - ((actions - self.centre) / self.half_width).flatten(1)).square().mean()


class CategoricalHead(nn.Module):
    """One choice among n for each action of the chunk; the action is its index."""

    kind = "categorical"

    def __init__(self, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__()
        self.chunk_size = chunk_size
        self.outputs = chunk_size * (int(simulator.action_high[0]) + 1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """See `Head`."""
        probabilities = self._logits(outputs).softmax(-1)
        flat = torch.multinomial(probabilities.flatten(0, 1), 1, generator=generator)
        return flat.view(probabilities.shape[:2])

    def mode(self, outputs: Tensor) -> Tensor:
        """See `Head`."""
        return self._logits(outputs).argmax(-1)

    def logprobs(self, outputs: Tensor, sample: Tensor) -> Tensor:
        """See `Head`."""
        return self._logits(outputs).log_softmax(-1).gather(-1, sample.unsqueeze(-1)).squeeze(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        """See `Head`."""
        logprobs = self._logits(outputs).log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum(-1)

    def actions(self, sample: Tensor) -> Tensor:
        """See `Head`."""
        return sample.unsqueeze(-1).float()

    def sft_loss(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Cross-entropy of the choices."""
        return -self.logprobs(outputs, actions.squeeze(-1).round().long()).mean()

    def _logits(self, outputs: Tensor) -> Tensor:
        return outputs.view(*outputs.shape[:-1], self.chunk_size, -1)
