"""Soft actor-critic: critics of actions, their slow copies, the temperature, and the steps that all of them and the
policy make (Haarnoja et al. 2018, arXiv:1812.05905). The formulas are in `algorithms.off_policy`.

Shapes: `M` decisions of a minibatch, or those of them that this rank has; `N` numbers of a chunk of actions.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.algorithms.columns import Bound
from embodyrl.algorithms.off_policy import (
    actor_losses,
    critic_losses,
    decision_returns,
    following_factors,
    soft_targets,
    temperature_losses,
)
from embodyrl.algorithms.off_policy_sizes import largest_entropy, usual_target_entropy
from embodyrl.algorithms.options import SACConfig
from embodyrl.config.schema import OptimizerConfig
from embodyrl.engine.critics import Critics
from embodyrl.engine.minibatch import Columns, Metrics
from embodyrl.engine.optimizer import Guard, Optimizer
from embodyrl.engine.parallel import Replicas
from embodyrl.models.policy import PolicyObservation, SoftPolicy
from embodyrl.registry import REWARDS
from embodyrl.seeding import derive_seed


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """Decisions drawn from a replay; those of them that this rank holds."""

    columns: Columns
    """`[M, ...]`: `proprio`, `next_proprio`, `actions [M, C, D]`, `rewards [M, C]`, `success [M, C]`, `steps`,
    `terminated`, `truncated`."""
    places: Tensor
    """int64 `[M]`, their places in the minibatch, which decide the noise that goes with them."""
    size: int
    """Decisions of the whole minibatch, on all ranks."""


@dataclass(kw_only=True)
class _Looked:
    """A minibatch as the networks see it."""

    features: Tensor
    following: Tensor
    """Features of the observations that followed."""
    actions: Tensor
    """`[M, N]`, in -1 .. 1."""
    returns: Tensor
    factors: Tensor


class SoftActorCritic:
    """What learns beside the policy, and the steps of a minibatch.

    The critics learn from the gradients of their own loss alone, and the policy from those of its own: each is clipped
    and stepped apart, and no gradient of one is in the norm of the other.

    Args:
        policy: on its device.
        algorithm: discounts, reward, sizes, rates.
        actor: the policy's optimiser.
        config: of all optimisers; critics and temperature have rates of their own.
        updates: iterations of the run, for the schedules.
        seed: the run's seed.
        weights: how ranks sum gradients.
        guard: leaves out steps that are not finite.
        watch: called after every step.
    """

    def __init__(
        self,
        policy: SoftPolicy,
        *,
        algorithm: SACConfig,
        actor: Optimizer,
        config: OptimizerConfig,
        updates: int,
        seed: int,
        weights: Replicas,
        guard: Guard,
        watch: Callable[[], None],
    ) -> None:
        self.policy, self.algorithm, self.settings = policy, algorithm, algorithm.off_policy
        self._weights, self._guard, self._watch = weights, guard, watch
        self._ranks = weights.ranks
        self.size = policy.spec.chunk_size * policy.spec.action_dim
        device = next(policy.parameters()).device
        start = torch.Generator().manual_seed(derive_seed(seed, "critics"))
        self.critics = Critics(policy.features + self.size, self.settings.critics, start).to(device)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(self.settings.temperature.initial), device=device))
        wanted = self.settings.temperature.target_entropy
        self.target_entropy = usual_target_entropy(self.size) if isinstance(wanted, str) else wanted
        of_critics = dataclasses.replace(config, lr=config.critic_lr or config.lr, critic_lr=None)
        of_temperature = dataclasses.replace(config, lr=self.settings.temperature.lr, critic_lr=None, weight_decay=0.0)
        self.optimizers = {
            "actor": actor,
            "critic": Optimizer(self.critics.parameters(), of_critics, updates, keep_gradients=True),
            "temperature": Optimizer([self.log_temperature], of_temperature, updates, keep_gradients=True),
        }
        self._reward = Bound(REWARDS.load(algorithm.reward.name), algorithm.reward)
        self.noise = torch.Generator(device).manual_seed(derive_seed(seed, "improve"))
        """Noise of the actions that are drawn in learning."""
        self.choice = torch.Generator().manual_seed(derive_seed(seed, "subset"))
        """Choice of the critics of a target."""
        self.made = 0
        """Steps of the critics so far."""
        self.largest_entropy = largest_entropy(self.size)
        """Entropy of a policy that is random [nats]."""
        self.largest_return = 0.0
        """Largest return of a decision that was ever learned from, without its sign."""

    # ---- an iteration

    def learn(self, minibatches: Iterable[Minibatch], version: int) -> dict[str, float]:
        """Make a step of the critics from each minibatch, and every `actor_every`-th time one of the policy and of the
        temperature; returns metrics, each the mean over its steps.

        Args:
            minibatches: the same ones on all ranks, each with its own decisions of them.
            version: of the policy, for the schedules.
        """
        for optimizer in self.optimizers.values():
            optimizer.set_learning_rate(version)
        history: list[Metrics] = []
        for minibatch in minibatches:
            looked = self._look(minibatch)
            noise = torch.randn(2, minibatch.size, self.size, generator=self.noise, device=self.noise.device)
            own = noise[:, minibatch.places.to(noise.device)]
            metrics = self._learn_critics(minibatch, looked, own[0])
            self.made += 1
            if self.made % self.settings.actor_every == 0:
                metrics |= self._learn_actor(minibatch, looked, own[1])
            self.targets.follow(self.critics, self.settings.critics.tau)
            history.append(metrics)
        return self._means(history)

    @torch.no_grad()
    def _look(self, minibatch: Minibatch) -> _Looked:
        """Compute what the networks see, and the return of each decision by `algorithm.reward`."""
        settings, device = self.algorithm, self.log_temperature.device
        columns = {name: column.to(device, non_blocking=True) for name, column in minibatch.columns.items()}
        executed = torch.arange(columns["rewards"].shape[1], device=columns["steps"].device) < columns["steps"][:, None]
        in_time = {name: columns[name][None] for name in ("rewards", "success", "steps", "terminated", "truncated")}
        rewards = self._reward(in_time | {"executed": executed[None]})[0]
        shaped = (rewards - settings.time_penalty) * executed * settings.reward_scale
        discounts: dict[str, Any] = {"gamma": settings.gamma, "discount_per": settings.discount_per}
        return _Looked(
            features=self._features(columns["proprio"]),
            following=self._features(columns["next_proprio"]),
            actions=self.policy.to_unit(columns["actions"]),
            returns=decision_returns(shaped.float(), **discounts),
            factors=following_factors(
                columns["steps"],
                columns["terminated"],
                columns["truncated"],
                bootstrap=settings.bootstrap,
                **discounts,
            ),
        )

    def _features(self, proprio: Tensor) -> Tensor:
        observation = PolicyObservation(proprio=proprio, task_descriptions=[""] * len(proprio))
        return self.policy.encode(self.policy.preprocess(observation))

    def _learn_critics(self, minibatch: Minibatch, looked: _Looked, noise: Tensor) -> Metrics:
        """Step the critics towards their targets; `noise` `[M, N]` is that of the actions that follow."""
        settings, optimizer = self.settings, self.optimizers["critic"]
        with torch.no_grad():
            actions, logprobs = self.policy.draw(looked.following, noise)
            targets = soft_targets(
                looked.returns,
                looked.factors,
                self.targets(looked.following, actions, self._subset()),
                logprobs,
                temperature=self.log_temperature.exp(),
                entropy=settings.temperature.in_target,
            )
        values = self.critics(looked.features, looked.actions)
        losses = critic_losses(values, targets)
        loss = self._step(optimizer, losses, minibatch)
        if loss is None:
            return {}
        found = values.detach()
        return {
            "critic_loss": loss,
            "q": found.mean(0).sum() / minibatch.size,
            "q_max": found.mean(0).max() if len(losses) else found.new_tensor(-math.inf),
            "return_max": looked.returns.abs().max() if len(losses) else found.new_zeros(()),
        }

    def _subset(self) -> Tensor | None:
        """Draw the critics of a target, none twice; None: all of them count."""
        count, subset = self.settings.critics.count, self.settings.critics.subset
        if subset == count:
            return None
        drawn = torch.randperm(count, generator=self.choice)[:subset]
        return drawn.to(self.log_temperature.device)

    def _learn_actor(self, minibatch: Minibatch, looked: _Looked, noise: Tensor) -> Metrics:
        """Step the policy towards actions of a higher value, and the temperature; `noise` `[M, N]` is that of the
        actions."""
        settings = self.settings
        actions, logprobs = self.policy.draw(looked.features, noise)
        losses = actor_losses(
            self.critics.of_actions(looked.features, actions),
            logprobs,
            temperature=self.log_temperature.detach().exp(),
            use=settings.critics.actor_uses,
        )
        loss = self._step(self.optimizers["actor"], losses, minibatch)
        metrics = {} if loss is None else {"actor_loss": loss, "entropy": -logprobs.detach().sum() / minibatch.size}
        if settings.temperature.learn:
            losses = temperature_losses(self.log_temperature, logprobs, target_entropy=self.target_entropy)
            self._step(self.optimizers["temperature"], losses, minibatch)
        return metrics

    def _step(self, optimizer: Optimizer, losses: Tensor, minibatch: Minibatch) -> Tensor | None:
        """Make an optimiser step by the mean of losses over the whole minibatch, of which these are this rank's;
        returns this rank's part of the mean, or None if the step was not finite and left out."""
        loss = losses.sum() / minibatch.size
        optimizer.clear()
        loss.backward()
        self._weights.sum_gradients(optimizer.parameters)
        norm = optimizer.clip()
        whole = self._ranks.sum(loss.detach())
        if not self._guard.allows(whole, norm, minibatch.columns, update=self.made + 1):
            return None
        optimizer.step()
        self._watch()
        return loss.detach()

    def _means(self, history: list[Metrics]) -> dict[str, float]:
        """Return the metrics of an iteration: the same on all ranks."""
        metrics = {"train/updates": float(self.made), "train/temperature": float(self.log_temperature.detach().exp())}
        for name in dict.fromkeys(name for row in history for name in row):
            column = torch.stack([row[name] for row in history if name in row])
            every = torch.stack(self._ranks.gather(column))
            largest = name.endswith("_max")
            metrics[f"train/{name}"] = float(every.max() if largest else every.sum(0).mean())
        self.largest_return = max(self.largest_return, metrics.pop("train/return_max", 0.0))
        return metrics

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return critics, their slow copies, temperature, optimisers and random streams. The policy and its optimiser
        are not among them."""
        return {
            "critics": dict(self.critics.state_dict()),
            "targets": dict(self.targets.state_dict()),
            "log_temperature": self.log_temperature.detach(),
            "optimizers": {name: each.state_dict() for name, each in self._own_optimizers()},
            "noise": self.noise.get_state(),
            "choice": self.choice.get_state(),
            "made": self.made,
            "largest_return": self.largest_return,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.critics.load_state_dict(state["critics"])
        self.targets.load_state_dict(state["targets"])
        self.log_temperature.copy_(state["log_temperature"])
        for name, each in self._own_optimizers():
            each.load_state_dict(state["optimizers"][name])
        if len(self.noise.get_state()) == len(state["noise"]):  # else of another type of device: see `Streams`
            self.noise.set_state(state["noise"])
        self.choice.set_state(state["choice"])
        self.made, self.largest_return = state["made"], state["largest_return"]

    def _own_optimizers(self) -> Iterator[tuple[str, Optimizer]]:
        return ((name, each) for name, each in self.optimizers.items() if name != "actor")
