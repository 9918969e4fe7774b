"""Soft actor-critic: the temperature, and the steps that critics and policy make (Haarnoja et al. 2018,
arXiv:1812.05905). The formulas are in `algorithms.off_policy`.

Shapes: `M` decisions of a minibatch, or those of them that this rank has; `N` numbers of a chunk of actions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embodyrl.algorithms.off_policy import actor_losses, critic_losses, soft_targets, temperature_losses
from embodyrl.config.schema import AlgorithmConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.optimizer import Optimizer
from embodyrl.engine.update_metrics import Metrics
from embodyrl.envs import SimulatorSpec
from embodyrl.methods.replay.learner import CriticLearner, EncodedMinibatch, restore_stream
from embodyrl.methods.sac.config import SACConfig, largest_entropy, usual_target_entropy
from embodyrl.models.policy import SoftPolicy
from embodyrl.rollout.replay import Minibatch
from embodyrl.seeding import derive_seed

if TYPE_CHECKING:
    from embodyrl.pipelines.pipeline import Iteration

RANDOM_UPDATES, RANDOM_MARGIN = 2000, 0.05
"""Updates after which a policy should not be random any more, and the entropy below the largest that tells it, for each
number of a chunk of actions [nats]."""


class SoftActorCritic(CriticLearner):
    """Soft actor-critic: the temperature, and what critics and policy learn.

    Args:
        engine, algorithm, simulator: see `CriticLearner`.
    """

    policy: SoftPolicy
    algorithm: SACConfig

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        settings, config = self.algorithm.off_policy, engine.config.optimizer
        self.settings = settings
        temperature = settings.temperature
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature.initial), device=self.device))
        wanted = temperature.target_entropy
        self.target_entropy = usual_target_entropy(self.size) if isinstance(wanted, str) else wanted
        # The temperature has a rate of its own; decay would pull its logarithm towards 0, the temperature towards 1.
        of_temperature = dataclasses.replace(config, lr=temperature.lr, critic_lr=None, weight_decay=0.0)
        self.optimizers["temperature"] = Optimizer(
            [self.log_temperature], of_temperature, engine.iterations, keep_gradients=True
        )
        self.noise = torch.Generator(self.device).manual_seed(derive_seed(engine.seed, "improve"))
        """Noise of the actions that are drawn in learning."""
        self.largest_entropy = largest_entropy(self.size)
        """Entropy of a policy that is random [nats]."""

    def warn_of_values(self, iteration: Iteration) -> None:
        """See `CriticLearner`; also of an entropy that stays as large as it can be, once."""
        super().warn_of_values(iteration)
        metrics = iteration.metrics
        learned = metrics.get("train/updates", 0.0) >= RANDOM_UPDATES and self.settings.temperature.learn
        if learned and metrics.get("train/entropy", -math.inf) > self.largest_entropy - RANDOM_MARGIN * self.size:
            iteration.warn(
                "policy_stays_random",
                f"after {metrics['train/updates']:.0f} updates the policy is still as good as random (entropy "
                f"{metrics['train/entropy']:.2f} of at most {self.largest_entropy:.2f} nats): its entropy weighs more "
                "than rewards do. Lower algorithm.off_policy.temperature.initial, or raise "
                "algorithm.off_policy.temperature.lr or algorithm.reward_scale",
            )

    def _learn(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Metrics:
        """Make a step of the critics, and every `actor_every`-th time one of the policy and of the temperature."""
        # Drawn for the whole minibatch, of which each rank takes that of its own decisions: with any number of ranks a
        # decision meets the same noise.
        noise = torch.randn(2, minibatch.size, self.size, generator=self.noise, device=self.noise.device)
        own = noise[:, minibatch.places.to(noise.device)]
        metrics = self._learn_critics(minibatch, seen, own[0])
        self.made += 1
        if self._is_actors_turn():
            metrics |= self._learn_actor(minibatch, seen, own[1])
        return metrics

    def _is_actors_turn(self) -> bool:
        """Return whether the policy learns from this minibatch, too."""
        return self.made % self.settings.actor_every == 0

    def _learn_critics(self, minibatch: Minibatch, seen: EncodedMinibatch, noise: Tensor) -> Metrics:
        """Step the critics towards their targets; `noise` `[M, N]` is that of the actions that follow."""
        settings, optimizer = self.settings, self.optimizers["critic"]
        # The policy as it is now acts after each decision, whichever policy took that: this is what lets SAC learn from
        # old decisions.
        with torch.no_grad():
            actions, logprobs = self.policy.draw(seen.following, noise)
        values, following = self._values(seen, actions)
        targets = soft_targets(
            seen.returns,
            seen.factors,
            following,
            logprobs,
            temperature=self.log_temperature.detach().exp(),
            entropy=settings.temperature.in_target,
        )
        losses = critic_losses(values, targets)
        loss = self._step(optimizer, losses, minibatch)
        if loss is None:
            return {}
        return {"critic_loss": loss} | self._value_metrics(values.detach(), seen, minibatch)

    def _values(self, seen: EncodedMinibatch, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values `[E, M]` of decisions, and without a gradient those of the `actions [M, N]` that follow."""
        with torch.no_grad():
            following = self.targets(seen.following, actions, self._subset())
        return self.critics(seen.encoded, seen.actions), following

    def _learn_actor(self, minibatch: Minibatch, seen: EncodedMinibatch, noise: Tensor) -> Metrics:
        """Step the policy towards actions of a higher value, and the temperature; `noise` `[M, N]` is that of the
        actions."""
        settings = self.settings
        actions, logprobs = self.policy.draw(seen.features, noise)
        # The critics judge without learning from it (`of_actions`), and `features` carry no gradient: the encoder
        # learns from the critics alone (Yarats et al. 2021, arXiv:1910.01741).
        losses = actor_losses(
            self.critics.of_actions(seen.features, actions),
            logprobs,
            temperature=self.log_temperature.detach().exp(),
            use=settings.critics.actor_uses,
        )
        extra = self.extra_losses(minibatch, seen)
        loss = self._step(self.optimizers["actor"], sum(extra.values(), losses), minibatch)
        metrics = {} if loss is None else {"actor_loss": loss, "entropy": -logprobs.detach().sum() / minibatch.size}
        if loss is not None:
            metrics |= {name: each.detach().sum() / minibatch.size for name, each in extra.items()}
        if settings.temperature.learn:
            # Up while the entropy is below its target, down while it is above.
            losses = temperature_losses(self.log_temperature, logprobs, target_entropy=self.target_entropy)
            self._step(self.optimizers["temperature"], losses, minibatch)
        return metrics

    def extra_losses(self, minibatch: Minibatch, seen: EncodedMinibatch) -> dict[str, Tensor]:
        """Return auxiliary losses of the policy, `[M]` each, by the name of its metric."""
        return {}

    def _means(self, history: list[Metrics]) -> dict[str, float]:
        """See `CriticLearner`; also the temperature."""
        return super()._means(history) | {"train/temperature": float(self.log_temperature.detach().exp())}

    def own_state(self) -> dict[str, Any]:
        """See `CriticLearner`; also the temperature."""
        own = {"log_temperature": self.log_temperature.detach(), "noise": self.noise.get_state()}
        return super().own_state() | own

    @torch.no_grad()
    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `own_state`."""
        super().load_own_state(state)
        self.log_temperature.copy_(state["log_temperature"])
        restore_stream(self.noise, state["noise"])
