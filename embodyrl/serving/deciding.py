"""Decisions for several clients, each of which has an episode of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.envs import Observation
from embodyrl.rollout.plans import Plans

if TYPE_CHECKING:
    from embodyrl.runner.playing import LoadedPolicy

Chunks = NDArray[np.float32]


ONE = np.zeros(1, np.int64)
"""The slot of a client's own queue and plans."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a client asks."""

    observation: Observation
    """Of one row."""
    plans: Plans | None = None
    """The client's, of one slot; None: the policy makes none."""
    executed: int | None = None
    """Control steps since the observation before; None: the chunk does not go on from the one before."""
    delay: int = 0
    """Control steps until the chunk is there."""
    noise: torch.Generator | None = None
    """Random stream that actions are drawn from; None: the most likely ones."""

    def further(self) -> dict[str, Tensor]:
        """Return the inputs of the policy that make the chunk go on from the one before; none if it does not."""
        if self.plans is None or self.executed is None:
            return {}
        return self.plans.inputs(ONE, self.executed, self.delay)


class Decider:
    """Lets a policy answer questions.

    Args:
        policy: acts.
    """

    def __init__(self, policy: LoadedPolicy) -> None:
        self._policy = policy

    def __call__(self, questions: Sequence[Question]) -> Chunks:
        """Return the chunks `[B, C, D]` of `B` questions: the most likely ones together, drawn ones each alone, so that
        what a client draws does not depend on the others."""
        if any(each.noise is not None for each in questions):
            return np.concatenate([self._decided([each]) for each in questions])
        return self._decided(questions)

    def _decided(self, questions: Sequence[Question]) -> Chunks:
        seen = [each.observation for each in questions]
        observation = seen[0] if len(seen) == 1 else Observation.concat(seen)  # which copies
        further = joined([each.further() for each in questions])
        decision = self._policy.decide(observation, noise=questions[0].noise, further=further)
        for row, each in enumerate(questions):
            if each.plans is not None and decision.plan is not None:
                each.plans.keep(ONE, decision.plan[row : row + 1])
        return self._policy.engine.actions_of(decision)


def joined(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return inputs of one row each as those of all; zeros, which do not count, where a row has none."""
    known = next((row for row in rows if row), {})
    return {
        name: torch.cat([row.get(name, like.new_zeros(like.shape)) for row in rows]) for name, like in known.items()
    }
