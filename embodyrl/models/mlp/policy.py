"""Gaussian policy and value network on state observations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import from_unit_range, is_discrete
from embodyrl.models.mlp.options import Activation, MLPConfig
from embodyrl.models.normalizer import RunningNormalizer
from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Policy, PolicyError, PolicySpec

ACTIVATIONS = {Activation.tanh: nn.Tanh, Activation.relu: nn.ReLU, Activation.elu: nn.ELU}
LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def build_network(sizes: Sequence[int], activation: type[nn.Module], output_gain: float) -> nn.Sequential:
    """Linear layers of `sizes` with `activation` between them; orthogonal weights (gain sqrt(2), `output_gain` for the
    last layer) and zero biases, as in Engstrom et al. (2020), "Implementation matters in deep policy gradients"."""
    layers: list[nn.Module] = []
    for index, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        last = index == len(sizes) - 2
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, output_gain if last else math.sqrt(2.0))
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, activation()]
    return nn.Sequential(*layers)


class MLPPolicy(Policy):
    """Independent Gaussians over the `C*D` entries of a chunk, in units where -1 .. 1 spans the simulator's action
    range; what lies outside is cut off by the conversion, not by the distribution. The value network is separate."""

    low: Tensor
    high: Tensor

    def __init__(self, config: MLPConfig, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        if simulator.proprio_dim == 0:
            raise PolicyError("model 'mlp' needs a state observation, but this simulator has none (proprio_dim 0)")
        if is_discrete(simulator):
            raise PolicyError(
                "model 'mlp' makes continuous actions, but this simulator takes a choice among "
                f"{int(simulator.action_high[0]) + 1}: choose a task with continuous (Box) actions, e.g. Pendulum-v1"
            )
        self.spec = PolicySpec(
            kind="gaussian",
            chunk_size=chunk_size,
            action_dim=simulator.action_dim,
            proprio_dim=simulator.proprio_dim,
        )
        outputs = chunk_size * simulator.action_dim
        hidden, activation = list(config.hidden_sizes), ACTIVATIONS[config.activation]
        self.normalizer = RunningNormalizer(simulator.proprio_dim) if config.normalize_observations else None
        self.actor = build_network([simulator.proprio_dim, *hidden, outputs], activation, 0.01)
        self.critic = build_network([simulator.proprio_dim, *hidden, 1], activation, 1.0)
        self.log_std = nn.Parameter(torch.full((outputs,), config.log_std_init))
        self.register_buffer("low", torch.from_numpy(simulator.action_low))
        self.register_buffer("high", torch.from_numpy(simulator.action_high))

    def act(self, inputs: Inputs, mode: Literal["train", "eval"], generator: torch.Generator | None) -> ActOutput:
        """See `Policy.act`; the trace holds the unclipped sample `[B, N]`."""
        features = self._normalize(inputs)
        mean = self.actor(features)
        if mode == "train":
            noise = torch.randn(mean.shape, generator=generator, device=mean.device)
            sample = mean + self.log_std.exp() * noise
        else:
            sample = mean
        unit = sample.unflatten(-1, (self.spec.chunk_size, self.spec.action_dim))
        return ActOutput(
            actions=from_unit_range(unit, self.low, self.high),
            logprobs=self._logprobs(mean, sample),
            values=self.critic(features).squeeze(-1),
            trace={"sample": sample},
        )

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """See `Policy.evaluate`."""
        features = self._normalize(inputs)
        mean = self.actor(features)
        entropy = (self.log_std + LOG_SQRT_2PI + 0.5).expand_as(mean)
        return EvalOutput(
            logprobs=self._logprobs(mean, trace["sample"]),
            entropy=entropy,
            values=self.critic(features).squeeze(-1),
        )

    def update_statistics(self, inputs: Inputs) -> None:
        """Update the running observation normalisation."""
        if self.normalizer is not None:
            self.normalizer.update(inputs["proprio"])

    def _normalize(self, inputs: Inputs) -> Tensor:
        proprio = inputs["proprio"]
        return proprio if self.normalizer is None else self.normalizer(proprio)

    def _logprobs(self, mean: Tensor, sample: Tensor) -> Tensor:
        """Log-density of each entry `[B, N]` under its Gaussian."""
        deviation = (sample - mean) * torch.exp(-self.log_std)
        return -0.5 * deviation.square() - self.log_std - LOG_SQRT_2PI
