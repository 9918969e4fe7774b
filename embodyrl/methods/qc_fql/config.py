"""Settings of Q-chunking with a policy of one step. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from embodyrl.config.needs import Learns, Needs
from embodyrl.config.schema import Config, setting
from embodyrl.methods.qc.config import FlowAlgorithmConfig
from embodyrl.methods.replay.config import OfflineFirstConfig


@dataclass(frozen=True, kw_only=True)
class DistilledConfig(OfflineFirstConfig):
    """Learning from demonstrations, then also from a replay, with a policy of one step that critics teach."""

    distillation: float = setting(10.0, low=0.0)
    """Weight of the mean squared distance from the chunks of the flow policy, beside values (alpha). Larger: nearer to
    what was imitated."""
    normalize_values: bool = setting(True)
    """Divide values by their mean size in the minibatch, so that one `distillation` suits all rewards. false: values as
    they are, as Li et al. (2025) have it, with a weight of 100 or more."""


@dataclass(frozen=True, kw_only=True)
class QCFQLConfig(FlowAlgorithmConfig):
    """Q-chunking with a policy of one step."""

    off_policy: DistilledConfig = field(default_factory=DistilledConfig)
    """Learning from demonstrations, then also from a replay."""

    def needs(self, config: Config) -> Needs:
        """See `AlgorithmConfig`."""
        return replace(super().needs(config), learns=Learns.one_step)
