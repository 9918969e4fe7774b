"""Q-chunking with a policy of one step (Li et al. 2025, arXiv:2507.07969, QC-FQL): a network is distilled from the flow
policy that imitates, and changed towards chunks of a higher value, without a gradient through denoising (Park et al.
2025, "Flow Q-Learning", arXiv:2502.02538). It acts, and targets are for its chunks.

Shapes: `M` decisions of a minibatch, or those of them that this rank has; `N` numbers of a chunk of actions.
"""

from __future__ import annotations

from torch import Tensor

from embodyrl.algorithms.off_policy import agreed_values, one_step_losses
from embodyrl.methods.qc.learner import FlowLearner
from embodyrl.methods.qc_fql.config import QCFQLConfig
from embodyrl.methods.replay.learner import EncodedMinibatch
from embodyrl.rollout.replay import Minibatch


class DistilledQChunking(FlowLearner):
    """Q-chunking whose policy acts in one step.

    Args:
        engine, algorithm, simulator: see `CriticLearner`.
    """

    algorithm: QCFQLConfig

    def following(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Tensor:
        """See `FlowLearner`: that of one step."""
        return self.policy.draw(seen.following, self.normal(minibatch))[0]

    def policy_losses(self, minibatch: Minibatch, seen: EncodedMinibatch) -> dict[str, Tensor]:
        """See `FlowLearner`; also the loss of one step, in all observations of the minibatch."""
        settings, noise = self.algorithm.off_policy, self.normal(minibatch)
        values = self.critics.of_actions(seen.features, self.policy.draw(seen.features, noise)[0])
        agreed = agreed_values(values.detach(), settings.critics.actor_uses)
        size = self.ranks.sum(agreed.abs().sum()) / minibatch.size if settings.normalize_values else None
        losses = one_step_losses(
            values,
            self.policy.distances(seen.features, noise),
            distillation=settings.distillation,
            use=settings.critics.actor_uses,
            size=size,
        )
        return super().policy_losses(minibatch, seen) | {"actor_loss": losses}
