"""Settings of Q-chunking. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Learns, Needs
from embodyrl.config.schema import Config, setting
from embodyrl.methods.replay.config import OfflineFirstAlgorithmConfig, OfflineFirstConfig


@dataclass(frozen=True, kw_only=True)
class BestOfConfig(OfflineFirstConfig):
    """Learning from demonstrations, then also from a replay, with critics that choose among chunks of a flow policy."""

    candidates: int = setting(16, low=1, high=1024)
    """Chunks that are sampled (N), of which that of the highest value is executed, and counts in targets. More: nearer
    to what the critics want, further from what was imitated, and as much more computation."""


@dataclass(frozen=True, kw_only=True)
class FlowAlgorithmConfig(OfflineFirstAlgorithmConfig):
    """A method with critics of whole chunks, and a small flow policy."""

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        return replace(super().needs(config), transitions=True)

    def _share(self) -> str:
        return f", {self.off_policy.demonstrations:.0%} of them"

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
