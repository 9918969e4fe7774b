"""Settings of Q-chunking. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Learns, Needs
from embodyrl.config.schema import Config, setting
from embodyrl.methods.replay.config import CriticizedAlgorithmConfig, CriticizedConfig


@dataclass(frozen=True, kw_only=True)
class FlowPolicyConfig(CriticizedConfig):
    """Learning from demonstrations, then also from a replay, with a flow policy that imitates both."""

    offline_iterations: int = setting(10, low=0)
    """Iterations that learn from demonstrations alone, `data.steps` optimizer steps each; nothing is collected before
    they are over. As many as `run.iterations`: nothing ever is."""
    demonstrations: float = setting(0.5, low=0.0, high=1.0)
    """Share of demonstrations in every minibatch after that. Where that is no whole number of decisions, minibatches
    take turns."""


@dataclass(frozen=True, kw_only=True)
class BestOfConfig(FlowPolicyConfig):
    """Learning from demonstrations, then also from a replay, with critics that choose among chunks of a flow policy."""

    candidates: int = setting(16, low=1, high=1024)
    """Chunks that are sampled (N), of which that of the highest value is executed, and counts in targets. More: nearer
    to what the critics want, further from what was imitated, and as much more computation."""


@dataclass(frozen=True, kw_only=True)
class FlowAlgorithmConfig(CriticizedAlgorithmConfig):
    """A method with critics of whole chunks, and a small flow policy."""

    off_policy: FlowPolicyConfig = field(default_factory=FlowPolicyConfig)
    """Learning from demonstrations, then also from a replay."""

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
            transitions=True,
            to_roll_out_nothing=f"algorithm.off_policy.offline_iterations to run.iterations ({iterations})",
        )

    def _share(self) -> str:
        return f", {self.off_policy.demonstrations:.0%} of them"

    def smallest(self) -> Mapping[str, Any]:
        """See `AlgorithmConfig`."""
        return {**super().smallest(), "algorithm.off_policy.offline_iterations": 0}

    def notes(self, config: Config) -> list[str]:
        """See `AlgorithmConfig`; also that single actions are no chunks."""
        single = "rollout.chunk_size = 1: values go back one action at a time; chunks of 4 to 8 actions are what "
        wanted = f"{self.name} is for"
        return [*super().notes(config), *([single + wanted] if config.rollout.chunk_size == 1 else [])]

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`; also that demonstrations are learned from."""
        yield from super().check(config)
        settings = self.off_policy
        if not settings.demonstrations and not settings.offline_iterations:
            yield ConfigIssue(
                ("algorithm.off_policy.demonstrations", "algorithm.off_policy.offline_iterations"),
                "algorithm.off_policy.demonstrations = 0 and algorithm.off_policy.offline_iterations = 0, so that "
                "nothing is learned from data.path",
                "raise one of them, or set algorithm to sac, model.head to squashed and data.path to null",
            )


@dataclass(frozen=True, kw_only=True)
class QCConfig(FlowAlgorithmConfig):
    """Q-chunking."""

    off_policy: BestOfConfig = field(default_factory=BestOfConfig)
    """Learning from demonstrations, then also from a replay."""

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        return replace(super().needs(config), learns=Learns.flow)

    def notes(self, config: Config) -> list[str]:
        """See `AlgorithmConfig`; also that a single candidate leaves nothing to choose."""
        alone = "algorithm.off_policy.candidates = 1: the critics choose nothing, and the policy only imitates"
        return [*super().notes(config), *([alone] if self.off_policy.candidates == 1 else [])]
