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
CONTINUED = (
    "The statistics continue with every rollout; if train/clipped_features stays high, collect more at random first "
    "(raise algorithm.off_policy.replay.start_after)"
)
"""What to do where statistics continue."""
KEPT = (
    "The statistics stay those of the demonstrations that the policy learned from first: record more of them, or from "
    "more varied starts (embodyrl collect --pushes N)"
)
"""What to do where they stay."""


class Statistics:
    """Means and deviations of what has been seen, over all ranks.

    They continue as long as rollouts do, as those of on-policy methods: what begins with random actions later sees what
    lies ten deviations away from all of it, where numbers are clipped and can no longer be distinguished. But a policy
    that learns from demonstrations first keeps those of the demonstrations: where the place of an object hardly varies
    there and does in rollouts, other statistics would make another policy of it.

    Args:
        engine: knows ranks and device.
        observers: those that may scale what they see.
    """

    def __init__(self, engine: HybridEngine, observers: Sequence[Policy | CriticEncoder]) -> None:
        self._engine, self._ranks, self._device = engine, engine.ranks, engine.device
        there = [each for each in observers if isinstance(each, SoftPolicy | CriticEncoder)]
        self.observers: dict[SoftPolicy | CriticEncoder, RunningNormalizer] = {
            each: each.scaling for each in there if each.scaling is not None
        }
        """Those that do, and what scales it."""

    def clipped(self, seen: Tensor, of: SoftPolicy | CriticEncoder) -> float:
        """Return the share of what has been seen that one of `observers` clips; 0 without statistics.

        Args:
            seen: the column `scaled` of this rank's observations, `[M, ...]`.
            of: whose.
        """
        return self._clipped(self._everyone(seen), of)

    def add(self, seen: Tensor, of: SoftPolicy | CriticEncoder) -> float:
        """Add what has been seen to the statistics of one of `observers`; returns the share that was `clipped` by those
        before."""
        everyone = self._everyone(seen)
        clipped = self._clipped(everyone, of)
        if len(everyone):
            of.update_statistics({of.scaled: everyone})
            self._engine.note_change()
        return clipped

    def _everyone(self, seen: Tensor) -> Tensor:
        """Return what all ranks have seen."""
        return torch.cat(self._ranks.gather_rows(seen)).to(self._device)

    def _clipped(self, everyone: Tensor, of: SoftPolicy | CriticEncoder) -> float:
        scaling = self.observers[of]
        if not scaling.count or not len(everyone):  # all simulators may have died, and a mean of nothing would be NaN
            return 0.0
        return float(scaling.clipped(everyone))

    def begin(self, replay: Replay | None, transitions: Transitions | None, *, policy_keeps: bool) -> None:
        """Begin with all that has been seen, and shown, where there are none yet: from a checkpoint, or from imitation
        that came first.

        Args:
            replay: what has been seen.
            transitions: what has been shown.
            policy_keeps: the policy learns before it sees a rollout, and keeps these statistics.
        """
        for one, scaling in self.observers.items():
            if policy_keeps and isinstance(one, SoftPolicy) and not scaling.count:
                scaling.begin_demonstrations()
            seen = None if replay is None else replay.seen(one.scaled)
            shown = None if transitions is None else getattr(transitions, one.scaled)
            parts = [] if seen is None else [seen]
            if shown is not None and (seen is not None or replay is None):
                # All ranks have the same demonstrations, which count once.
                parts.append(torch.from_numpy(shown if self._ranks.is_first else shown[:0]))
            if parts and not scaling.count:
                self.add(torch.cat(parts), one)

    def go_on(self, batch: TrajectoryBatch, replay: Replay, iteration: Iteration) -> None:
        """Add a rollout's observations, once there are any statistics, unless these are of demonstrations; warn of what
        the policy cannot see."""
        shares = []
        for one, scaling in self.observers.items():
            seen = replay.own_of(batch, one.scaled)
            if seen is not None and scaling.count:
                shares.append(self.clipped(seen, one) if scaling.of_demonstrations else self.add(seen, one))
        if not shares:
            return
        iteration.metrics["train/clipped_features"] = max(shares)
        if max(shares) > MOST_CLIPPED:
            kept = any(scaling.of_demonstrations for scaling in self.observers.values())
            remedy = KEPT if kept else CONTINUED
            iteration.warn(
                "features_clipped",
                f"{max(shares):.0%} of the numbers that the policy sees of the newest rollout lie more than ten "
                f"standard deviations from what was seen before, where it cannot distinguish them. {remedy}, or set "
                "model.normalize_observations=false if the model has it",
            )
