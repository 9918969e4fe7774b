"""Settings of soft actor-critic. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import action_dim
from embodyrl.config.schema import Config, setting
from embodyrl.methods.replay.config import CriticizedAlgorithmConfig, CriticizedConfig


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
class OffPolicyConfig(CriticizedConfig):
    """Learning from what was collected before, too, with critics of actions and an entropy."""

    actor_every: int = setting(1, low=1)
    """Steps of the critics for every step of the policy and the temperature (policy_delay in SB3's TD3)."""
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)
    """Weight of the policy's entropy."""


@dataclass(frozen=True, kw_only=True)
class SACConfig(CriticizedAlgorithmConfig):
    """Soft actor-critic."""

    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    """Learning from what was collected before, too."""

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`; also that a policy can have the target entropy."""
        yield from super().check(config)
        wanted, size = self.off_policy.temperature.target_entropy, self.decision_size(config)
        if isinstance(wanted, str) or size is None:
            return
        if wanted >= largest_entropy(size):
            yield ConfigIssue(
                "algorithm.off_policy.temperature.target_entropy",
                f"algorithm.off_policy.temperature.target_entropy = {wanted:g} nats, which no distribution of {size} "
                f"number{'' if size == 1 else 's'} in -1 .. 1 reaches: a uniform one has {largest_entropy(size):.3g}",
                f"set it below that (auto: {usual_target_entropy(size):g})",
            )

    def decision_size(self, config: Config) -> int | None:
        """Return the numbers of a decision; None if they are unknown before the simulator runs."""
        dim = action_dim(config)
        return None if dim is None else dim * config.rollout.chunk_size


def usual_target_entropy(size: int) -> float:
    """Return the target entropy for `size` numbers in -1 .. 1: minus half of it [nats], as in RLPD (Ball et al. 2023)
    and HIL-SERL (Luo et al. 2024). A uniform distribution has log 2 for each."""
    return -0.5 * size


def largest_entropy(size: int) -> float:
    """Return the entropy of the uniform distribution of `size` numbers in -1 .. 1, which no other exceeds [nats]."""
    return size * math.log(2.0)
