"""Statistics that scale observations: of the policy, and of what critics see with.

Shapes: `M` decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodyrl.engine.hybrid import HybridEngine
from embodyrl.methods.replay.critic_encoder import CriticEncoder
from embodyrl.models.normalizer import RunningNormalizer
from embodyrl.models.policy import Policy, SoftPolicy
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.replay import Replay

if TYPE_CHECKING:
    from embodyrl.data.transitions import Transitions
    from embodyrl.pipelines.pipeline import Iteration

MOST_CLIPPED = 0.05
"""Share of clipped numbers in a rollout above which there is a warning."""


class Statistics:
    """Means and deviations of what has been seen, over all ranks.

    They continue as long as rollouts do, as those of on-policy methods: what begins with random actions later sees what
    lies ten deviations away from all of it, where numbers are clipped and can no longer be distinguished.

    Args:
        engine: knows ranks and device.
        observers: those that may scale what they see.
    """

    def __init__(self, engine: HybridEngine, observers: Sequence[Policy | CriticEncoder]) -> None:
        self._ranks, self._device = engine.ranks, engine.device
        there = [each for each in observers if isinstance(each, SoftPolicy | CriticEncoder)]
        self.observers: dict[SoftPolicy | CriticEncoder, RunningNormalizer] = {
            each: each.scaling for each in there if each.scaling is not None
        }
        """Those that do, and what scales it."""

    def add(self, seen: Tensor, of: SoftPolicy | CriticEncoder) -> float:
        """Add what has been seen to the statistics of one of `observers`.

        Args:
            seen: the column `scaled` of this rank's observations, `[M, ...]`.
            of: whose.

        Returns:
            The share of its numbers that were clipped by the statistics before; 0 if there were none.
        """
        scaling = self.observers[of]
        everyone = torch.cat(self._ranks.gather_rows(seen)).to(self._device)
        if not len(everyone):  # a rollout whose simulators all died; a mean of nothing would be NaN
            return 0.0
        clipped = float(scaling.clipped(everyone)) if scaling.count else 0.0
        of.update_statistics({of.scaled: everyone})
        return clipped

    def begin(self, replay: Replay | None, transitions: Transitions | None) -> None:
        """Begin with all that has been seen, and shown, where there are none yet: from a checkpoint, or from imitation
        that came first."""
        for one, scaling in self.observers.items():
            seen = None if replay is None else replay.seen(one.scaled)
            shown = None if transitions is None else getattr(transitions, one.scaled)
            parts = [] if seen is None else [seen]
            if shown is not None and (seen is not None or replay is None):
                # All ranks have the same demonstrations, which count once.
                parts.append(torch.from_numpy(shown if self._ranks.is_first else shown[:0]))
            if parts and not scaling.count:
                self.add(torch.cat(parts), one)

    def go_on(self, batch: TrajectoryBatch, replay: Replay, iteration: Iteration) -> None:
        """Add a rollout's observations, once there are any statistics; warn of what the policy cannot see."""
        shares = []
        for one, scaling in self.observers.items():
            seen = replay.own_of(batch, one.scaled)
            if seen is not None and scaling.count:
                shares.append(self.add(seen, one))
        if not shares:
            return
        iteration.metrics["train/clipped_features"] = max(shares)
        if max(shares) > MOST_CLIPPED:
            iteration.warn(
                "features_clipped",
                f"{max(shares):.0%} of the numbers that the policy sees of the newest rollout lie more than ten "
                "standard deviations from what was seen before, where it cannot distinguish them. The statistics "
                "continue with every rollout; if train/clipped_features stays high, collect more at random first "
                "(raise algorithm.off_policy.replay.start_after), or set model.normalize_observations=false if the "
                "model has it",
            )
