"""Which processes serve the slots of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embodyrl.placement.launcher import Worker

Slots = Sequence[int] | NDArray[np.int64]
"""Numbers of slots, each once, in any order; results come in the same order."""

_MAX_KNOWN = 4096


class Share(NamedTuple):
    """The part of a call that one process serves."""

    worker: Worker
    slots: list[int]
    """Ascending, as the run numbers them."""
    local: tuple[int, ...]
    """The same slots as the process numbers them."""
    arguments: tuple[int, ...]
    """How the process is told by a message: all of its slots are not spelt out."""
    mask: NDArray[np.bool_]
    """How it is told by the doorbell: for each slot of the process, whether it is meant."""


@dataclass(frozen=True)
class Selection:
    """The slots of a call."""

    index: NDArray[np.int64]
    """As they were named, `[B]`."""
    numbers: list[int]
    """The same as a list."""
    shares: list[Share]
    """By rank."""
    run: slice | None
    """The same as a slice, if they are consecutive and ascending."""


class Selections:
    """Looks slots up. Calls repeat themselves, so what was found once is kept.

    Args:
        workers: the processes, by rank; each serves as many slots as the others.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)
        self._share = len(workers[0].spec.slots)
        self._known: dict[bytes, Selection] = {}

    def worker_of(self, slot: int) -> Worker:
        """The process that serves a slot."""
        return self._workers[slot // self._share]

    def find(self, slots: Slots) -> Selection:
        """The selection of these slots.

        Raises:
            ValueError: there are none, or one is named twice or does not exist.
        """
        index = np.asarray(slots, np.int64)
        if index.ndim != 1:
            raise ValueError(f"slots must be a list of different slots, got {list(slots)}")
        key = index.tobytes()
        selection = self._known.get(key)
        if selection is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            selection = self._known[key] = self._checked(index.copy())
        return selection

    def _checked(self, index: NDArray[np.int64]) -> Selection:
        numbers = index.tolist()
        count = self._share * len(self._workers)
        if not numbers or len(set(numbers)) != len(numbers):
            raise ValueError(f"slots must be a list of different slots, got {numbers}")
        if min(numbers) < 0 or max(numbers) >= count:
            raise ValueError(f"slots must be within 0..{count - 1}, got {numbers}")
        by_rank: dict[int, list[int]] = {}
        for slot in sorted(numbers):
            by_rank.setdefault(slot // self._share, []).append(slot)
        shares = []
        for rank, slots in by_rank.items():
            local = tuple(slot % self._share for slot in slots)
            mask = np.isin(np.arange(self._share), local)
            shares.append(Share(self._workers[rank], slots, local, () if len(local) == self._share else local, mask))
        first, end = numbers[0], numbers[0] + len(numbers)
        return Selection(index, numbers, shares, slice(first, end) if numbers == list(range(first, end)) else None)
