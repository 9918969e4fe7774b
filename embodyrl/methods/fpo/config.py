"""Settings of flow policy optimisation. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embodyrl.config.schema import Config, setting
from embodyrl.methods.velocities.config import VelocitiesConfig


@dataclass(frozen=True, kw_only=True)
class FPOConfig(VelocitiesConfig):
    """Flow policy optimisation, and FPO++."""

    clip_below: float = setting(0.05, above=0.0, below=1.0)
    """Clip range below 1 of the ratios: lower ones have no gradient that would lower them further."""
    clip_above: float = setting(0.05, above=0.0)
    """Clip range above 1."""
    per_point: bool = setting(True)
    """Clip the ratio at each point (FPO++). false: one ratio for all points of a chunk (FPO)."""
    asymmetric: bool = setting(False)
    """Pull ratios of chunks with negative advantages back, in place of the clip (ASPO): for policies that begin from
    scratch, which would else lose their entropy. Its authors found it harmful in fine-tuning."""

    def common(self, config: Config) -> Sequence[str]:
        """See `AlgorithmConfig`."""
        return (*super().common(config), "algorithm.points", "algorithm.clip_below", "algorithm.clip_above")
