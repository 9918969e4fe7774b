"""Settings of soft actor-critic over the noise of a frozen flow policy. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.needs import Learns, Needs
from embodyrl.config.schema import Config
from embodyrl.methods.replay.config import judged_column
from embodyrl.methods.sac.config import OffPolicyConfig, SACConfig
from embodyrl.models.flow.config import FlowSizes, SteeringConfig, flow_sizes
from embodyrl.rollout.replay_fields import Field, steered_fields


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

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        return replace(super().needs(config), learns=Learns.noise, steering=self.off_policy.steering)

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """See `AlgorithmConfig`; also the model that is steered."""
        from embodyrl.methods.dsrl import rules  # which read this class

        yield from super().check(config)
        yield from rules.check(config, self)

    def decision_size(self, config: Config) -> int | None:
        """See `SACConfig`."""
        flow = flow_sizes(config)
        return None if flow is None else prod(flow.noise(self.off_policy.steering, config.rollout.chunk_size))

    def fields(
        self, config: Config, *, proprio_dim: int, action_dim: int, flow: FlowSizes | None = None
    ) -> Mapping[str, Field]:
        """See `AlgorithmConfig`."""
        assert flow is not None, "the config rules ask for a flow policy"
        steering, chunk_size = self.off_policy.steering, config.rollout.chunk_size
        return steered_fields(flow, steering, action_dim=action_dim, chunk_size=chunk_size, judged=judged_column(self))
