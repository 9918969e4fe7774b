"""A policy that demonstrates."""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import EnvConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import EpisodeSpec, Observation


class PolicyDemonstrator:
    """Lets a policy decide; its chunks are carried out one action at a time.

    Args:
        env: the simulator's config.
        engine: the policy.
        mode: `eval` takes the most likely actions, `train` draws them.
    """

    def __init__(self, env: EnvConfig, engine: HybridEngine, mode: Literal["train", "eval"]) -> None:
        self.env = env
        self._engine = engine
        self._mode = mode
        self._left: dict[int, deque[NDArray[np.float32]]] = {}
        """Actions of each slot's chunk that are still to be executed."""

    def begin(self, slot: int, episode: EpisodeSpec) -> None:
        """See `Demonstrator`."""
        self._left[slot] = deque()

    def act(self, slots: NDArray[np.int64], observation: Observation) -> NDArray[np.float32]:
        """See `Demonstrator`."""
        rows = np.flatnonzero([not self._left[slot] for slot in slots.tolist()])
        if len(rows):
            chunks = self._engine.act(observation.take(rows), self._mode).actions.cpu().numpy()
            for row, chunk in zip(rows.tolist(), chunks, strict=True):
                self._left[int(slots[row])].extend(chunk)
        return np.stack([self._left[slot].popleft() for slot in slots.tolist()])

    def recorded(self, observation: Observation) -> Observation:
        """See `Demonstrator`."""
        return observation
