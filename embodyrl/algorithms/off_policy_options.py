"""Options of the algorithms that learn from a replay. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from embodyrl.config.rules import fact
from embodyrl.config.schema import AlgorithmConfig, Config, CriticUse, setting
from embodyrl.models.flow.config import SteeringConfig
from embodyrl.models.mlp.options import Distribution, HeadConfig
from embodyrl.registry import SupportedModel


class Labelled(StrEnum):
    """Decisions for which it is noted what an expert would do."""

    executed = "executed"
    every = "every"


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Memory of past decisions."""

    capacity: int = setting(200_000, low=1)
    """Decisions that are kept; the oldest make room for new ones. The last observation of an episode that the time
    limit cut off takes the place of one."""
    memory_mib: int = setting(2048, low=1)
    """Largest replay that is held in memory [MiB]. A larger one lies in an unnamed file in the run's folder."""
    start_after: int = setting(1000, low=1)
    """Decisions of all envs together before learning from them begins (learning_starts in SB3). Their actions are
    random, unless the policy has learned something before (rlpd, iql, dagger)."""


@dataclass(frozen=True, kw_only=True)
class CriticsConfig:
    """Networks that value a chunk of actions in a state, and slow copies of them for their own targets."""

    count: int = setting(2, low=1, high=100)
    """Number of critics (E)."""
    subset: int = setting(2, low=1)
    """Critics whose smallest value is the target, drawn for every step, none twice; at most `count`."""
    hidden_sizes: list[int] = setting([256, 256], low=1)
    """Widths of their hidden layers."""
    layer_norm: bool = setting(True)
    """Normalise every hidden layer, which keeps values of actions that were never tried from growing."""
    tau: float = setting(0.005, above=0.0, high=1.0)
    """Share of the way that the slow copies go towards the critics after every step."""
    actor_uses: CriticUse = setting(CriticUse.min)
    """Value that the policy learns to make large: the smallest of all critics (min), or their mean."""


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig:
    """Weight of the policy's entropy, in units of the scaled reward."""

    initial: float = setting(0.01, above=0.0)
    """Temperature at the start."""
    learn: bool = setting(True)
    """Learn the temperature with which the policy has the target entropy. false: it stays."""
    lr: float = setting(1.0e-3, above=0.0, high=10.0)
    """Learning rate of its logarithm; it follows `engine.optimizer.schedule`."""
    target_entropy: float | str = setting("auto", words=("auto",))
    """Entropy of a chunk of actions, each in -1 .. 1, that the policy should have [nats]. auto: minus half of its
    numbers."""
    in_target: bool = setting(True)
    """Count the entropy of what follows in the critics' targets. false: they value rewards alone, which suits sparse
    ones."""


@dataclass(frozen=True, kw_only=True)
class InterveneConfig:
    """An expert beside the policy, who takes over in rollouts. In evaluations the policy acts alone."""

    expert: str | None = setting(None, registry="EXPERTS")
    """Scripted expert; `embodyrl list experts` shows them. null: the simulator's own."""
    share: float = setting(0.0, low=0.0, high=1.0)
    """Share of the decisions that the expert executes, drawn at random (beta in Ross et al. 2011)."""
    after: int | None = setting(None, low=0)
    """Control steps of an episode after which the expert executes the rest, as long as it is not solved. null: it never
    takes over for good."""
    labels: Labelled = setting(Labelled.executed)
    """Decisions for which it is noted what the expert would do, to be imitated. executed: those that it executes.
    every: all, whoever executes them."""


@dataclass(frozen=True, kw_only=True)
class ReplayedConfig:
    """Learning from what was collected before, too."""

    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Memory of past decisions."""
    updates_per_step: float = setting(1.0, above=0.0)
    """Optimizer steps for every decision that is collected: the update-to-data (UTD) ratio. Fractional updates
    accumulate."""
    batch_size: int = setting(256, low=1)
    """Decisions in a minibatch."""


@dataclass(frozen=True, kw_only=True)
class CorrectedConfig(ReplayedConfig):
    """Learning from what was collected before, also by an expert who takes over."""

    intervene: InterveneConfig | None = setting(None)
    """An expert beside the policy, who takes over in rollouts. null: the policy acts alone."""


@dataclass(frozen=True, kw_only=True)
class CriticizedConfig(CorrectedConfig):
    """Learning from what was collected before, too, with critics of actions."""

    critics: CriticsConfig = field(default_factory=CriticsConfig)
    """Networks that value actions."""
    augment_pixels: int = setting(0, low=0, high=64)
    """Images that are learned from are shifted by up to so many pixels at random, those of a decision and those that
    followed it each by themselves; edges are repeated. 4 suits 64 x 64 to 84 x 84. 0: none are."""


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(CriticizedConfig):
    """Learning from what was collected before, too, with critics of actions and an entropy."""

    actor_every: int = setting(1, low=1)
    """Steps of the critics for every step of the policy and the temperature (policy_delay in SB3's TD3)."""
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)
    """Weight of the policy's entropy."""


@dataclass(frozen=True, kw_only=True)
class FirstImitationConfig:
    """Imitation of demonstrations with which a run begins."""

    first_steps: int = setting(1000, low=0)
    """Optimizer steps of imitation alone before anything is collected, in minibatches of `data.batch_size`: behaviour
    cloning, whose success is printed beside that of every evaluation. 0: none; rollouts then begin with random
    actions."""


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(FirstImitationConfig):
    """Imitation of demonstrated actions, beside the critics."""

    held_out: float = setting(0.2, low=0.0, below=1.0)
    """Share of the demonstrations, at least one, on which the error of a policy that has imitated the others is
    measured before the run begins; it is forgotten afterwards, and the run imitates all of them. As many steps more as
    `first_steps`. 0: the error is not measured."""
    coef: float = setting(0.1, low=0.0)
    """Weight of the imitation loss in the policy's loss; it is the mean over the demonstrated decisions of a
    minibatch."""
    cloned_coef: float = setting(0.0, low=0.0)
    """Weight of the squared distance from the policy that imitation alone gave, in every state that is learned from. It
    lets the critics correct that policy where the demonstrations have not been, and no more. Needs `first_steps`."""
    better_only: bool = setting(False)
    """Imitate a demonstrated action only where the critics value it more than the policy's own (Q-filter, Nair et al.
    2018)."""


@dataclass(frozen=True, kw_only=True)
class DemonstratedConfig(OffPolicyConfig):
    """Learning from a replay and from demonstrations (`data.path`), with critics of actions."""

    demonstrations: float = setting(0.5, low=0.0, below=1.0)
    """Share of demonstrations in every minibatch. Where that is no whole number of decisions, minibatches take
    turns."""
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    """Imitation of demonstrated actions."""
    critics_first: int = setting(0, low=0)
    """Steps of the critics before the policy learns from them."""


@dataclass(frozen=True, kw_only=True)
class ImplicitConfig(CriticizedConfig):
    """Learning from demonstrations by what they are worth, then also from a replay. `critics.actor_uses` is the value
    of an action, of which a state's is an expectile."""

    offline_iterations: int = setting(20, low=0)
    """Iterations that learn from demonstrations alone, `data.steps` optimizer steps each; nothing is collected before
    they are over. As many as `run.iterations`: nothing ever is."""
    demonstrations: float = setting(0.5, low=0.0, high=1.0)
    """Share of demonstrations in every minibatch after that. Where that is no whole number of decisions, minibatches
    take turns."""
    critics_first: int = setting(0, low=0)
    """Steps of critics and values before the policy learns from them. A policy from a checkpoint would else first
    forget, by weights that mean nothing yet."""
    expectile: float = setting(0.7, above=0.0, below=1.0)
    """Expectile of the actions' values that is the value of a state: 0.5 is their mean, towards 1 the best of them."""
    advantage_scale: float = setting(3.0, low=0.0)
    """Factor of advantages in the exponent of the weight of an action; 0: all weigh the same, which is behaviour
    cloning."""
    largest_weight: float = setting(100.0, low=1.0)
    """Largest weight of an action."""


@dataclass(frozen=True, kw_only=True)
class ReplayAlgorithmConfig(AlgorithmConfig):
    """An algorithm that learns from a replay."""

    off_policy: ReplayedConfig = field(default_factory=ReplayedConfig)
    """Learning from what was collected before, too."""


@dataclass(frozen=True, kw_only=True)
class CriticizedAlgorithmConfig(ReplayAlgorithmConfig):
    """An algorithm that learns from a replay, with critics of actions."""

    off_policy: CriticizedConfig = field(default_factory=CriticizedConfig)
    """Learning from what was collected before, too."""


@dataclass(frozen=True, kw_only=True)
class SACConfig(CriticizedAlgorithmConfig):
    """Soft actor-critic."""

    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    """Learning from what was collected before, too."""


@dataclass(frozen=True, kw_only=True)
class RLPDConfig(SACConfig):
    """Soft actor-critic with demonstrations in every minibatch."""

    off_policy: DemonstratedConfig = field(default_factory=DemonstratedConfig)
    """Learning from a replay and from demonstrations."""


@dataclass(frozen=True, kw_only=True)
class IQLConfig(CriticizedAlgorithmConfig):
    """Implicit Q-learning."""

    off_policy: ImplicitConfig = field(default_factory=ImplicitConfig)
    """Learning from demonstrations by their value, then also from a replay."""

    def rolls_out(self, iterations: int) -> bool:
        """See `AlgorithmConfig`."""
        return self.off_policy.offline_iterations < iterations


@dataclass(frozen=True, kw_only=True)
class AggregatedConfig(CorrectedConfig):
    """Imitation of demonstrations and of what an expert says about the policy's own decisions."""

    intervene: InterveneConfig | None = field(default_factory=lambda: InterveneConfig(labels=Labelled.every))
    """The expert."""
    demonstrations: float | str = setting("auto", low=0.0, below=1.0, words=("auto",))
    """Share of demonstrations (`data.path`) in every minibatch. auto: in proportion to their number, as if all that is
    known were one dataset."""
    imitation: FirstImitationConfig = field(default_factory=FirstImitationConfig)
    """Imitation of demonstrations with which a run begins."""


@dataclass(frozen=True, kw_only=True)
class DAggerConfig(ReplayAlgorithmConfig):
    """Dataset aggregation."""

    off_policy: AggregatedConfig = field(default_factory=AggregatedConfig)
    """Imitation of demonstrations and of what an expert says about the policy's own decisions."""


@dataclass(frozen=True, kw_only=True)
class SteeredConfig(OffPolicyConfig):
    """Learning to choose the noise of a frozen policy, from what was collected before, too."""

    steering: SteeringConfig = field(default_factory=SteeringConfig)
    """Network that chooses the noise."""


@dataclass(frozen=True, kw_only=True)
class DSRLConfig(SACConfig):
    """Soft actor-critic whose actions are the noise of a frozen flow policy."""

    off_policy: SteeredConfig = field(default_factory=SteeredConfig)
    """Learning from what was collected before, too."""


def imitation_steps(algorithm: AlgorithmConfig) -> int:
    """Return the optimiser steps of imitation with which a run begins, before anything is collected."""
    return algorithm.off_policy.imitation.first_steps if isinstance(algorithm, RLPDConfig | DAggerConfig) else 0


def begins_randomly(algorithm: AlgorithmConfig) -> bool:
    """Return whether rollouts begin with random actions: nothing has been learned before."""
    offline = isinstance(algorithm, IQLConfig) and algorithm.off_policy.offline_iterations > 0
    imitated = isinstance(algorithm, DAggerConfig) or imitation_steps(algorithm) > 0
    return isinstance(algorithm, ReplayAlgorithmConfig) and not offline and not imitated


def demonstrated_share(algorithm: AlgorithmConfig) -> float | str | None:
    """Return the share of demonstrations in minibatches beside a replay; None if the algorithm has no such ones."""
    return algorithm.off_policy.demonstrations if isinstance(algorithm, RLPDConfig | IQLConfig | DAggerConfig) else None


def weighs_imitation(config: Config) -> bool:
    """Return whether a policy learns from what actions are worth by its own supervised loss: critics do not see what it
    sees."""
    model, shows = config.model, fact(SupportedModel, config.model.name, "off_policy")
    squashed = not isinstance(model, HeadConfig) or model.head is Distribution.squashed
    return isinstance(config.algorithm, IQLConfig) and not (shows and squashed)
