"""Settings of TD3 and TD3+BC. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Needs
from embodyrl.config.schema import Config, setting
from embodyrl.methods.replay.config import OfflineFirstAlgorithmConfig, OfflineFirstConfig


@dataclass(frozen=True, kw_only=True)
class DeterministicConfig(OfflineFirstConfig):
    """Learning from what was collected before, too, with critics of the policy's most likely actions."""

    actor_every: int = setting(2, low=1)
    """Steps of the critics for every step of the policy and of all slow copies (policy_delay in SB3)."""
    exploration_noise: float = setting(0.1, low=0.0)
    """Standard deviation of the noise in the actions of rollouts, in units of half the action range."""
    target_noise: float = setting(0.2, low=0.0)
    """Standard deviation of the noise in the actions that targets are computed for, in the same units."""
    target_noise_clip: float = setting(0.5, low=0.0)
    """Largest such noise."""
    cloning: float | None = setting(None, above=0.0)
    """TD3+BC: weight of values beside the squared distance from demonstrated actions, in units of their mean (alpha;
    2.5 is usual). null: nothing is imitated."""
    offline_iterations: int = setting(0, low=0)
    """Iterations that learn from demonstrations alone, `data.steps` optimizer steps each; nothing is collected before
    they are over. As many as `run.iterations`: nothing ever is."""


@dataclass(frozen=True, kw_only=True)
class TD3Config(OfflineFirstAlgorithmConfig):
    """Twin delayed deep deterministic policy gradient."""

    off_policy: DeterministicConfig = field(default_factory=DeterministicConfig)
    """Learning from what was collected before, too."""

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`. Rollouts take the most likely actions, to which the learner's hook adds noise."""
        return replace(super().needs(config), most_likely=True)

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`; also that there is something to imitate where that is asked for."""
        yield from super().check(config)
        settings = self.off_policy
        for name, asked in (("cloning", settings.cloning), ("offline_iterations", settings.offline_iterations)):
            if asked and config.data.path is None:
                yield ConfigIssue(
                    (f"algorithm.off_policy.{name}", "data.path"),
                    f"algorithm.off_policy.{name} = {asked:g} learns from demonstrations, but data.path is null",
                    "name the folder of a LeRobotDataset v3, or leave it out",
                )
