"""Learning from the velocities of a flow policy at points between the chunks of its newest rollout and noise, beside
those of the policy that the update starts from.

Shapes: `M` chunks of a minibatch, `T` points for each, `N` executed numbers of a chunk.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodyrl.algorithms.velocities import matching_errors
from embodyrl.config.schema import AlgorithmConfig
from embodyrl.engine.minibatch import Columns, Drawn, length
from embodyrl.engine.update_metrics import Total
from embodyrl.methods.on_policy.learner import NewestLearner
from embodyrl.methods.on_policy.scoring import numbered
from embodyrl.methods.velocities.config import VelocitiesConfig
from embodyrl.models.flow.policy import FlowPolicy, Matched
from embodyrl.models.policy import ActOutput, Inputs, Policy


@dataclass(frozen=True, kw_only=True)
class Points:
    """What is compared of the chunks of a minibatch."""

    velocities: Tensor
    """`[M, T, N]`, of the policy."""
    old_velocities: Tensor
    """The same of the policy that the update starts from, without a gradient."""
    wanted: Tensor
    """`[M, T, N]`, noise minus chunk."""
    shares: Tensor
    """`[M, T]`, share of noise in each point."""
    executed: Tensor
    """bool `[M, N]`, the numbers that were executed."""
    advantages: Tensor
    """`[M]`"""

    def errors(self) -> tuple[Tensor, Tensor]:
        """Return the errors `[M, T]` of flow matching, and those of the policy that the update starts from."""
        every = (self.velocities, self.old_velocities)
        now, before = (matching_errors(velocities, self.wanted, self.executed) for velocities in every)
        return now, before


class VelocityLearner(NewestLearner):
    """Learns from velocities. A subclass adds what it compares, `point_losses`.

    Args:
        engine, algorithm, simulator: see `Learner`.
    """

    policy: FlowPolicy
    algorithm: VelocitiesConfig

    @classmethod
    def trial_loss(
        cls,
        algorithm: AlgorithmConfig,
        policy: Policy,
        beside: nn.Module | None,
        inputs: Inputs,
        decision: ActOutput,
    ) -> Tensor:
        """See `Learner`."""
        assert isinstance(algorithm, VelocitiesConfig) and isinstance(policy, FlowPolicy), "the config rules ask for it"
        chunks = decision.trace["chunk"]
        time = chunks.new_full((len(chunks), algorithm.points), 0.5)
        noise = torch.zeros_like(chunks)[:, None].expand(-1, algorithm.points, -1, -1)
        return policy.match(inputs, decision.trace, {"time": time, "noise": noise}).velocities.square().sum()

    @abstractmethod
    def point_losses(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses `[M, T]` at points, or `[M, 1]` of all points of a chunk together, and what is logged of
        them, `[M]` each."""

    def begin(self, columns: Columns, task_descriptions: Sequence[str], drawn: Drawn) -> None:
        """See `NewestLearner`: the points of the update, and the velocities there of the policy that it starts from."""
        chunks, count = columns["trace"]["chunk"], self.algorithm.points
        draws = self.policy.imitation_draws(len(chunks) * count, self.engine.streams.imitation)
        columns["draws"] = {name: each.unflatten(0, (len(chunks), count)) for name, each in draws.items()}
        size = columns["executed"].shape[1] * self.policy.spec.action_dim
        old = chunks.new_zeros(length(columns), count, size)
        with torch.no_grad():
            # In the parts of the first epoch, so that velocities are the same there, bit for bit.
            for minibatch, _ in self.minibatches(numbered(columns), drawn):
                for part, counts in self.engine.micro_batches.of(minibatch, whole=False):
                    said = self._match(part, task_descriptions).velocities
                    if counts:
                        old[part["number"]] = said
        # Every rank has filled the rows of its own parts and left 0 in the others.
        columns["old_velocities"] = self.ranks.sum(old)

    def _match(self, part: Columns, task_descriptions: Sequence[str]) -> Matched:
        inputs = self._inputs(part, task_descriptions)
        with self.engine.computing:
            found = self.policy.match(inputs, part["trace"], part["draws"])
        return Matched(velocities=found.velocities.float(), wanted=found.wanted.float(), shares=found.shares)

    def _loss(self, part: Columns, task_descriptions: Sequence[str], share: float, decisions: int) -> Total:
        """Compute the mean of the losses at the points of each chunk; see `NewestLearner`."""
        matched = self._match(part, task_descriptions)
        numbers = matched.velocities.shape[-1] // part["executed"].shape[1]
        points = Points(
            velocities=matched.velocities,
            old_velocities=part["old_velocities"],
            wanted=matched.wanted,
            shares=matched.shares,
            executed=part["executed"].repeat_interleave(numbers, 1),
            advantages=part["advantages"],
        )
        losses, logged = self.point_losses(points)
        of_chunks = losses.mean(1)
        now, before = (each.detach().mean(1) for each in points.errors())
        return Total(
            loss=(part["weights"] * of_chunks).sum() / share,
            # The surrogate of FPO, for all of them: how much better the policy fits what was executed.
            log_ratio=before - now,
            entries=logged | {"policy_loss": of_chunks.detach(), "flow_error": now},
            valid=part["valid"],
            version=part["version"],
        )
