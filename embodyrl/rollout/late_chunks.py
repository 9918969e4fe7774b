"""Rollouts in which chunks are late (`rollout.delay`), as they are on a robot that does not wait for its policy.

Shapes: `B` slots, `C` actions in a chunk, `E` actions that are executed between two decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.rollout.action_queue import ActionQueue
from embodyrl.rollout.hooks import Decision, Hook

OWN = "own"
"""Column of a rollout, bool `[B, C]`: actions of a chunk that are executed, sooner or later, if the episode lasts."""


class LateChunks(Hook):
    """Executes what is left of the chunk before until a chosen one is there; see `ActionQueue`.

    Args:
        queue: actions to come.
        num_envs: slots.
        chunk_size: `C`.
        executed: `E`.
        delay: control steps.
    """

    state_name = "late_chunks"

    def __init__(self, queue: ActionQueue, *, num_envs: int, chunk_size: int, executed: int, delay: int) -> None:
        self._queue = queue
        self._numbers = np.full(num_envs, -1, np.int64)
        """Episode that each slot's queue is of."""
        steps = np.arange(chunk_size)
        self._first, self._later = steps < executed + delay, (delay <= steps) & (steps < executed + delay)

    def begin(self, slots: NDArray[np.int64]) -> None:
        """See `Hook.begin`."""
        self._numbers[slots] = -1

    def decide(self, decision: Decision) -> dict[str, NDArray[Any]]:
        """Return the `actions` that are executed, and which of the chosen ones will be."""
        slots = decision.slots
        begins = self._numbers[slots] != decision.numbers
        self._queue.begin(slots[begins])
        self._numbers[slots] = decision.numbers
        actions = self._queue.act(slots, decision.actions)
        return {"actions": actions, OWN: np.where(begins[:, None], self._first, self._later)}

    def state(self, numbers: NDArray[np.int64]) -> list[Any]:
        """See `Hook.state`: what is queued in each slot, and whether it is of the episode in progress."""
        queued = {"known": self._numbers == numbers, **self._queue.state_dict()}
        return [{name: array[slot].tolist() for name, array in queued.items()} for slot in range(len(numbers))]

    def restore(self, numbers: NDArray[np.int64], state: Sequence[Any]) -> None:
        """See `Hook.restore`."""
        self._numbers = np.where([each["known"] for each in state], numbers, -1)
        self._queue.load_state_dict({name: [each[name] for each in state] for name in self._queue.state_dict()})
