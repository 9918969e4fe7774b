"""Implicit Q-learning: critics whose targets never ask what an action outside of the data is worth, and a policy that
imitates the actions that are worth most (Kostrikov et al. 2021, arXiv:2110.06169). The formulas are in
`algorithms.off_policy`. Unlike there, the policy imitates what a demonstrator wanted where a push executed something
else; what that is worth the critics guess.

A policy with a squashed head imitates by the squared error of its most likely actions, from the features that the
critics see. Any other one imitates by its own supervised loss, in which samples weigh by what they are worth.

Shapes: `M` decisions of a minibatch, or those of them that this rank has; `N` numbers of a chunk of actions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from embodyrl.algorithms.off_policy import (
    advantage_weights,
    agreed_values,
    critic_losses,
    expectile_losses,
    implicit_targets,
)
from embodyrl.algorithms.off_policy_options import IQLConfig
from embodyrl.config.schema import OptimizerConfig
from embodyrl.engine.critics import Critics
from embodyrl.engine.minibatch import Columns, Metrics
from embodyrl.engine.onlooker import Onlooker
from embodyrl.engine.optimizer import Optimizer
from embodyrl.engine.soft import CriticLearner, Looked, Minibatch
from embodyrl.models.policy import Policy, SoftPolicy
from embodyrl.seeding import derive_seed

Imitate = Callable[[Minibatch, Tensor, Tensor, Sequence[str]], Tensor | None]
"""Makes a step of a policy towards chunks `[M, C, D]`, each with a weight `[M]`, in the observations of a minibatch
whose column `task_index` refers to these task descriptions. Returns the loss of the whole minibatch; None if the step
was not finite and left out."""


class ImplicitQ(CriticLearner):
    """Values of states, an expectile of what the actions taken there are worth; critics whose targets are these; and a
    policy that imitates each action by how much better it is than that.

    Args:
        policy, onlooker, seed: see `CriticLearner`.
        imitate: makes a step of the policy's supervised loss, see `Imitate`; used with an onlooker.
        algorithm: discounts, reward, sizes, expectile, weights.
        config: of all optimisers; critics and values share a rate.
        updates: iterations of the run, for the schedules.
        others: see `CriticLearner`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        onlooker: Onlooker | None = None,
        imitate: Imitate,
        algorithm: IQLConfig,
        config: OptimizerConfig,
        updates: int,
        seed: int,
        **others: Any,
    ) -> None:
        settings = self.settings = algorithm.off_policy
        common: dict[str, Any] = {"algorithm": algorithm, "config": config, "updates": updates, "seed": seed}
        super().__init__(policy, onlooker=onlooker, **common, **others)
        self._imitate = imitate
        start = torch.Generator().manual_seed(derive_seed(seed, "values"))
        single = dataclasses.replace(settings.critics, count=1, subset=1)
        self.values = Critics(self.eyes.feature_dim, single, start).to(self.device)
        """One network, of states alone."""
        of_values = dataclasses.replace(config, lr=config.critic_lr or config.lr, critic_lr=None)
        self.optimizers["value"] = Optimizer(self.values.parameters(), of_values, updates, keep_gradients=True)

    def _learn(self, minibatch: Minibatch, looked: Looked) -> Metrics:
        """Make a step of the values, of the critics, and, once these have learned something, of the policy."""
        with torch.no_grad():
            every = self.targets(looked.features, looked.actions, self._subset())
            worth = agreed_values(every, self.settings.critics.actor_uses)
        metrics = self._learn_values(minibatch, looked, worth)
        metrics |= self._learn_critics(minibatch, looked)
        self.made += 1
        if self.made <= self.settings.critics_first:
            return metrics
        return metrics | self._learn_actor(minibatch, looked, worth)

    def _learn_values(self, minibatch: Minibatch, looked: Looked, worth: Tensor) -> Metrics:
        losses = expectile_losses(worth - self._value(looked.features), expectile=self.settings.expectile)
        loss = self._step(self.optimizers["value"], losses, minibatch)
        return {} if loss is None else {"value_loss": loss}

    def _learn_critics(self, minibatch: Minibatch, looked: Looked) -> Metrics:
        with torch.no_grad():
            targets = implicit_targets(looked.returns, looked.factors, self._value(looked.following))
        values = self.critics(looked.encoded, looked.actions)
        losses = critic_losses(values, targets)
        loss = self._step(self.optimizers["critic"], losses, minibatch)
        return {} if loss is None else {"critic_loss": loss} | self._seen(values.detach(), looked, minibatch)

    def _learn_actor(self, minibatch: Minibatch, looked: Looked, worth: Tensor) -> Metrics:
        wanted, worth = self._wanted(looked, worth)
        with torch.no_grad():
            weights = advantage_weights(
                worth - self._value(looked.features),
                scale=self.settings.advantage_scale,
                largest=self.settings.largest_weight,
            )
        of_weights = {
            "weight": weights.sum() / minibatch.size,
            "weight_max": weights.max() if len(weights) else weights.new_tensor(-math.inf),
        }
        if self.onlooker is not None:
            shown = dataclasses.replace(minibatch, columns=minibatch.columns | self._shown(minibatch, looked))
            whole = self._imitate(shown, wanted, weights, self.onlooker.task_descriptions)
            return {} if whole is None else {"actor_loss": whole / self._ranks.size} | of_weights
        assert isinstance(self.policy, SoftPolicy), "it shows critics what it sees"
        errors = self.policy.errors(looked.features, wanted)
        loss = self._step(self.optimizers["actor"], weights * errors, minibatch)
        if loss is None:
            return {}
        return {"actor_loss": loss, "imitation_loss": errors.detach().sum() / minibatch.size} | of_weights

    def _shown(self, minibatch: Minibatch, looked: Looked) -> Columns:
        """Return what the policy sees otherwise than it was: the shifted images, where those of the minibatch are."""
        if not self._pixels:
            return {}
        return {"images": looked.columns["images"].to(minibatch.columns["images"].device)}

    @torch.no_grad()
    def _wanted(self, looked: Looked, worth: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chunks `[M, C, D]` that the policy imitates, and what they are worth `[M]`: what a demonstrator
        wanted, where that is known, in place of what a push made of it; elsewhere what was executed, which is worth
        `worth`."""
        executed: Tensor = looked.columns["actions"]
        if looked.labels is None or looked.labelled is None:
            return executed, worth
        wanted = torch.where(looked.labelled[:, None, None], looked.labels, executed)
        every = self.targets(looked.features, self.eyes.to_unit(wanted), None)
        of_labels = agreed_values(every, self.settings.critics.actor_uses)
        return wanted, torch.where(looked.labelled, of_labels, worth)

    def _value(self, features: Tensor) -> Tensor:
        """Return the values of states `[M]`."""
        values: Tensor = self.values(features, features.new_zeros(len(features), 0))
        return values.squeeze(0)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """See `CriticLearner`; also the values of states."""
        return super().state_dict() | {"values": dict(self.values.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self.values.load_state_dict(state["values"])
