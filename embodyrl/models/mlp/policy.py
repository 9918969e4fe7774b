"""The MLP policy: policy and value network on state observations, their normalisation, and the distributions of
actions: Gaussians over continuous ones, or a categorical choice among n.

Shapes: `B` samples, `C` actions in a chunk, `D` action dims, `N` log-probs per chunk (`C*D` for Gaussians, `C` for
choices), `S` proprio dims.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import from_unit_range, is_discrete, unit_range
from embodyrl.models.errors import PolicyError
from embodyrl.models.mlp.options import Activation, MLPConfig
from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Policy, PolicySpec
from embodyrl.models.sampling import Gaussian, draw, known

ACTIVATIONS = {Activation.tanh: nn.Tanh, Activation.relu: nn.ReLU, Activation.elu: nn.ELU}


class Network(nn.Sequential):
    """A sequence of layers that calls `forward` directly and so skips the overhead of `Module.__call__`, a third of the
    time for small batches. Hooks of single layers do not run."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the last layer's output `[B, outputs]` for `features [B, S]`."""
        for layer in self:
            features = layer.forward(features)
        return features


def build_network(sizes: Sequence[int], activation: type[nn.Module], output_gain: float) -> Network:
    """Build linear layers of `sizes` with `activation` between them: orthogonal weights (gain sqrt(2), `output_gain`
    for the last layer) and zero biases, as in Engstrom et al. (2020), "Implementation matters in deep policy
    gradients"."""
    layers: list[nn.Module] = []
    for index, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        last = index == len(sizes) - 2
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, output_gain if last else math.sqrt(2.0))
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, activation()]
    return Network(*layers)


class ActorCritic(Policy):
    """Base class of policies that map what they see to the outputs of a distribution and to a value. A subclass sets
    `head` and implements `_look`."""

    acts_on_device = True
    head: GaussianHead | CategoricalHead

    @abstractmethod
    def _look(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the outputs of the policy `[B, outputs]` and the values `[B]`, both float32."""

    def act(
        self, inputs: Inputs, mode: Literal["train", "eval"], generator: torch.Generator | None = None
    ) -> ActOutput:
        """See `Policy.act`; the trace holds the sample `[B, N]`."""
        outputs, values = self._look(inputs)
        sample = self.head.sample(outputs, generator) if mode == "train" else self.head.mode(outputs)
        logprobs = self.head.logprobs(outputs, sample)
        actions = self.head.actions(sample, logprobs)
        return ActOutput(actions=actions, logprobs=logprobs, values=values, trace={"sample": sample})

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """See `Policy.evaluate`."""
        outputs, values = self._look(inputs)
        logprobs = self.head.logprobs(outputs, trace["sample"])
        return EvalOutput(logprobs=logprobs, entropy=self.head.entropy(outputs), values=values)


class MLPPolicy(ActorCritic):
    """An MLP with Gaussian outputs for continuous actions or categorical outputs for discrete ones, and a separate
    value network of the same shape."""

    def __init__(self, config: MLPConfig, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        if simulator.proprio_dim == 0:
            raise PolicyError("model 'mlp' needs a state observation, but this simulator has none (proprio_dim 0)")
        self.head = build_head(simulator, chunk_size, config.log_std_init)
        self.spec = PolicySpec(
            kind=self.head.kind,
            chunk_size=chunk_size,
            action_dim=simulator.action_dim,
            proprio_dim=simulator.proprio_dim,
        )
        sizes, activation = [simulator.proprio_dim, *config.hidden_sizes], ACTIVATIONS[config.activation]
        self.normalizer = RunningNormalizer(simulator.proprio_dim) if config.normalize_observations else None
        self.actor = build_network([*sizes, self.head.outputs], activation, 0.01)
        self.critic = build_network([*sizes, 1], activation, 1.0)

    def sft_loss(self, inputs: Inputs, actions: Tensor, draws: Inputs) -> Tensor:
        """See `Policy.sft_loss`."""
        return self.head.sft_loss(self.actor(self._normalize(inputs)).float(), actions)

    def update_statistics(self, inputs: Inputs) -> None:
        """Update the running observation normalisation."""
        if self.normalizer is not None:
            self.normalizer.update(inputs["proprio"])

    def _look(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        features = self._normalize(inputs)
        return self.actor(features).float(), self.critic(features).squeeze(-1).float()

    def _normalize(self, inputs: Inputs) -> Tensor:
        proprio = inputs["proprio"]
        return proprio if self.normalizer is None else self.normalizer(proprio)


# ---- normalisation of observations


class RunningNormalizer(nn.Module):
    """Scales observations to mean 0 and standard deviation 1, clipped to +-`limit`.

    The statistics change only in `update`, never in `forward`, and are part of the state dict. They are float64,
    because a float32 count stops growing at 2^24 and sums lose digits. Merging follows Chan et al. (1979), "Updating
    formulae".
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, size: int, limit: float = 10.0) -> None:
        super().__init__()
        self.limit = limit
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    def forward(self, observations: Tensor) -> Tensor:
        """Normalise `[..., S]`."""
        return ((observations - self.shift) * self.scale).clamp(-self.limit, self.limit)

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
        self.scale.copy_((self.variance + 1e-8).rsqrt())


# ---- distributions of actions


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

    def sft_loss(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Return the supervised loss for demonstrated `actions [B, C, D]`; a scalar."""
        ...


def build_head(simulator: SimulatorSpec, chunk_size: int, log_std: float) -> GaussianHead | CategoricalHead:
    """Build the distribution for a simulator's actions; `log_std` is where that of continuous ones starts."""
    if is_discrete(simulator):
        return CategoricalHead(simulator, chunk_size)
    return GaussianHead(simulator, chunk_size, log_std)


class GaussianHead(Gaussian):
    """Independent Gaussians, in units where -1 .. 1 spans the simulator's action range. Samples outside are clipped by
    the conversion to actions, not by the distribution."""

    kind = "gaussian"
    centre: Tensor
    half_width: Tensor

    def __init__(self, simulator: SimulatorSpec, chunk_size: int, log_std: float) -> None:
        self.outputs = chunk_size * simulator.action_dim
        super().__init__(self.outputs, log_std)
        self.chunk_size = chunk_size
        centre, half_width = unit_range(simulator)
        self.register_buffer("centre", torch.from_numpy(centre))
        self.register_buffer("half_width", torch.from_numpy(half_width))

    def mode(self, outputs: Tensor) -> Tensor:
        """See `Head`."""
        return outputs

    def actions(self, sample: Tensor, logprobs: Tensor) -> Tensor:
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
        return known(sample.float(), logprobs).unsqueeze(-1)

    def sft_loss(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Cross-entropy of the choices."""
        return -self.logprobs(outputs, actions.squeeze(-1).round().long()).mean()

    def _logits(self, outputs: Tensor) -> Tensor:
        return outputs.view(*outputs.shape[:-1], self.chunk_size, -1)
