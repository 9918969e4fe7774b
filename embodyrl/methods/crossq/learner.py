"""CrossQ: soft actor-critic whose critics value a decision and what follows it in one batch, normalised together, and
need no slow copies for their targets (Bhatt et al. 2024, arXiv:1902.05605, algorithm 1).

Unlike there, the policy's own layers are not batch-normalised: it acts for single envs, too.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from embodyrl.config.schema import AlgorithmConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import SimulatorSpec
from embodyrl.methods.crossq.config import CrossQConfig
from embodyrl.methods.crossq.critics import NormedCritics
from embodyrl.methods.replay.config import CriticsConfig
from embodyrl.methods.replay.learner import EncodedMinibatch
from embodyrl.methods.sac.learner import SoftActorCritic
from embodyrl.models.critics.network import Critics
from embodyrl.models.errors import PolicyError


class CrossedActorCritic(SoftActorCritic):
    """Soft actor-critic without slow copies.

    Args:
        engine, algorithm, simulator: see `SoftActorCritic`.

    Raises:
        PolicyError: there are several ranks.
    """

    algorithm: CrossQConfig
    slow_copies: ClassVar[bool] = False

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        if engine.ranks.size > 1:  # as many as there are GPUs with `auto`, which no config rule knows
            raise PolicyError(
                f"algorithm {algorithm.name!r} normalises by statistics of whole minibatches, of which each of "
                f"{engine.ranks.size} ranks has a part: set engine.parallel.world_size to 1, or algorithm to sac"
            )
        super().__init__(engine, algorithm, simulator)

    @classmethod
    def critics_for(cls, inputs: int, config: CriticsConfig, generator: torch.Generator) -> Critics:
        """See `CriticLearner`."""
        return NormedCritics(inputs, config, generator)

    def _values(self, seen: EncodedMinibatch, actions: Tensor) -> tuple[Tensor, Tensor]:
        """See `SoftActorCritic`: both in one batch, so that each is normalised by the mean and deviation of both
        (section 3.2)."""
        both = self.critics(torch.cat([seen.encoded, seen.following]), torch.cat([seen.actions, actions]))
        values, following = both.chunk(2, dim=1)
        return values, following.detach()
