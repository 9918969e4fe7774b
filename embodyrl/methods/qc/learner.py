"""Q-chunking: critics of whole chunks, and a flow policy that imitates demonstrations and replay alike. Of several
chunks that it samples the critics choose one, in rollouts and evaluations as in targets (Li et al. 2025, "Reinforcement
Learning with Action Chunking", arXiv:2507.07969). The formulas are in `algorithms.off_policy` and `models.mlp.flow`.

A chunk is executed as a whole, so its return over all of its actions needs no correction: the backup of n steps is that
of a decision.

Shapes: `M` decisions of a minibatch, or those of them that this rank has; `N` numbers of a chunk of actions, `C`
actions; `n` candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodyrl.algorithms.off_policy import critic_losses, implicit_targets
from embodyrl.config.schema import AlgorithmConfig, CriticUse
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.update_metrics import Metrics
from embodyrl.envs import SimulatorSpec
from embodyrl.methods.qc.config import FlowAlgorithmConfig, QCConfig
from embodyrl.methods.replay.learner import CriticLearner, EncodedMinibatch, restore_stream
from embodyrl.models.critics.config import CandidatesConfig
from embodyrl.models.critics.network import Critics
from embodyrl.models.mlp.flow import FlowActorCritic
from embodyrl.models.policy import Policy
from embodyrl.rollout.replay import DemonstrationSampler, Minibatch, Replay
from embodyrl.seeding import derive_seed

if TYPE_CHECKING:
    from embodyrl.data.transitions import Transitions


class FlowLearner(CriticLearner):
    """Critics of whole chunks, and a flow policy that imitates all chunks that were executed. A subclass says which
    chunk follows a decision, and what else the policy learns.

    Args:
        engine, algorithm, simulator: see `CriticLearner`.
    """

    policy: FlowActorCritic
    algorithm: FlowAlgorithmConfig

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        self.noise = torch.Generator(self.device).manual_seed(derive_seed(engine.seed, "improve"))
        """What is drawn in learning."""

    @property
    def learns_before_rollouts(self) -> bool:
        """See `ReplayLearner`."""
        return self.algorithm.off_policy.offline_iterations > 0

    def sampler(self, replay: Replay, transitions: Transitions | None) -> DemonstrationSampler | None:
        """See `ReplayLearner`."""
        assert transitions is not None, "the config rules ask for it"
        share = self.algorithm.off_policy.demonstrations
        return DemonstrationSampler(demonstrations=transitions, share=share, interventions_join=True)

    def following(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Tensor:
        """Return the chunks `[M, N]` that the policy would execute next."""
        raise NotImplementedError

    def policy_losses(self, minibatch: Minibatch, seen: EncodedMinibatch) -> dict[str, Tensor]:
        """Return the losses `[M]` of the policy, each by the name of its metric."""
        shares = torch.rand(minibatch.size, generator=self.noise, device=self.noise.device)
        own = shares[minibatch.places.to(shares.device)]
        noise, weights = self.normal(minibatch), self._executed(seen)
        return {"flow_loss": self.policy.flow_losses(seen.features, seen.actions, noise, own, weights)}

    def _learn(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Metrics:
        """Make a step of the critics, and one of the policy."""
        metrics = self._learn_critics(minibatch, seen)
        self.made += 1
        losses = self.policy_losses(minibatch, seen)
        if self._step(self.optimizers["actor"], sum(losses.values(), torch.zeros(())), minibatch) is None:
            return metrics
        return metrics | {name: each.detach().sum() / minibatch.size for name, each in losses.items()}

    def _learn_critics(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Metrics:
        """Step the critics towards R + Gam Q'(s', a'), where a' is the chunk that follows."""
        with torch.no_grad():
            values = self.targets(seen.following, self.following(minibatch, seen), self._subset())
            targets = implicit_targets(seen.returns, seen.factors, values.amin(0))
        values = self.critics(seen.encoded, seen.actions)
        loss = self._step(self.optimizers["critic"], critic_losses(values, targets), minibatch)
        return {} if loss is None else {"critic_loss": loss} | self._value_metrics(values.detach(), seen, minibatch)

    def normal(self, minibatch: Minibatch, *candidates: int) -> Tensor:
        """Draw noise `[M, (n,) N]`. It is drawn for the whole minibatch, of which each rank takes that of its own
        decisions: with any number of ranks a decision meets the same noise."""
        shape = (minibatch.size, *candidates, self.size)
        drawn = torch.randn(shape, generator=self.noise, device=self.noise.device)
        return drawn[minibatch.places.to(drawn.device)]

    def _executed(self, seen: EncodedMinibatch) -> Tensor:
        """Return 1 for actions that were executed, 0 for those after the end of an episode, `[M, C]`."""
        steps = seen.columns["steps"]
        executed: Tensor = torch.arange(self.policy.spec.chunk_size, device=steps.device) < steps[:, None]
        return executed.float()

    # ---- checkpoints

    def own_state(self) -> dict[str, Any]:
        """See `CriticLearner`; also the stream of noise."""
        return super().own_state() | {"noise": self.noise.get_state()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `own_state`."""
        super().load_own_state(state)
        restore_stream(self.noise, state["noise"])


class QChunking(FlowLearner):
    """Q-chunking: the policy executes the best of several chunks.

    Args:
        engine, algorithm, simulator: see `CriticLearner`.
    """

    algorithm: QCConfig

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        # The policy chooses by the very critics that learn here, and is saved with them.
        self.policy.choose_by(self.critics, candidates_of(self.algorithm))

    @classmethod
    def equip(cls, policy: Policy, algorithm: AlgorithmConfig) -> None:
        """See `Learner`: critics to choose by."""
        assert isinstance(policy, FlowActorCritic) and isinstance(algorithm, QCConfig), "the config rules ask for it"
        sizes, inputs = candidates_of(algorithm), policy.feature_dim + policy.decision_size
        policy.choose_by(Critics(inputs, sizes, torch.Generator()).requires_grad_(False), sizes)

    def following(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Tensor:
        """See `FlowLearner`: the best of several."""
        noise = self.normal(minibatch, self.algorithm.off_policy.candidates)
        return self.policy.chosen(seen.following, noise)[0]


def candidates_of(algorithm: QCConfig) -> CandidatesConfig:
    """Return how the policy chooses, as it is described in a saved one."""
    settings = algorithm.off_policy
    return CandidatesConfig(
        candidates=settings.candidates,
        mean=settings.critics.actor_uses is CriticUse.mean,
        count=settings.critics.count,
        hidden_sizes=settings.critics.hidden_sizes,
        layer_norm=settings.critics.layer_norm,
    )
