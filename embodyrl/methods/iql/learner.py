"""Implicit Q-learning: critics whose targets never ask for the value of an action outside of the data, and a policy
that imitates the actions of the highest value (Kostrikov et al. 2021, arXiv:2110.06169). The formulas are in
`algorithms.off_policy`. Unlike there, the policy imitates an expert's label where a perturbed action was executed;
its value is the critics' guess.

A policy with a squashed head imitates by the squared error of its most likely actions, from the features that the
critics see. Any other one imitates by its own supervised loss, with advantage weights.

Shapes: `M` decisions of a minibatch, or those of them that this rank has; `N` numbers of a chunk of actions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodyrl.algorithms.off_policy import (
    advantage_weights,
    agreed_values,
    critic_losses,
    expectile_losses,
    implicit_targets,
)
from embodyrl.config.schema import AlgorithmConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.optimizer import Optimizer
from embodyrl.engine.update_metrics import Metrics
from embodyrl.envs import SimulatorSpec
from embodyrl.methods.imitation.imitation import Imitation
from embodyrl.methods.iql.config import IQLConfig
from embodyrl.methods.replay.critic_encoder import CriticEncoder
from embodyrl.methods.replay.learner import CriticLearner, EncodedMinibatch
from embodyrl.models.critics.network import Critics
from embodyrl.models.policy import Policy, SoftPolicy
from embodyrl.rollout.replay import DemonstrationSampler, Minibatch, Replay
from embodyrl.seeding import derive_seed

if TYPE_CHECKING:
    from embodyrl.data.transitions import Transitions


class ImplicitQ(CriticLearner):
    """Values of states, an expectile of what the actions taken there are worth; critics whose targets are these; and a
    policy that imitates each action by how much better it is than that.

    Args:
        engine, algorithm, simulator: see `CriticLearner`.
    """

    algorithm: IQLConfig

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        settings = self.settings = self.algorithm.off_policy
        self.imitation = Imitation(engine)
        """Makes steps of the policy's supervised loss, where critics do not see what the policy sees."""
        start = torch.Generator().manual_seed(derive_seed(engine.seed, "values"))
        single = dataclasses.replace(settings.critics, count=1, subset=1)
        self.values = Critics(self.observation_encoder.feature_dim, single, start).to(self.device)
        """One network, of states alone."""
        config = engine.config.optimizer
        of_values = dataclasses.replace(config, lr=config.critic_lr or config.lr, critic_lr=None)
        self.optimizers["value"] = Optimizer(
            self.values.parameters(), of_values, engine.iterations, keep_gradients=True
        )

    @classmethod
    def encoder_for(cls, policy: Policy, simulator: SimulatorSpec, seed: int) -> CriticEncoder | None:
        """See `CriticLearner`."""
        return CriticEncoder(simulator, policy.spec.chunk_size, seed)

    @property
    def learns_before_rollouts(self) -> bool:
        """See `ReplayLearner`."""
        return self.settings.offline_iterations > 0

    def sampler(self, replay: Replay, transitions: Transitions | None) -> DemonstrationSampler | None:
        """See `ReplayLearner`."""
        assert transitions is not None, "the config rules ask for it"
        return DemonstrationSampler(
            demonstrations=transitions, share=self.settings.demonstrations, interventions_join=True
        )

    def _learn(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Metrics:
        """Make a step of the values, of the critics, and, once these have learned something, of the policy."""
        with torch.no_grad():
            every = self.targets(seen.features, seen.actions, self._subset())
            worth = agreed_values(every, self.settings.critics.actor_uses)
        metrics = self._learn_values(minibatch, seen, worth)
        metrics |= self._learn_critics(minibatch, seen)
        self.made += 1
        if self.made <= self.settings.critics_first:
            return metrics
        return metrics | self._learn_actor(minibatch, seen, worth)

    def _learn_values(self, minibatch: Minibatch, seen: EncodedMinibatch, worth: Tensor) -> Metrics:
        losses = expectile_losses(worth - self._value(seen.features), expectile=self.settings.expectile)
        loss = self._step(self.optimizers["value"], losses, minibatch)
        return {} if loss is None else {"value_loss": loss}

    def _learn_critics(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Metrics:
        with torch.no_grad():
            targets = implicit_targets(seen.returns, seen.factors, self._value(seen.following))
        values = self.critics(seen.encoded, seen.actions)
        losses = critic_losses(values, targets)
        loss = self._step(self.optimizers["critic"], losses, minibatch)
        return {} if loss is None else {"critic_loss": loss} | self._value_metrics(values.detach(), seen, minibatch)

    def _learn_actor(self, minibatch: Minibatch, seen: EncodedMinibatch, worth: Tensor) -> Metrics:
        wanted, worth = self._wanted(seen, worth)
        with torch.no_grad():
            weights = advantage_weights(
                worth - self._value(seen.features),
                scale=self.settings.advantage_scale,
                largest=self.settings.largest_weight,
            )
        of_weights = {
            "weight": weights.sum() / minibatch.size,
            "weight_max": weights.max() if len(weights) else weights.new_tensor(-math.inf),
        }
        if self.critic_encoder is not None:
            shown = dataclasses.replace(minibatch, columns=minibatch.columns | self.shown(seen.columns, minibatch))
            whole = self.imitation.step_towards(shown, wanted, self.critic_encoder.task_descriptions, weights)
            return {} if whole is None else {"actor_loss": whole / self.ranks.size} | of_weights
        assert isinstance(self.policy, SoftPolicy), "it shows critics what it sees"
        errors = self.policy.errors(seen.features, wanted)
        loss = self._step(self.optimizers["actor"], weights * errors, minibatch)
        if loss is None:
            return {}
        return {"actor_loss": loss, "imitation_loss": errors.detach().sum() / minibatch.size} | of_weights

    @torch.no_grad()
    def _wanted(self, seen: EncodedMinibatch, worth: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chunks `[M, C, D]` that the policy imitates, and their advantage weights `[M]`: the expert's
        labels where there are some, which differ from perturbed actions that were executed; elsewhere what was
        executed, with the weight `worth`."""
        executed: Tensor = seen.columns["actions"]
        if seen.labels is None or seen.labelled is None:
            return executed, worth
        wanted = torch.where(seen.labelled[:, None, None], seen.labels, executed)
        every = self.targets(seen.features, self.observation_encoder.to_unit(wanted), None)
        of_labels = agreed_values(every, self.settings.critics.actor_uses)
        return wanted, torch.where(seen.labelled, of_labels, worth)

    def _value(self, features: Tensor) -> Tensor:
        """Return the values of states `[M]`."""
        values: Tensor = self.values(features, features.new_zeros(len(features), 0))
        return values.squeeze(0)

    # ---- checkpoints

    def own_state(self) -> dict[str, Any]:
        """See `CriticLearner`; also the values of states."""
        return super().own_state() | {"values": dict(self.values.state_dict())}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `own_state`."""
        super().load_own_state(state)
        self.values.load_state_dict(state["values"])
