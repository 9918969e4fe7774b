"""Policy and value network on state observations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import is_discrete
from embodyrl.models.errors import PolicyError
from embodyrl.models.mlp.heads import CategoricalHead, GaussianHead
from embodyrl.models.mlp.options import Activation, MLPConfig
from embodyrl.models.normalizer import RunningNormalizer
from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Policy, PolicySpec

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


class MLPPolicy(Policy):
    """An MLP with Gaussian outputs for continuous actions or categorical outputs for discrete ones, and a separate
    value network of the same shape."""

    def __init__(self, config: MLPConfig, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        if simulator.proprio_dim == 0:
            raise PolicyError("model 'mlp' needs a state observation, but this simulator has none (proprio_dim 0)")
        self.head: GaussianHead | CategoricalHead
        if is_discrete(simulator):
            self.head = CategoricalHead(simulator, chunk_size)
        else:
            self.head = GaussianHead(simulator, chunk_size, config.log_std_init)
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

    def act(
        self, inputs: Inputs, mode: Literal["train", "eval"], generator: torch.Generator | None = None
    ) -> ActOutput:
        """See `Policy.act`; the trace holds the sample `[B, N]`."""
        features = self._normalize(inputs)
        outputs = self.actor(features).float()
        sample = self.head.sample(outputs, generator) if mode == "train" else self.head.mode(outputs)
        return ActOutput(
            actions=self.head.actions(sample),
            logprobs=self.head.logprobs(outputs, sample),
            values=self.critic(features).squeeze(-1).float(),
            trace={"sample": sample},
        )

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """See `Policy.evaluate`."""
        features = self._normalize(inputs)
        outputs = self.actor(features).float()
        return EvalOutput(
            logprobs=self.head.logprobs(outputs, trace["sample"]),
            entropy=self.head.entropy(outputs),
            values=self.critic(features).squeeze(-1).float(),
        )

    def sft_loss(self, inputs: Inputs, actions: Tensor, draws: Inputs) -> Tensor:
        """See `Policy.sft_loss`."""
        return self.head.sft_loss(self.actor(self._normalize(inputs)).float(), actions)

    def update_statistics(self, inputs: Inputs) -> None:
        """Update the running observation normalisation."""
        if self.normalizer is not None:
            self.normalizer.update(inputs["proprio"])

    def _normalize(self, inputs: Inputs) -> Tensor:
        proprio = inputs["proprio"]
        return proprio if self.normalizer is None else self.normalizer(proprio)
