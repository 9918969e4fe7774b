"""Schedules: the order in which the collector waits for slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import RolloutConfig, Schedule
from embodyrl.envs.manager import EnvManager, StepResult


class Scheduler(Protocol):
    """Notes which slots were sent chunks, and receives them in an order of its own."""

    groups: Sequence[NDArray[np.int64]]
    """All slots, in the groups in which the first chunks of a rollout are chosen."""

    def sent(self, slots: NDArray[np.int64]) -> None:
        """Note that chunks were sent to these slots."""
        ...

    def receive(self) -> tuple[NDArray[np.int64], StepResult] | None:
        """Wait for the next slots; returns them and the results of their chunks, or None if no chunk is under way."""
        ...


def make_scheduler(manager: EnvManager, config: RolloutConfig) -> Scheduler:
    """Return the scheduler for `rollout.schedule`."""
    slots = np.arange(manager.num_envs)
    if config.schedule is Schedule.ready_batch:
        # Fewer ready slots mean less waiting but smaller batches for the policy; a quarter is a compromise.
        auto = config.ready_slots == "auto"
        return ReadyFirst(manager, max(1, manager.num_envs // 4) if auto else int(config.ready_slots))
    halves = 2 if config.schedule is Schedule.pipeline else 1
    return InTurn(manager, np.array_split(slots, min(halves, manager.num_envs)))


class InTurn:
    """Receives slots in the groups in which they were sent, the oldest first.

    One group is lockstep. With two, one group simulates while the policy computes for the other.
    """

    def __init__(self, manager: EnvManager, groups: Sequence[NDArray[np.int64]]) -> None:
        self.groups: Sequence[NDArray[np.int64]] = groups
        self._manager = manager
        self._under_way: deque[NDArray[np.int64]] = deque()

    def sent(self, slots: NDArray[np.int64]) -> None:
        """Chunks were sent to these slots."""
        self._under_way.append(slots)

    def receive(self) -> tuple[NDArray[np.int64], StepResult] | None:
        """Wait for the group that was sent first."""
        if not self._under_way:
            return None
        slots = self._under_way.popleft()
        return slots, self._manager.receive(slots)


class ReadyFirst:
    """Receives slots as soon as `at_least` of them are ready, or as many as are left."""

    def __init__(self, manager: EnvManager, at_least: int) -> None:
        self.groups: Sequence[NDArray[np.int64]] = [np.arange(manager.num_envs)]
        self._manager = manager
        self._at_least = at_least
        self._under_way = 0

    def sent(self, slots: NDArray[np.int64]) -> None:
        """Chunks were sent to these slots."""
        self._under_way += len(slots)

    def receive(self) -> tuple[NDArray[np.int64], StepResult] | None:
        """Wait for enough slots, whichever they are."""
        if not self._under_way:
            return None
        slots, result = self._manager.receive_ready(min(self._at_least, self._under_way))
        self._under_way -= len(slots)
        return slots, result
