"""How a server and one client talk to each other, whatever their protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodyrl.rollout.plans import Plans
from embodyrl.seeding import derive_seed
from embodyrl.serving.batching import Batcher
from embodyrl.serving.deciding import Question
from embodyrl.serving.observing import Observer

if TYPE_CHECKING:
    from embodyrl.runner.playing import LoadedPolicy


@dataclass(frozen=True, kw_only=True)
class Served:
    """What all clients share."""

    policy: LoadedPolicy
    observer: Observer
    """Reads observations."""
    batcher: Batcher
    """Answers them."""
    metadata: dict[str, Any]
    """What clients are told of the policy."""
    seed: int | None
    """Of the random streams that actions are drawn from; None: they are the most likely ones."""


class Session(ABC):
    """The talk with one client.

    Args:
        served: see there.
        name: that the client has given itself, a number; its random stream does not depend on who else is there.
    """

    def __init__(self, served: Served, name: int) -> None:
        self.served = served
        self._name = name
        self._plans = Plans.of(served.policy.policy, 1)
        self._noise: torch.Generator | None = None
        self.begin(0)

    def begin(self, episode: int) -> None:
        """Begin an episode, whose random stream follows from seed, client and number."""
        if self.served.seed is not None:
            seed = derive_seed(self.served.seed, "serve", self._name, episode)
            self._noise = torch.Generator(self.served.policy.engine.device).manual_seed(seed)

    async def ask(self, message: Any, *, executed: int | None = None, delay: int = 0) -> NDArray[np.float32]:
        """Return the chunk `[C, D]` for an observation of a message; for the rest see `Question`.

        Raises:
            RequestError: the message has no such observation.
        """
        observation = self.served.observer.read(message)
        question = Question(
            observation=observation, plans=self._plans, executed=executed, delay=delay, noise=self._noise
        )
        return await self.served.batcher.act(question)

    def first(self) -> bytes | None:
        """Return what the server says before it is asked; None: nothing."""
        return None

    @abstractmethod
    async def answer(self, data: bytes) -> bytes | None:
        """Return the answer to a message; None: it wants none.

        Raises:
            MessageError, RequestError: it cannot be answered.
        """

    @abstractmethod
    def refusal(self, error: Exception) -> bytes | str:
        """Return what the client is told of the last message, which cannot be answered."""
