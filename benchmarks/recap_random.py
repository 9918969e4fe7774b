"""RECAP whose judgements are drawn at random, as a plug-in: what a comparison shows that the value model adds."""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.engine.minibatch import Columns
from embodyrl.methods.recap.learner import AdvantageConditioned
from embodyrl.registry import ALGORITHMS


class RandomlyJudged(AdvantageConditioned):
    """Takes random numbers for advantages: the same ones for a decision whenever it is judged."""

    def advantages(self, columns: Columns) -> Tensor:
        """See `AdvantageConditioned`."""
        # Actions are as good as random beyond their leading digits.
        numbers = columns["actions"].double().flatten(1).sum(1) * 1e6
        return torch.frac(numbers.abs()).float()


ALGORITHMS.register(
    "recap_random",
    target="embodyrl.methods.recap.iteration:recap",
    options="embodyrl.methods.recap.config:RecapConfig",
    learner=RandomlyJudged,
    demonstrations=None,
    summary="RECAP with random judgements",
)
