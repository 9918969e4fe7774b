"""How a server and one client talk to each other, whatever their protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from embodyrl.serving.batching import Batcher
from embodyrl.serving.observing import Observer


class Session(ABC):
    """The talk with one client.

    Args:
        observer: reads observations.
        batcher: answers them.
        metadata: what clients are told of the policy.
    """

    def __init__(self, observer: Observer, batcher: Batcher, metadata: dict[str, Any]) -> None:
        self.observer, self.batcher, self.metadata = observer, batcher, metadata

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
