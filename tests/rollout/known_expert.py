"""An expert that sees more than the policy, and remembers how often it was asked in an episode."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import EnvConfig
from embodyrl.envs import EpisodeSpec, Observation


class CountingExpert:
    """Its action is the number of times that it was asked, and the last number of the state, which no policy sees."""

    def __init__(self, env: EnvConfig) -> None:
        self.env = env
        self.asked: dict[int, int] = {}
        self.begun: list[tuple[int, EpisodeSpec]] = []

    def begin(self, slot: int, episode: EpisodeSpec) -> None:
        self.asked[slot] = 0
        self.begun.append((slot, episode))

    def act(self, slots: NDArray[np.int64], observation: Observation) -> NDArray[np.float32]:
        assert observation.proprio is not None
        numbers = []
        for slot, state in zip(slots.tolist(), observation.proprio, strict=True):
            self.asked[slot] += 1
            numbers.append([state[-1] / 8.0, self.asked[slot] / 100.0])
        return np.array(numbers, np.float32)[:, ::-1]

    def recorded(self, observation: Observation) -> Observation:
        assert observation.proprio is not None
        return dataclasses.replace(observation, proprio=observation.proprio[:, :-1])

    def memory(self, slot: int) -> str:
        return str(self.asked[slot])

    def remember(self, slot: int, memory: str) -> None:
        self.asked[slot] = int(memory)
