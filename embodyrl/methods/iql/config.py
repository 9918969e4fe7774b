"""Settings of implicit Q-learning. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Learns, Needs
from embodyrl.config.rules import fact
from embodyrl.config.schema import Config, setting
from embodyrl.methods.replay.config import OfflineFirstAlgorithmConfig, OfflineFirstConfig
from embodyrl.models.mlp.options import Distribution, HeadConfig
from embodyrl.registry import SupportedModel


@dataclass(frozen=True, kw_only=True)
class ImplicitConfig(OfflineFirstConfig):
    """Implicit Q-learning from demonstrations, then also from a replay. `critics.actor_uses` is the value
    of an action, of which a state's is an expectile."""

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
class IQLConfig(OfflineFirstAlgorithmConfig):
    """Implicit Q-learning."""

    off_policy: ImplicitConfig = field(default_factory=ImplicitConfig)
    """Learning from demonstrations by their value, then also from a replay."""

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`. A policy that shows critics what it sees learns beside them, any other one by its own
        supervised loss."""
        model = config.model
        squashed = not isinstance(model, HeadConfig) or model.head is Distribution.squashed
        shows = fact(SupportedModel, model.name, "off_policy") and squashed
        return replace(
            super().needs(config),
            learns=Learns.reparameterization if shows else Learns.weighted_imitation,
            transitions=True,
        )

    def smallest(self) -> Mapping[str, Any]:
        """See `AlgorithmConfig`."""
        return {**super().smallest(), "algorithm.off_policy.critics_first": 0}

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`; also the demonstrations, and that the policy can learn from them so."""
        yield from super().check(config)
        settings, model = self.off_policy, config.model.name
        if not settings.demonstrations and not settings.offline_iterations:
            yield ConfigIssue(
                ("algorithm.off_policy.demonstrations", "algorithm.off_policy.offline_iterations"),
                "algorithm.off_policy.demonstrations = 0 and algorithm.off_policy.offline_iterations = 0, so that "
                "nothing is learned from data.path",
                "raise one of them, or set algorithm to sac and data.path to null",
            )
        if self.needs(config).learns is not Learns.weighted_imitation:
            return
        if fact(SupportedModel, model, "weighs") is False:
            able = [entry.name for entry in SupportedModel.entries() if entry.weighs]
            yield ConfigIssue(
                ("model.name", "algorithm.name"),
                f"algorithm {self.name!r} weights demonstrations by their advantage, which the supervised loss of "
                f"model {model!r} does not take into account",
                f"set model to one that does ({', '.join(able)}); a model of your own: use inputs['sample_weights'] in "
                "its sft_loss, and register it with weighs=True",
            )
        if settings.offline_iterations == 0:
            yield ConfigIssue(
                ("algorithm.off_policy.offline_iterations", "model.name"),
                f"algorithm.off_policy.offline_iterations = 0, so that rollouts begin with random actions, which model "
                f"{model!r} does not draw",
                "set algorithm.off_policy.offline_iterations to 1 or more",
            )
