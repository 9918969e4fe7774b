"""Settings that methods with a replay share. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Idleness, IterationSize, Learns, Needs
from embodyrl.config.replay import InterveneConfig, ReplayConfig
from embodyrl.config.rules import fact
from embodyrl.config.schema import AlgorithmConfig, Config, CriticUse, RewardedConfig, setting
from embodyrl.data.check import task_notes
from embodyrl.models.critics.config import CriticSizes
from embodyrl.models.flow.config import FlowSizes
from embodyrl.registry import REWARDS
from embodyrl.rollout.replay_fields import MIB, Field, replay_fields
from embodyrl.screen import counted


def judged_column(algorithm: AlgorithmConfig) -> str | None:
    """Return the column of judgements that the rewards of a method come from; None: there is none."""
    reward = algorithm.parts().get("reward")
    return None if reward is None else fact(REWARDS, reward.name, "judged")


@dataclass(frozen=True, kw_only=True)
class CriticsConfig(CriticSizes):
    """Networks that value a chunk of actions in a state, and slow copies of them for their own targets."""

    subset: int = setting(2, low=1)
    """Critics whose smallest value is the target, drawn for every step, none twice; at most `count`."""
    tau: float = setting(0.005, above=0.0, high=1.0)
    """Share of the way that the slow copies go towards the critics after every step."""
    actor_uses: CriticUse = setting(CriticUse.min)
    """Value that the policy learns to make large: the smallest of all critics (min), or their mean."""


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
    augment_pixels: int = setting(0, low=0, high=64, only_with={"env.cameras": ()})
    """Images that are learned from are shifted by up to so many pixels at random, those of a decision and those that
    followed it each by themselves; edges are repeated. 4 suits 64 x 64 to 84 x 84. 0: none are."""


@dataclass(frozen=True, kw_only=True)
class ReplayAlgorithmConfig(AlgorithmConfig):
    """A method that learns from a replay."""

    off_policy: ReplayedConfig = field(default_factory=ReplayedConfig)
    """Learning from what was collected before, too."""

    @property
    def expert(self) -> InterveneConfig | None:
        """Settings of the expert beside the policy; None: there is none."""
        return self.off_policy.intervene if isinstance(self.off_policy, CorrectedConfig) else None

    @property
    def iterations_offline(self) -> int:
        """Iterations that learn from demonstrations alone, before anything is collected."""
        return 0

    @property
    def unread_data(self) -> Sequence[str]:
        """Settings of the section `data` that it does not read though it learns from demonstrations."""
        return ()

    @property
    def family(self) -> str:
        """See `AlgorithmConfig`."""
        return "replay"

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        return Needs(
            learns=Learns.reparameterization,
            rollouts=True,
            replay=self.off_policy.replay,
            expert=self.expert,
            whole_policy=True,
        )

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`."""
        from embodyrl.methods.replay import rules  # which read these classes

        yield from rules.check(config, self)

    def notes(self, config: Config) -> list[str]:
        """See `AlgorithmConfig`; the size and the place of the replay, as far as they are known before the simulator
        runs, and a doubt about what demonstrations show."""
        from embodyrl.methods.replay.rules import replay_size

        settings, size = self.off_policy.replay, replay_size(config, self)
        doubts = task_notes(config) if self.needs(config).transitions else []
        if size is None:
            return doubts
        place = "in memory" if size <= settings.memory_mib * MIB else "on the disk, in the run's folder"
        return [f"the replay of {settings.capacity:,} chunks takes up to {size / MIB:,.1f} MiB {place}", *doubts]

    def batches(self, config: Config) -> IterationSize:
        """See `AlgorithmConfig`."""
        decisions = config.rollout.num_chunks * config.env.num_envs
        steps = round(self.off_policy.updates_per_step * decisions)
        return IterationSize(decisions=decisions, steps=steps, minibatch=self.off_policy.batch_size)

    def describe(self, config: Config) -> str:
        """See `AlgorithmConfig`."""
        rollout, learning = config.rollout, self.off_policy
        demonstrated = "" if config.data.path is None else f"{self._share()} from {config.data.path}"
        return (
            f"{self.name}   {counted(config.run.iterations, 'iteration')} of {counted(rollout.num_chunks, 'chunk')} x "
            f"{counted(config.env.num_envs, 'env')}, chunks of {counted(rollout.chunk_size, 'action')}, "
            f"{counted(learning.updates_per_step, 'update')} per chunk in minibatches of {learning.batch_size}"
            + demonstrated
        )

    def _share(self) -> str:
        """Return what share of a minibatch is demonstrated, as text."""
        return ""

    def common(self, config: Config) -> Sequence[str]:
        """See `AlgorithmConfig`."""
        return (
            *("algorithm.off_policy.batch_size", "algorithm.off_policy.updates_per_step"),
            *("algorithm.off_policy.replay.capacity", "algorithm.off_policy.replay.start_after"),
            *("algorithm.off_policy.temperature.initial", "algorithm.off_policy.critics.hidden_sizes"),
        )

    def smallest(self) -> Mapping[str, Any]:
        """See `AlgorithmConfig`."""
        return {
            "algorithm.off_policy.replay.start_after": 2,
            "algorithm.off_policy.batch_size": 2,
            "algorithm.off_policy.updates_per_step": 0.5,
        }

    def why_idle(self, metrics: Mapping[str, float]) -> Idleness | None:
        """See `AlgorithmConfig`."""
        if "replay/decisions" not in metrics:
            return None
        there, start = metrics["replay/decisions"], self.off_policy.replay.start_after
        return Idleness(f"it fills the replay, {there:,.0f} of {start:,} decisions to begin with")

    def fields(
        self, config: Config, *, proprio_dim: int, action_dim: int, flow: FlowSizes | None = None
    ) -> Mapping[str, Field]:
        """See `AlgorithmConfig`."""
        env, needs = config.env, self.needs(config)
        return replay_fields(
            proprio_dim=proprio_dim,
            action_dim=action_dim,
            chunk_size=config.rollout.chunk_size,
            images=(env.frames * len(env.cameras), *env.image_size, 3) if env.cameras else None,
            corrected=needs.expert is not None,
            tasks=needs.learns is Learns.weighted_imitation or needs.whole_episodes,
            judged=judged_column(self),
            whole_episodes=needs.whole_episodes,
        )


@dataclass(frozen=True, kw_only=True)
class CriticizedAlgorithmConfig(ReplayAlgorithmConfig, RewardedConfig):
    """A method that learns from a replay, with critics of actions."""

    off_policy: CriticizedConfig = field(default_factory=CriticizedConfig)
    """Learning from what was collected before, too."""

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        return replace(super().needs(config), shifts_images=self.off_policy.augment_pixels > 0)

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`."""
        from embodyrl.methods.replay import rules

        yield from super().check(config)
        yield from rules.check_critics(config, self.off_policy)


@dataclass(frozen=True, kw_only=True)
class OfflineFirstConfig(CriticizedConfig):
    """Learning from demonstrations alone, then also from a replay, with critics of actions."""

    offline_iterations: int = setting(20, low=0)
    """Iterations that learn from demonstrations alone, `data.steps` optimizer steps each; nothing is collected before
    they are over. As many as `run.iterations`: nothing ever is."""
    demonstrations: float = setting(0.5, low=0.0, high=1.0)
    """Share of demonstrations in every minibatch after that. Where that is no whole number of decisions, minibatches
    take turns."""


@dataclass(frozen=True, kw_only=True)
class OfflineFirstAlgorithmConfig(CriticizedAlgorithmConfig):
    """A method that may learn from demonstrations alone for some iterations."""

    off_policy: OfflineFirstConfig = field(default_factory=OfflineFirstConfig)
    """Learning from demonstrations alone, then also from a replay."""

    @property
    def iterations_offline(self) -> int:
        """See `ReplayAlgorithmConfig`."""
        return self.off_policy.offline_iterations

    @property
    def unread_data(self) -> Sequence[str]:
        """See `ReplayAlgorithmConfig`."""
        return ("batch_size", "shift_pixels")

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        iterations = config.run.iterations
        return replace(
            super().needs(config),
            rollouts=self.off_policy.offline_iterations < iterations,
            transitions=config.data.path is not None,
            to_roll_out_nothing=f"algorithm.off_policy.offline_iterations to run.iterations ({iterations})",
        )

    def smallest(self) -> Mapping[str, Any]:
        """See `AlgorithmConfig`."""
        return {**super().smallest(), "algorithm.off_policy.offline_iterations": 0}
