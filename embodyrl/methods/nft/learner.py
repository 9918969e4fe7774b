"""Negative-aware fine-tuning (DiffusionNFT, Zheng et al. 2025, arXiv:2509.16117): good chunks are fitted by a policy
ahead of the one that an update starts from, bad chunks by its mirror image behind that. The formulas are in
`algorithms.velocities`.

Unlike there, the policy that acts is always the newest one, without a moving average.
"""

from __future__ import annotations

from torch import Tensor

from embodyrl.algorithms.velocities import contrast_losses, contrasted_errors, optimality, ranking_losses
from embodyrl.methods.nft.config import Contrast, NFTConfig
from embodyrl.methods.velocities.learner import Points, VelocityLearner


class NegativeAware(VelocityLearner):
    """Learns by implicit positive and negative policies.

    Args:
        engine, algorithm, simulator: see `Learner`.
    """

    algorithm: NFTConfig

    def point_losses(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        """See `VelocityLearner`."""
        settings, limit = self.algorithm, self.algorithm.largest_advantage
        positive, negative = contrasted_errors(
            points.velocities,
            points.old_velocities,
            points.wanted,
            points.shares,
            points.executed,
            strength=settings.strength,
            adaptive=settings.adaptive,
        )
        logged = {"positive_error": positive.detach().mean(1), "negative_error": negative.detach().mean(1)}
        if settings.contrast is Contrast.ranking:
            cut = (points.advantages / limit).clamp(-1.0, 1.0)
            return ranking_losses(positive, negative, cut, scale=settings.ranking_scale), logged
        optimal = optimality(points.advantages, limit)
        # Times the limit, which thus changes from where on chunks are good or bad, not what is learned from others.
        return limit * contrast_losses(positive, negative, optimal, strength=settings.strength), logged
