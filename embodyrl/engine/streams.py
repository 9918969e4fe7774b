"""The random streams of an engine: apart from each other, so that what one of them draws changes no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from embodyrl.engine.parallel import Ranks
from embodyrl.seeding import derive_seed


class Streams:
    """Noise in actions, which every rank draws for itself; and the order of minibatches and the noise in learning from
    demonstrations, which are the same on all ranks.

    Args:
        seed: the run's seed.
        device: where noise is drawn.
        ranks: the first one has the streams that a single rank would have.
    """

    def __init__(self, seed: int, device: torch.device, ranks: Ranks) -> None:
        self.actions = torch.Generator(device)
        self.shuffling = torch.Generator().manual_seed(derive_seed(seed, "minibatches"))
        self.imitation = torch.Generator(device).manual_seed(derive_seed(seed, "imitation"))
        self._seed = seed
        self._ranks = ranks
        self._begin(*ranks.seed_indices)

    def _begin(self, *indices: int) -> None:
        self.actions.manual_seed(derive_seed(self._seed, "actions", *indices))

    def state_dict(self) -> dict[str, Any]:
        """The state of every rank's streams; all ranks must ask."""
        return {
            "actions": self._ranks.gather(self.actions.get_state()),
            "shuffling": self.shuffling.get_state(),
            "imitation": self.imitation.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any], version: int) -> None:
        """Continue from `state_dict`. A rank that there was not begins a stream of its own.

        Args:
            state: of as many ranks as there were.
            version: updates done.
        """
        self.shuffling.set_state(state["shuffling"])
        self.imitation.set_state(state["imitation"])
        rank = self._ranks.rank
        if rank >= len(state["actions"]):
            self._begin(rank, version)
        else:
            self.actions.set_state(state["actions"][rank])
