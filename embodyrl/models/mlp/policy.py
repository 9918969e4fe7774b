"""The MLP policy: policy and value network on state observations.

Shapes: `B` samples, `C` actions in a chunk, `D` action dims, `N` log-probs per chunk, `S` proprio dims.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.mlp import acting
from embodyrl.models.mlp.heads import CategoricalHead, FlowHead, GaussianHead, SquashedHead, build_head
from embodyrl.models.mlp.network import MODULES, Network, build_network
from embodyrl.models.mlp.options import HeadConfig, MLPConfig
from embodyrl.models.normalizer import SMALLEST_DEVIATION, RunningNormalizer
from embodyrl.models.policy import ActOutput, EvalOutput, Inputs, Mode, PolicySpec, SoftPolicy, mean_over_samples

ATANH_INSIDE = 1.0 - 2.0**-24
"""Largest float32 below 1, whose inverse tanh is finite."""


class ActorCritic(SoftPolicy):
    """Base class of policies that map what they see to the outputs of a distribution and to a value. A subclass sets
    `head`, `actor` and `feature_dim`, and implements `_look` and `encode`. With a squashed head it learns from a replay
    and has no value network: critics of actions are those of the algorithm."""

    acts_on_device = True
    head: GaussianHead | SquashedHead | CategoricalHead | FlowHead
    normalizer: RunningNormalizer | None
    """Of states, if they are scaled."""
    actor: Network
    """From features to the outputs of the distribution."""
    critic: Network | None
    """Values of states, if there are any."""

    @abstractmethod
    def _look(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of the policy `[B, outputs]` and the values `[B]`, both float32; None without a critic."""

    @abstractmethod
    def _features(self, inputs: Inputs) -> Tensor:
        """Return what the policy's network reads, `[B, F]`."""

    def build_actor(self, config: HeadConfig, hidden_sizes: Sequence[int]) -> None:
        """Build the networks behind the features: those of the policy, and the value network if it has one."""
        sizes, activation = [self.feature_dim, *hidden_sizes], MODULES[config.activation]
        # Velocities depend on a noisy chunk and its share of noise, too.
        further = self.head.size + 1 if isinstance(self.head, FlowHead) else 0
        self.actor = build_network([sizes[0] + further, *sizes[1:], self.head.outputs], activation, 0.01)
        self.critic = None if self.learns_from_replay else build_network([*sizes, 1], activation, 1.0)

    def act(self, inputs: Inputs, mode: Mode, generator: torch.Generator | None = None) -> ActOutput:
        """See `Policy.act`; the trace holds the sample `[B, N]`."""
        (outputs, values), head = self._look(inputs), self._distribution
        sample = head.sample(outputs, generator) if mode == "train" else head.mode(outputs)
        logprobs = head.logprobs(outputs, sample)
        actions = head.actions(sample, logprobs)
        return ActOutput(actions=actions, logprobs=logprobs, values=values, trace={"sample": sample})

    def evaluate(self, inputs: Inputs, trace: Inputs) -> EvalOutput:
        """See `Policy.evaluate`."""
        (outputs, values), head = self._look(inputs), self._distribution
        logprobs = head.logprobs(outputs, trace["sample"])
        return EvalOutput(logprobs=logprobs, entropy=head.entropy(outputs), values=values)

    def sft_loss(self, inputs: Inputs, actions: Tensor, draws: Inputs) -> Tensor:
        """See `Policy.sft_loss`."""
        outputs = self.actor(self._features(inputs)).float()
        return mean_over_samples(self._distribution.errors(outputs, actions), inputs)

    @property
    def _distribution(self) -> GaussianHead | SquashedHead | CategoricalHead:
        assert not isinstance(self.head, FlowHead), "such policies have their own ways"
        return self.head

    # ---- learning from a replay

    @property
    def learns_from_replay(self) -> bool:
        """See `SoftPolicy`."""
        return isinstance(self.head, SquashedHead)

    def explore(self, inputs: Inputs, generator: torch.Generator) -> ActOutput:
        """See `SoftPolicy`; the trace holds the sample as that of `act` does."""
        head = self._squashed
        size = (len(next(iter(inputs.values()))), head.size)
        unit = torch.rand(size, generator=generator, device=generator.device) * 2.0 - 1.0
        return ActOutput(
            actions=head.from_unit(unit),
            logprobs=torch.full_like(unit, -math.log(2.0)),
            values=None,
            trace={"sample": unit.clamp(-ATANH_INSIDE, ATANH_INSIDE).atanh()},
        )

    def draw(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """See `SoftPolicy`."""
        return self._squashed.draw(self.actor(features).float(), noise)

    def mode(self, features: Tensor) -> Tensor:
        """See `SoftPolicy`."""
        return self._squashed.mode(self.actor(features).float()).tanh()

    def errors(self, features: Tensor, actions: Tensor) -> Tensor:
        """See `SoftPolicy`."""
        return self._squashed.errors(self.actor(features).float(), actions)

    def to_unit(self, decided: Tensor) -> Tensor:
        """See `SoftPolicy`."""
        return self._squashed.to_unit(decided)

    @property
    def scaling(self) -> RunningNormalizer | None:
        """See `SoftPolicy`."""
        return self.normalizer

    @property
    def _squashed(self) -> SquashedHead:
        if not isinstance(self.head, SquashedHead):
            raise PolicyError("only a policy with model.head=squashed learns from a replay")
        return self.head


class MLPPolicy(ActorCritic):
    """An MLP with Gaussian outputs for continuous actions or categorical outputs for discrete ones, and a separate
    value network of the same shape."""

    def __init__(self, config: MLPConfig, simulator: SimulatorSpec, chunk_size: int) -> None:
        super().__init__(config, simulator, chunk_size)
        if simulator.proprio_dim == 0:
            raise PolicyError("model 'mlp' needs a state observation, but this simulator has none (proprio_dim 0)")
        self.head = build_head(config, simulator, chunk_size)
        self.feature_dim = simulator.proprio_dim
        self.spec = PolicySpec(
            kind=self.head.kind,
            chunk_size=chunk_size,
            action_dim=simulator.action_dim,
            proprio_dim=simulator.proprio_dim,
        )
        smallest = SMALLEST_DEVIATION if self.learns_from_replay else 0.0
        self.normalizer = RunningNormalizer(simulator.proprio_dim, smallest) if config.normalize_observations else None
        self.build_actor(config, config.hidden_sizes)
        self._most_in_numpy = acting.most_observations(self.actor, self.critic, self.head)

    def act(self, inputs: Inputs, mode: Mode, generator: torch.Generator | None = None) -> ActOutput:
        """See `ActorCritic`."""
        if not self.memory_stays or not acting.suits(inputs["proprio"], self._most_in_numpy):
            return super().act(inputs, mode, generator)
        assert isinstance(self.head, GaussianHead) and self.critic is not None, "the only ones that suit"
        proprio = inputs["proprio"]
        return acting.act(proprio, self.normalizer, self.actor, self.critic, self.head, mode, generator)

    def update_statistics(self, inputs: Inputs) -> None:
        """Update the running observation normalisation."""
        if self.normalizer is not None:
            self.normalizer.update(inputs["proprio"])

    def _look(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        features = self._features(inputs)
        values = None if self.critic is None else self.critic(features).squeeze(-1).float()
        return self.actor(features).float(), values

    def _features(self, inputs: Inputs) -> Tensor:
        proprio = inputs["proprio"]
        return proprio if self.normalizer is None else self.normalizer(proprio)

    # ---- learning from a replay

    def encode(self, inputs: Inputs) -> Tensor:
        """See `SoftPolicy`."""
        return self._features(inputs).float()
