"""Settings of RECAP. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from embodyrl.config.infos import model_info
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Idleness, IterationSize, Learns, Needs
from embodyrl.config.schema import WIDEST_LAYER, Config, setting
from embodyrl.methods.replay.config import CorrectedConfig, ReplayAlgorithmConfig
from embodyrl.models.flow.config import FlowConfig, FlowInfo
from embodyrl.registry import SupportedModel
from embodyrl.screen import counted


class Lookahead(StrEnum):
    """What a decision is judged by."""

    chunk = "chunk"
    episode = "episode"


@dataclass(frozen=True, kw_only=True)
class ValueConfig:
    """Value model: a distribution of what is left of an episode, for each state."""

    bins: int = setting(201, low=2, high=10_001)
    """Bins of the distribution (B)."""
    hidden_sizes: list[int] = setting([256, 256], low=1, high=WIDEST_LAYER)
    """Widths of its hidden layers."""
    lr: float | None = setting(None, above=0.0)
    """Learning rate. null: that of the policy."""


@dataclass(frozen=True, kw_only=True)
class JudgedConfig(CorrectedConfig):
    """Rounds of collecting, judging and learning. `updates_per_step` is not read: a round has the steps below."""

    value: ValueConfig = field(default_factory=ValueConfig)
    """Value model."""
    value_steps: int = setting(400, low=1)
    """Steps of the value model in each round."""
    policy_steps: int = setting(800, low=1)
    """Steps of the policy after that."""
    failure: float | str = setting("auto", above=0.0, words=("auto",))
    """What a failure costs, in actions (C_fail). auto: as many as the longest episode has."""
    lookahead: Lookahead = setting(Lookahead.chunk)
    """Judge a decision by what was executed and the value of the state after it (chunk), or by what came of the whole
    episode (episode)."""
    better: float = setting(0.4, above=0.0, below=1.0)
    """Share of the decisions of each task that count as better than usual. Those of an expert who took over always
    do."""
    dropout: float = setting(0.3, low=0.0, high=1.0)
    """Share of the decisions that are learned without being told which they are. 1: all, which is cloning."""
    augment_pixels: int = setting(0, low=0, high=64, only_with={"env.cameras": ()})
    """Images that are learned from are shifted by up to so many pixels at random. 0: none are."""


@dataclass(frozen=True, kw_only=True)
class RecapConfig(ReplayAlgorithmConfig):
    """RL with experience and corrections via advantage-conditioned policies."""

    off_policy: JudgedConfig = field(default_factory=JudgedConfig)
    """Rounds of collecting, judging and learning."""

    @property
    def unread_data(self) -> Sequence[str]:
        """See `ReplayAlgorithmConfig`."""
        return ("batch_size", "steps", "shift_pixels")

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`. With demonstrations the first round collects nothing."""
        recorded = config.data.path is not None
        return replace(
            super().needs(config),
            learns=Learns.imitation,
            rollouts=config.run.iterations > recorded,
            transitions=recorded,
            whole_episodes=True,
            shifts_images=self.off_policy.augment_pixels > 0,
            to_roll_out_nothing="run.iterations to 1",
        )

    def batches(self, config: Config) -> IterationSize:
        """See `AlgorithmConfig`."""
        settings, decisions = self.off_policy, config.rollout.num_chunks * config.env.num_envs
        steps = settings.value_steps + settings.policy_steps
        return IterationSize(decisions=decisions, steps=steps, minibatch=settings.batch_size)

    def describe(self, config: Config) -> str:
        """See `AlgorithmConfig`."""
        settings, rollout = self.off_policy, config.rollout
        first = "" if config.data.path is None else f", the first of {config.data.path} alone"
        return (
            f"{self.name}   {counted(config.run.iterations, 'round')} of {counted(rollout.num_chunks, 'chunk')} x "
            f"{counted(config.env.num_envs, 'env')}{first}; {settings.value_steps} steps of the value model and "
            f"{settings.policy_steps} of the policy in minibatches of {settings.batch_size}"
        )

    def common(self, config: Config) -> Sequence[str]:
        """See `AlgorithmConfig`."""
        names = ("value_steps", "policy_steps", "better", "dropout")
        return (*(f"algorithm.off_policy.{name}" for name in names), "model.indicator.guidance")

    def smallest(self) -> Mapping[str, Any]:
        """See `AlgorithmConfig`."""
        names = ("value_steps", "policy_steps", "batch_size", "replay.start_after")
        return {f"algorithm.off_policy.{name}": 2 for name in names}

    def why_idle(self, metrics: Mapping[str, float]) -> Idleness | None:
        """See `AlgorithmConfig`."""
        if "replay/decisions" not in metrics:
            return None
        return Idleness("no episode has ended", "more rollout.num_chunks, or a shorter env.max_episode_steps")

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`; also that the policy can be told what is better."""
        yield from super().check(config)
        model, name = config.model, config.model.name
        if name in SupportedModel and not isinstance(model_info(name), FlowInfo):
            able = [each for each in SupportedModel.names() if isinstance(model_info(each), FlowInfo)]
            yield ConfigIssue(
                ("algorithm.name", "model.name"),
                f"algorithm {self.name!r} tells a flow policy in its prompt what is better, and guides it by that, and "
                f"model {name!r} is none",
                f"set model to {' or '.join(able)}, or algorithm to iql, which weights what it imitates instead",
            )
        elif isinstance(model, FlowConfig) and model.indicator is None:
            yield ConfigIssue(
                ("model.indicator", "algorithm.name"),
                f"algorithm {self.name!r} tells the policy what is better, but model.indicator is null",
                "set model.indicator to {guidance: 1.5}, or {} for its defaults",
                fix={"model.indicator": {}},
            )
        if self.off_policy.updates_per_step != 1.0:
            yield ConfigIssue(
                "algorithm.off_policy.updates_per_step",
                f"algorithm.off_policy.updates_per_step is not read by algorithm {self.name!r}, whose rounds have a "
                "number of steps",
                "leave it out, and set algorithm.off_policy.value_steps and policy_steps",
            )
