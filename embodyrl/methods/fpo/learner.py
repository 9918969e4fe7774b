"""Flow policy optimisation (FPO, McAllister et al. 2025, arXiv:2507.21053): the clipped surrogate of PPO, whose
probability ratios are estimated by how much better the policy fits a chunk by flow matching. FPO++ (Yi et al. 2026)
clips them point by point. The formulas are in `algorithms.velocities`.
"""

from __future__ import annotations

from torch import Tensor

from embodyrl.algorithms.velocities import flow_log_ratios, trusted_surrogate
from embodyrl.methods.fpo.config import FPOConfig
from embodyrl.methods.velocities.learner import Points, VelocityLearner


class FlowPolicyOptimization(VelocityLearner):
    """Learns by ratios of flow-matching errors.

    Args:
        engine, algorithm, simulator: see `Learner`.
    """

    algorithm: FPOConfig

    def point_losses(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        """See `VelocityLearner`."""
        settings = self.algorithm
        errors, old_errors = points.errors()
        log_ratios = flow_log_ratios(errors, old_errors, per_point=settings.per_point)
        losses = trusted_surrogate(
            log_ratios,
            points.advantages,
            low=settings.clip_below,
            high=settings.clip_above,
            asymmetric=settings.asymmetric,
        )
        ratios = log_ratios.detach().exp()
        beyond = (ratios < 1.0 - settings.clip_below) | (ratios > 1.0 + settings.clip_above)
        return losses, {"clip_fraction": beyond.float().mean(1)}
