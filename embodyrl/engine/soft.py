"""Soft actor-critic: critics of actions, their slow copies, the temperature, and the steps that all of them and the
policy make (Haarnoja et al. 2018, arXiv:1812.05905). The formulas are in `algorithms.off_policy`.

Shapes: `M` decisions of a minibatch, or those of them that this rank has; `N` numbers of a chunk of actions.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from embodyrl.algorithms.off_policy_options import CriticizedAlgorithmConfig, SACConfig
from embodyrl.algorithms.off_policy_sizes import largest_entropy, usual_target_entropy
from embodyrl.algorithms.rewards import rewards_by
from embodyrl.algorithms.shifts import draw_shifts, shifted
from embodyrl.config.schema import OptimizerConfig
from embodyrl.engine.critics import Critics
from embodyrl.engine.minibatch import Columns, Metrics
from embodyrl.engine.onlooker import Onlooker
from embodyrl.engine.optimizer import Guard, Optimizer
from embodyrl.engine.parallel import Replicas
from embodyrl.models.policy import Policy, SoftPolicy
from embodyrl.registry import REWARDS
from embodyrl.seeding import derive_seed

OF_REWARDS = ("rewards", "success", "judged", "steps", "terminated", "truncated")
"""Columns of a replay that rewards are computed from, `judged` only where a classifier says what is solved."""


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """Decisions drawn from a replay; those of them that this rank holds."""

    columns: Columns
    """`[M, ...]`: what was observed, such as `proprio`, and after the decision `next_proprio`; what was decided, such
    as `actions [M, C, D]`; `rewards [M, C]`, `success [M, C]`, `steps`, `terminated`, `truncated`; where some have been
    demonstrated also `labels [M, C, D]`, what a demonstrator would execute, and `labelled`, whether there is one."""
    places: Tensor
    """int64 `[M]`, their places in the minibatch, which decide the noise that goes with them."""
    size: int
    """Decisions of the whole minibatch, on all ranks."""
    demonstrated: Tensor | None = None
    """bool `[M]`, whether a decision is one of the demonstrations; None: none is."""


@dataclass(kw_only=True)
class Looked:
    """A minibatch as the networks see it."""

    columns: Columns
    """Of the minibatch, on the device."""
    features: Tensor
    """`[M, F]`, without a gradient."""
    encoded: Tensor
    """The same, from which gradients flow to the policy's encoder, if it has one."""
    following: Tensor
    """Features of the observations that followed."""
    actions: Tensor
    """`[M, N]`, in -1 .. 1."""
    returns: Tensor
    factors: Tensor
    labels: Tensor | None
    """`[M, C, D]`, demonstrated actions in the simulator's units; None: there are none."""
    labelled: Tensor | None
    """bool `[M]`"""


class CriticLearner(ABC):
    """What learns from a replay: critics of actions, their slow copies, and the steps of a minibatch. A subclass adds
    how the critics and the policy learn.

    The critics learn from the gradients of their own loss alone, and the policy from those of its own: each is clipped
    and stepped separately, and no gradient of one is in the norm of the other. An encoder of the policy learns with the
    critics (Yarats et al. 2021, arXiv:2107.09645): the policy's loss and the targets see its features as they are.

    Args:
        policy: on its device.
        onlooker: what the critics see; None: what the policy shows them.
        algorithm: discounts, reward, sizes of the critics, shifts of images.
        actor: the policy's optimiser; without `SoftPolicy.encoder_parameters`.
        config: of all optimisers; critics have a rate of their own.
        updates: iterations of the run, for the schedules.
        seed: the run's seed.
        weights: how ranks sum gradients.
        guard: leaves out steps that are not finite.
        watch: called after every step.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        onlooker: Onlooker | None = None,
        algorithm: CriticizedAlgorithmConfig,
        actor: Optimizer,
        config: OptimizerConfig,
        updates: int,
        seed: int,
        weights: Replicas,
        guard: Guard,
        watch: Callable[[], None],
    ) -> None:
        self.policy, self.algorithm = policy, algorithm
        critics = self._sizes = algorithm.off_policy.critics
        self._pixels = algorithm.off_policy.augment_pixels
        self._weights, self._guard, self._watch = weights, guard, watch
        self._ranks = weights.ranks
        device = self.device = next(policy.parameters()).device
        self.onlooker = None if onlooker is None else onlooker.to(device)
        self.size = self.eyes.decision_size
        start = torch.Generator().manual_seed(derive_seed(seed, "critics"))
        self.critics = Critics(self.eyes.feature_dim + self.size, critics, start).to(device)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        encoder = self.eyes.encoder_parameters()
        of_critics = dataclasses.replace(config, lr=config.critic_lr or config.lr, critic_lr=None)
        learned = [*self.critics.parameters(), *encoder]
        self.optimizers = {
            "actor": actor,
            "critic": Optimizer(learned, of_critics, updates, keep_gradients=not encoder),
        }
        self._reward = Bound(REWARDS.load(algorithm.reward.name), algorithm.reward)
        self.choice = torch.Generator().manual_seed(derive_seed(seed, "subset"))
        """Choice of the critics of a target."""
        self.shifts = torch.Generator(device).manual_seed(derive_seed(seed, "shifts"))
        """Shifts of images."""
        self.made = 0
        """Steps of the critics so far."""
        self.largest_return = 0.0
        """Largest return of a decision that was ever learned from, without its sign."""

    @property
    def eyes(self) -> SoftPolicy | Onlooker:
        """What the critics see with."""
        if self.onlooker is not None:
            return self.onlooker
        assert isinstance(self.policy, SoftPolicy), "see learner_of"
        return self.policy

    # ---- an iteration

    def learn(
        self, minibatches: Iterable[Minibatch], version: int, task_descriptions: Sequence[str] = ()
    ) -> dict[str, float]:
        """Learn from minibatches, one after the other; returns metrics, each the mean over its steps.

        Args:
            minibatches: the same ones on all ranks, each with its own decisions of them.
            version: of the policy, for the schedules.
            task_descriptions: those that the column `task_index` refers to, if there is one.
        """
        if self.onlooker is not None:
            self.onlooker.task_descriptions = task_descriptions
        for optimizer in self.optimizers.values():
            optimizer.set_learning_rate(version)
        history: list[Metrics] = []
        for minibatch in minibatches:
            metrics = self._learn(minibatch, self._look(minibatch))
            self.targets.follow(self.critics, self._sizes.tau)
            history.append(metrics)
        return self._means(history)

    def after_imitation(self) -> None:  # noqa: B027 - most have no use for it
        """Take note of the policy that imitation alone gave, before the first update."""

    @abstractmethod
    def _learn(self, minibatch: Minibatch, looked: Looked) -> Metrics:
        """Make the steps of a minibatch, count it in `made`, and return metrics."""

    def _look(self, minibatch: Minibatch) -> Looked:
        """Compute what the networks see, and the return of each decision by `algorithm.reward`."""
        settings, device = self.algorithm, self.device
        columns = {name: column.to(device, non_blocking=True) for name, column in minibatch.columns.items()}
        if self._pixels:
            columns |= self._shifted(columns, minibatch)
        executed = torch.arange(columns["rewards"].shape[1], device=columns["steps"].device) < columns["steps"][:, None]
        in_time = {name: columns[name][None] for name in OF_REWARDS if name in columns}
        rewards = rewards_by(self._reward, in_time | {"executed": executed[None]})[0]
        shaped = (rewards - settings.time_penalty) * executed * settings.reward_scale
        discounts: dict[str, Any] = {"gamma": settings.gamma, "discount_per": settings.discount_per}
        encoded = self._features(columns)
        with torch.no_grad():
            following = self._features(columns, "next_")
        return Looked(
            columns=columns,
            features=encoded.detach(),
            encoded=encoded,
            following=following,
            actions=self.eyes.to_unit(columns[self.eyes.decided]),
            returns=decision_returns(shaped.float(), **discounts),
            factors=following_factors(
                columns["steps"],
                columns["terminated"],
                columns["truncated"],
                bootstrap=settings.bootstrap,
                **discounts,
            ),
            labels=columns.get("labels"),
            labelled=columns.get("labelled"),
        )

    def _shifted(self, columns: Columns, minibatch: Minibatch) -> Columns:
        """Return the images of a minibatch and those that followed, shifted. Shifts are drawn for the whole minibatch,
        so that they are the same for any number of ranks."""
        pixels, found = self._pixels, {}
        for name in ("images", "next_images"):
            drawn = draw_shifts(minibatch.size, pixels, self.shifts)
            found[name] = shifted(columns[name], drawn[minibatch.places.to(drawn.device)], pixels)
        return found

    def _features(self, columns: Columns, prefix: str = "", of: SoftPolicy | None = None) -> Tensor:
        """Return what the critics see of the observations at decisions, or with `next_` of those that followed; `of` is
        the policy that looks, if it is another one."""
        followed = [name.removeprefix("next_") for name in columns if name.startswith("next_")]
        seen = {name: columns[f"{prefix}{name}"] for name in followed}
        if self.onlooker is not None:
            seen["task_index"] = columns["task_index"]
        return (of or self.eyes).recall(seen)

    def _subset(self) -> Tensor | None:
        """Draw the critics of a target, none twice; None: all of them count."""
        count, subset = self._sizes.count, self._sizes.subset
        if subset == count:
            return None
        drawn = torch.randperm(count, generator=self.choice)[:subset]
        return drawn.to(self.device)

    @staticmethod
    def _seen(values: Tensor, looked: Looked, minibatch: Minibatch) -> Metrics:
        """Return metrics of the critics' values `[E, M]` of decisions, and of the returns that they learned from."""
        means, any_here = values.mean(0), bool(len(looked.returns))
        return {
            "q": means.sum() / minibatch.size,
            "q_max": means.max() if any_here else means.new_tensor(-math.inf),
            "return_max": looked.returns.abs().max() if any_here else means.new_zeros(()),
        }

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
        metrics = {"train/updates": float(self.made)}
        for name in dict.fromkeys(name for row in history for name in row):
            column = torch.stack([row[name] for row in history if name in row])
            every = torch.stack(self._ranks.gather(column))
            largest = name.endswith("_max")
            metrics[f"train/{name}"] = float(every.max() if largest else every.sum(0).mean())
        self.largest_return = max(self.largest_return, metrics.pop("train/return_max", 0.0))
        return metrics

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return critics, their slow copies, what they see with unless that is the policy, optimisers and random
        streams. The policy and its optimiser are not among them."""
        return {
            "onlooker": {} if self.onlooker is None else dict(self.onlooker.state_dict()),
            "critics": dict(self.critics.state_dict()),
            "targets": dict(self.targets.state_dict()),
            "optimizers": {name: each.state_dict() for name, each in self._own_optimizers()},
            "choice": self.choice.get_state(),
            "shifts": self.shifts.get_state(),
            "made": self.made,
            "largest_return": self.largest_return,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        if self.onlooker is not None:
            self.onlooker.load_state_dict(state["onlooker"])
        self.critics.load_state_dict(state["critics"])
        self.targets.load_state_dict(state["targets"])
        for name, each in self._own_optimizers():
            each.load_state_dict(state["optimizers"][name])
        restore_stream(self.shifts, state["shifts"])
        self.choice.set_state(state["choice"])
        self.made, self.largest_return = state["made"], state["largest_return"]

    def _own_optimizers(self) -> Iterator[tuple[str, Optimizer]]:
        return ((name, each) for name, each in self.optimizers.items() if name != "actor")


class SoftActorCritic(CriticLearner):
    """Soft actor-critic: the temperature, and what critics and policy learn.

    Args:
        policy, seed: see `CriticLearner`.
        algorithm: discounts, reward, sizes, rates.
        config: of all optimisers; critics and temperature have rates of their own.
        updates: iterations of the run, for the schedules.
        others: see `CriticLearner`.
    """

    policy: SoftPolicy
    algorithm: SACConfig

    def __init__(
        self,
        policy: SoftPolicy,
        *,
        algorithm: SACConfig,
        config: OptimizerConfig,
        updates: int,
        seed: int,
        **others: Any,
    ) -> None:
        settings = self.settings = algorithm.off_policy
        common: dict[str, Any] = {"algorithm": algorithm, "config": config, "updates": updates, "seed": seed}
        super().__init__(policy, **common, **others)
        temperature = settings.temperature
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature.initial), device=self.device))
        wanted = temperature.target_entropy
        self.target_entropy = usual_target_entropy(self.size) if isinstance(wanted, str) else wanted
        of_temperature = dataclasses.replace(config, lr=temperature.lr, critic_lr=None, weight_decay=0.0)
        self.optimizers["temperature"] = Optimizer([self.log_temperature], of_temperature, updates, keep_gradients=True)
        self.noise = torch.Generator(self.device).manual_seed(derive_seed(seed, "improve"))
        """Noise of the actions that are drawn in learning."""
        self.largest_entropy = largest_entropy(self.size)
        """Entropy of a policy that is random [nats]."""

    def _learn(self, minibatch: Minibatch, looked: Looked) -> Metrics:
        """Make a step of the critics, and every `actor_every`-th time one of the policy and of the temperature."""
        noise = torch.randn(2, minibatch.size, self.size, generator=self.noise, device=self.noise.device)
        own = noise[:, minibatch.places.to(noise.device)]
        metrics = self._learn_critics(minibatch, looked, own[0])
        self.made += 1
        if self._is_actors_turn():
            metrics |= self._learn_actor(minibatch, looked, own[1])
        return metrics

    def _is_actors_turn(self) -> bool:
        """Return whether the policy learns from this minibatch, too."""
        return self.made % self.settings.actor_every == 0

    def _learn_critics(self, minibatch: Minibatch, looked: Looked, noise: Tensor) -> Metrics:
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
        values = self.critics(looked.encoded, looked.actions)
        losses = critic_losses(values, targets)
        loss = self._step(optimizer, losses, minibatch)
        if loss is None:
            return {}
        return {"critic_loss": loss} | self._seen(values.detach(), looked, minibatch)

    def _learn_actor(self, minibatch: Minibatch, looked: Looked, noise: Tensor) -> Metrics:
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
        besides = self._besides(minibatch, looked)
        loss = self._step(self.optimizers["actor"], sum(besides.values(), losses), minibatch)
        metrics = {} if loss is None else {"actor_loss": loss, "entropy": -logprobs.detach().sum() / minibatch.size}
        if loss is not None:
            metrics |= {name: each.detach().sum() / minibatch.size for name, each in besides.items()}
        if settings.temperature.learn:
            losses = temperature_losses(self.log_temperature, logprobs, target_entropy=self.target_entropy)
            self._step(self.optimizers["temperature"], losses, minibatch)
        return metrics

    def _besides(self, minibatch: Minibatch, looked: Looked) -> dict[str, Tensor]:
        """Return what is added to the policy's losses, `[M]` each, by the name of its metric."""
        return {}

    def _means(self, history: list[Metrics]) -> dict[str, float]:
        """See `CriticLearner`; also the temperature."""
        return super()._means(history) | {"train/temperature": float(self.log_temperature.detach().exp())}

    def state_dict(self) -> dict[str, Any]:
        """See `CriticLearner`; also the temperature."""
        own = {"log_temperature": self.log_temperature.detach(), "noise": self.noise.get_state()}
        return super().state_dict() | own

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self.log_temperature.copy_(state["log_temperature"])
        restore_stream(self.noise, state["noise"])


def restore_stream(stream: torch.Generator, state: Tensor) -> None:
    """Continue a random stream, unless its state is that of another type of device; see `Streams`."""
    if len(stream.get_state()) == len(state):
        stream.set_state(state)
