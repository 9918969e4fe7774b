"""Distributions of actions: Gaussians over continuous ones, clipped to their range or squashed into it, or a
categorical choice among n.

Shapes: `B` samples, `C` actions in a chunk, `D` action dims, `N` log-probs per chunk (`C*D` for Gaussians, `C` for
choices).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import from_unit_range, is_discrete, unit_range
from embodyrl.models.errors import PolicyError
from embodyrl.models.mlp.options import Distribution, HeadConfig
from embodyrl.models.sampling import Gaussian, Squashed, draw, known

INSIDE = 0.999
"""Demonstrated actions are moved this far inside of -1 .. 1, which tanh never reaches."""


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

    def actions(self, sample: Tensor, logprobs: Tensor) -> Tensor:
        """Convert samples `[B, N]`, which have these log-probabilities, to actions `[B, C, D]` in the simulator's
        units; NaN where the distribution is."""
        ...

    def errors(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Return the supervised losses for demonstrated `actions [B, C, D]`: `[B, ...]`, as many for each sample."""
        ...


def build_head(
    config: HeadConfig, simulator: SimulatorSpec, chunk_size: int
) -> GaussianHead | SquashedHead | CategoricalHead | FlowHead:
    """Build the distribution for a simulator's actions.

    Args:
        config: kind of continuous ones, and its settings.
        simulator: its spec.
        chunk_size: `C`.

    Raises:
        PolicyError: actions are discrete, and one is asked for that is of continuous ones alone.
    """
    kind = config.head
    if is_discrete(simulator):
        if kind is not Distribution.gaussian:
            raise PolicyError(
                f"model.head is {kind.value}, but this simulator's actions are discrete", "set it to gaussian"
            )
        return CategoricalHead(simulator, chunk_size)
    if config.is_flow:
        return FlowHead(simulator, chunk_size, config.denoising_steps)
    head = SquashedHead if kind is Distribution.squashed else GaussianHead
    return head(simulator, chunk_size, config.log_std_init)


class RangeHead(nn.Module):
    """A distribution over continuous actions, in units where -1 .. 1 spans the simulator's action range."""

    centre: Tensor
    half_width: Tensor
    chunk_size: int

    def set_range(self, simulator: SimulatorSpec, chunk_size: int) -> None:
        """Set the range of actions, and how many there are in a chunk."""
        self.chunk_size = chunk_size
        for name, ends in zip(("centre", "half_width"), unit_range(simulator), strict=True):
            self.register_buffer(name, torch.from_numpy(ends))

    def from_unit(self, unit: Tensor) -> Tensor:
        """Convert numbers in -1 .. 1 `[B, N]` to actions `[B, C, D]` in the simulator's units."""
        return from_unit_range(unit.view(*unit.shape[:-1], self.chunk_size, -1), self.centre, self.half_width)

    def to_unit(self, actions: Tensor) -> Tensor:
        """Convert actions `[B, C, D]` in the simulator's units to numbers in -1 .. 1 `[B, N]`."""
        return ((actions - self.centre) / self.half_width).flatten(1)


class GaussianHead(Gaussian, RangeHead):
    """Independent Gaussians. Samples outside of the action range are clipped by the conversion to actions, not by the
    distribution."""

    kind = "gaussian"

    def __init__(self, simulator: SimulatorSpec, chunk_size: int, log_std: float) -> None:
        self.outputs = chunk_size * simulator.action_dim
        super().__init__(self.outputs, log_std)
        self.set_range(simulator, chunk_size)

    def mode(self, outputs: Tensor) -> Tensor:
        """See `Head`."""
        return outputs

    def actions(self, sample: Tensor, logprobs: Tensor) -> Tensor:
        """See `Head`."""
        return self.from_unit(sample)

    def errors(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Return the squared errors `[B, N]` of the means, in units of half the action range. The standard deviations
        get no gradient: demonstrations do not determine how much to explore."""
        return (outputs - self.to_unit(actions)).square()


class SquashedHead(Squashed, RangeHead):
    """Squashed Gaussians over the simulator's action range."""

    kind = "squashed"

    def __init__(self, simulator: SimulatorSpec, chunk_size: int, log_std: float) -> None:
        super().__init__(chunk_size * simulator.action_dim, log_std)
        self.set_range(simulator, chunk_size)

    def actions(self, sample: Tensor, logprobs: Tensor) -> Tensor:
        """See `Head`."""
        return self.from_unit(sample.tanh())

    def errors(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Return the mean squared errors `[B]` of the most likely chunks, in units of half the action range."""
        wanted = self.to_unit(actions).clamp(-INSIDE, INSIDE)
        return (self.parameters_of(outputs)[0].tanh() - wanted).square().mean(-1)


class FlowHead(RangeHead):
    """Chunks that a network of velocities makes of noise; see `models.mlp.flow`, which has what a `Head` has."""

    kind = "flow"

    def __init__(self, simulator: SimulatorSpec, chunk_size: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        """Steps of denoising."""
        self.size = self.outputs = chunk_size * simulator.action_dim
        self.set_range(simulator, chunk_size)


class CategoricalHead(nn.Module):
    """One choice among n for each action of the chunk. Choice 0 is the simulator's smallest action, the next one is
    larger by 1."""

    kind = "categorical"

    def __init__(self, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__()
        self.chunk_size = chunk_size
        self.first = int(simulator.action_low[0])
        self.outputs = chunk_size * (int(simulator.action_high[0]) - self.first + 1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """See `Head`."""
        return draw(self._logits(outputs).softmax(-1), generator)

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

    def actions(self, sample: Tensor, logprobs: Tensor) -> Tensor:
        """See `Head`."""
        return known(sample.float() + self.first, logprobs).unsqueeze(-1)

    def errors(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Return the cross-entropies `[B, C]` of the choices."""
        return -self.logprobs(outputs, actions.squeeze(-1).round().long() - self.first)

    def _logits(self, outputs: Tensor) -> Tensor:
        return outputs.view(*outputs.shape[:-1], self.chunk_size, -1)
