"""Soft actor-critic beside demonstrations: what keeps a policy near what has been demonstrated, and near the policy
that imitation alone gave. The formulas are in `algorithms.off_policy`.

Shapes: `M` decisions of a minibatch, or those of them that this rank has.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embodyrl.algorithms.off_policy import imitation_losses
from embodyrl.algorithms.off_policy_options import RLPDConfig
from embodyrl.engine.soft import Looked, Minibatch, SoftActorCritic
from embodyrl.models.policy import SoftPolicy


class DemonstratedActorCritic(SoftActorCritic):
    """Soft actor-critic whose policy imitates the demonstrated decisions of a minibatch, too.

    Args:
        policy: see `SoftActorCritic`.
        algorithm: also how it imitates.
        others: see `SoftActorCritic`.
    """

    def __init__(self, policy: SoftPolicy, *, algorithm: RLPDConfig, **others: Any) -> None:
        super().__init__(policy, algorithm=algorithm, **others)
        self._imitation, self._critics_first = algorithm.off_policy.imitation, algorithm.off_policy.critics_first
        self.cloned: SoftPolicy | None = None
        """The policy that imitation alone gave, if the one that learns shall stay near it."""

    def after_imitation(self) -> None:
        """Keep the policy as it is now, from which the one that learns shall not go far."""
        if self._imitation.cloned_coef:
            self.cloned = copy.deepcopy(self.policy).requires_grad_(False)

    def _is_actors_turn(self) -> bool:
        """See `SoftActorCritic`; the critics may learn alone at first."""
        return self.made > self._critics_first and super()._is_actors_turn()

    def _besides(self, minibatch: Minibatch, looked: Looked) -> dict[str, Tensor]:
        """Return the weighted losses of imitation, and of the distance from the cloned policy."""
        found = {}
        if self._imitation.coef and looked.labels is not None:
            found["imitation_loss"] = self._imitation.coef * self._imitated(minibatch, looked)
        if self.cloned is not None:
            found["cloned_distance"] = self._imitation.cloned_coef * self._distance(looked)
        return found

    def _imitated(self, minibatch: Minibatch, looked: Looked) -> Tensor:
        """Return the imitation losses `[M]` of the demonstrated decisions."""
        assert looked.labels is not None and looked.labelled is not None, "asked before"
        chosen = looked.labelled
        if self._imitation.better_only:
            with torch.no_grad():
                wanted = self.critics.of_actions(looked.features, self.policy.to_unit(looked.labels)).amin(0)
                own = self.critics.of_actions(looked.features, self.policy.mode(looked.features)).amin(0)
                chosen = chosen & (wanted > own)
        errors = self.policy.errors(looked.features, looked.labels)
        return imitation_losses(errors, chosen, self._ranks.sum(chosen.sum()), minibatch.size)

    def _distance(self, looked: Looked) -> Tensor:
        """Return the mean squared distances `[M]` of the most likely chunks from those of the cloned policy, in units
        of half the action range. That one has an encoder of its own, as it was then."""
        assert self.cloned is not None, "asked before"
        with torch.no_grad():
            wanted = self.cloned.mode(self._features(looked.columns, of=self.cloned))
        return (self.policy.mode(looked.features) - wanted).square().mean(-1)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """See `SoftActorCritic`; also the cloned policy."""
        return super().state_dict() | {"cloned": {} if self.cloned is None else dict(self.cloned.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        if state["cloned"]:
            self.after_imitation()
            assert self.cloned is not None, "the settings are those of the run"
            self.cloned.load_state_dict(state["cloned"])
