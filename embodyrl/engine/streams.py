"""The random streams of an engine: apart from each other, so that what one of them draws changes no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from embodyrl.engine.parallel import Ranks
from embodyrl.seeding import derive_seed


class Streams:
    """Noise in actions and in learning from demonstrations, which every rank draws for itself, and the order of
    minibatches, which is the same on all ranks.

    Args:
        seed: the run's seed.
        device: where noise is drawn.
        ranks: the first one has the streams that a single rank would have.
    """

    def __init__(self, seed: int, device: torch.device, ranks: Ranks) -> None:
        self.actions = torch.Generator(device)
        self.imitation = torch.Generator(device)
        self.shuffling = torch.Generator().manual_seed(derive_seed(seed, "minibatches"))
        self._own = {"actions": self.actions, "imitation": self.imitation}
        self._seed = seed
        self._ranks = ranks
        self._begin(*ranks.seed_indices)

    def _begin(self, *indices: int) -> None:
        for name, generator in self._own.items():
            generator.manual_seed(derive_seed(self._seed, name, *indices))

    def state_dict(self) -> dict[str, Any]:
        """The state of every rank's streams; all ranks must ask."""
        own = {name: self._ranks.gather(generator.get_state()) for name, generator in self._own.items()}
        return own | {"shuffling": self.shuffling.get_state()}

    def load_state_dict(self, state: Mapping[str, Any], version: int) -> None:
        """Continue from `state_dict`. A rank that there was not begins streams of its own.

        Args:
            state: of as many ranks as there were.
            version: updates done.
        """
        self.shuffling.set_state(state["shuffling"])
        if self._ranks.rank >= len(state["actions"]):
            self._begin(self._ranks.rank, version)
            return
        for name, generator in self._own.items():
            generator.set_state(state[name][self._ranks.rank])
