"""Settings of negative-aware fine-tuning. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from embodyrl.config.schema import Config, setting
from embodyrl.methods.velocities.config import VelocitiesConfig


class Contrast(StrEnum):
    """How the implicit policies are compared."""

    errors = "errors"
    ranking = "ranking"


@dataclass(frozen=True, kw_only=True)
class NFTConfig(VelocitiesConfig):
    """Negative-aware fine-tuning of a flow policy."""

    strength: float = setting(1.0, above=0.0)
    """How far the implicit positive and negative policies are from the one that an update starts from, in units of what
    was learned since (beta)."""
    largest_advantage: float = setting(1.0, above=0.0)
    """Advantage from which on a chunk counts as good, and below minus that as bad (Z_c, adv_clip_max)."""
    contrast: Contrast = setting(Contrast.errors)
    """errors: good chunks are fitted by the positive policy, bad ones by the negative one (DiffusionNFT). ranking: the
    one's errors are to be less than the other's, as pi-StepNFT ranks steps of stochastic denoising."""
    ranking_scale: float = setting(1.0, above=0.0)
    """Scale of the differences that are ranked."""
    adaptive: bool = setting(True)
    """Divide errors by their mean size, so that points near the chunk and near noise weigh alike."""

    def common(self, config: Config) -> Sequence[str]:
        """See `AlgorithmConfig`."""
        return (*super().common(config), "algorithm.points", "algorithm.strength", "algorithm.largest_advantage")
