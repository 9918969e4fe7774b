"""Soft actor-critic beside demonstrations: imitation first, demonstrations in every minibatch, and what keeps a policy
near them, and near the policy that imitation alone gave. The formulas are in `algorithms.off_policy`.

Shapes: `M` decisions of a minibatch, or those of them that this rank has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodyrl.algorithms.off_policy import imitation_losses
from embodyrl.config.schema import AlgorithmConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.optimizer import Optimizer
from embodyrl.envs import SimulatorSpec
from embodyrl.methods.imitation.first import CLONING, FirstImitation
from embodyrl.methods.imitation.imitation import Imitation
from embodyrl.methods.learner import Baseline
from embodyrl.methods.replay.learner import EncodedMinibatch
from embodyrl.methods.rlpd.config import RLPDConfig
from embodyrl.methods.sac.learner import SoftActorCritic
from embodyrl.models.policy import SoftPolicy
from embodyrl.rollout.replay import DemonstrationSampler, Minibatch, Replay

if TYPE_CHECKING:
    from embodyrl.data.batches import Demonstrations
    from embodyrl.data.transitions import Transitions


class DemonstratedActorCritic(SoftActorCritic):
    """Soft actor-critic whose policy imitates the demonstrated decisions of a minibatch, too.

    Args:
        engine, algorithm, simulator: see `SoftActorCritic`.
    """

    algorithm: RLPDConfig

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        self._imitation, self._critics_first = (
            self.algorithm.off_policy.imitation,
            self.algorithm.off_policy.critics_first,
        )
        self.cloned: SoftPolicy | None = None
        """The policy that imitation alone gave, if the one that learns shall stay near it."""
        own = None  # an encoder that critics step has no place in the policy's optimiser, and imitation learns it, too
        if self._imitation.first_steps and self.policy.encoder_parameters():
            own = Optimizer(self.policy.parameters(), engine.config.optimizer, engine.iterations)
        self.imitation = Imitation(engine, own)
        """Learns from demonstrations: all of the policy, its encoder included."""

    @property
    def learns_before_rollouts(self) -> bool:
        """See `ReplayLearner`."""
        return self._imitation.first_steps > 0

    @property
    def baseline(self) -> Baseline | None:
        """See `Learner`."""
        return CLONING if self._imitation.first_steps else None

    def prepare(
        self,
        demonstrations: Demonstrations | None,
        transitions: Transitions | None,
        done: int,
        message: Callable[[str], None],
    ) -> Iterator[int]:
        """See `Learner`: imitate the demonstrations."""
        settings = self._imitation
        if done >= settings.first_steps:
            return
        assert demonstrations is not None, "the config rules ask for it"
        if not done:
            self.statistics.begin(None, transitions, policy_keeps=True)
        first = FirstImitation(self.imitation, demonstrations, settings.first_steps, message)
        if not done:
            yield from first.measure(settings.held_out)
        yield from first.steps(done)
        self.keep_cloned()

    def keep_cloned(self) -> None:
        """Keep the policy as it is now, from which the one that learns shall not go far."""
        if self._imitation.cloned_coef:
            self.cloned = copy.deepcopy(self.policy).requires_grad_(False)

    def sampler(self, replay: Replay, transitions: Transitions | None) -> DemonstrationSampler | None:
        """See `ReplayLearner`."""
        share = self.algorithm.off_policy.demonstrations
        assert transitions is not None, "the config rules ask for it"
        return DemonstrationSampler(demonstrations=transitions, share=share, interventions_join=True)

    def _is_actors_turn(self) -> bool:
        """See `SoftActorCritic`; the critics may learn alone at first."""
        return self.made > self._critics_first and super()._is_actors_turn()

    def extra_losses(self, minibatch: Minibatch, seen: EncodedMinibatch) -> dict[str, Tensor]:
        """Return the weighted losses of imitation, and of the distance from the cloned policy."""
        found = {}
        if self._imitation.coef and seen.labels is not None:
            found["imitation_loss"] = self._imitation.coef * self._imitated(minibatch, seen)
        if self.cloned is not None:
            found["cloned_distance"] = self._imitation.cloned_coef * self._distance(seen)
        return found

    def _imitated(self, minibatch: Minibatch, seen: EncodedMinibatch) -> Tensor:
        """Return the imitation losses `[M]` of the demonstrated decisions."""
        assert seen.labels is not None and seen.labelled is not None, "asked before"
        chosen = seen.labelled
        if self._imitation.better_only:
            with torch.no_grad():
                wanted = self.critics.of_actions(seen.features, self.policy.to_unit(seen.labels)).amin(0)
                own = self.critics.of_actions(seen.features, self.policy.mode(seen.features)).amin(0)
                chosen = chosen & (wanted > own)
        errors = self.policy.errors(seen.features, seen.labels)
        return imitation_losses(errors, chosen, self.ranks.sum(chosen.sum()), minibatch.size)

    def _distance(self, seen: EncodedMinibatch) -> Tensor:
        """Return the mean squared distances `[M]` of the most likely chunks from those of the cloned policy, in units
        of half the action range. That one has an encoder of its own, as it was then."""
        assert self.cloned is not None, "asked before"
        with torch.no_grad():
            wanted = self.cloned.mode(self.features(seen.columns, of=self.cloned))
        return (self.policy.mode(seen.features) - wanted).square().mean(-1)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """See `Learner`; also what has learned from demonstrations, unless the run does other things now."""
        if self.imitation.optimizer is self.engine.optimizer:
            return super().state_dict()
        imitator = {} if self.engine.version else self.imitation.optimizer.state_dict()
        return super().state_dict() | {"imitator": imitator}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        if state.get("imitator"):
            self.imitation.optimizer.load_state_dict(state["imitator"])

    def own_state(self) -> dict[str, Any]:
        """See `SoftActorCritic`; also the cloned policy."""
        return super().own_state() | {"cloned": {} if self.cloned is None else dict(self.cloned.state_dict())}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `own_state`."""
        super().load_own_state(state)
        if state["cloned"]:
            self.keep_cloned()
            assert self.cloned is not None, "the settings are those of the run"
            self.cloned.load_state_dict(state["cloned"])
