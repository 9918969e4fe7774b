"""Time measurement of a run: every second belongs to one phase."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Phase(StrEnum):
    """Work of the main process, or what it waits for."""

    simulate = "simulate"
    """Waiting for simulators that compute physics, start or end, and for their results."""
    render = "render"
    """Waiting for simulators that render images."""
    infer = "infer"
    """The policy acts."""
    preprocess = "preprocess"
    """Observations and demonstrations are prepared for the policy."""
    record = "record"
    """Results are written to the batch, and the next episodes are drawn."""
    train = "train"
    """Rewards, advantages, losses, gradients and optimiser steps."""
    sync = "sync"
    """Weights and optimiser state are moved: between ranks, rollout workers, GPU and CPU memory."""
    save = "save"
    """Checkpoints."""
    idle = "idle"
    """Everything else: metrics, messages, waiting for nothing."""


COMPUTING = frozenset({Phase.infer, Phase.preprocess, Phase.train, Phase.sync})
"""Phases that queue work on a GPU, which must be finished before another phase begins."""


class Clock:
    """Adds up the wall-clock seconds of the thread that made it, by phase.

    Each second counts once, for the innermost phase that is being measured; outside of all phases it is idle.
    Measurements of other threads are not counted, since the thread that waits for them counts its waiting.

    A GPU executes its work later than the program queues it. When a computing phase ends inside another one the clock
    does not wait, which would only slow the program down: the outer phase counts the rest. When the outermost of them
    ends, `synchronize` is called first.

    Args:
        synchronize: waits until the GPU is done; None where there is none.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self.synchronize = synchronize
        self.thread = threading.get_ident()
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._details: dict[str, float] = defaultdict(float)
        self._phase = Phase.idle
        self._since = time.perf_counter()

    def measure(self, phase: Phase, *, detail: str | None = None) -> Span:
        """Return a context whose time belongs to `phase`; its seconds are also added to the entry `detail`."""
        return Span(self, phase, detail)

    def pulling(self, phase: Phase, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; the time of producing them belongs to `phase`."""
        iterator, end = iter(items), object()
        while True:
            with self.measure(phase):
                item = next(iterator, end)
            if item is end:
                return
            yield item  # type: ignore[misc]

    def switch(self, phase: Phase) -> Phase:
        """Begin another phase; returns the one before."""
        before = self._phase
        if before in COMPUTING and phase not in COMPUTING and self.synchronize is not None:
            self.synchronize()
        now = time.perf_counter()
        self._seconds[before] += now - self._since
        self._since, self._phase = now, phase
        return before

    def note(self, detail: str, seconds: float) -> None:
        """Add to a detail [s]."""
        self._details[detail] += seconds

    def take(self) -> dict[str, float]:
        """Return the seconds of every phase since the last call, which add up to the time between the calls, and
        details [s]."""
        self.switch(self._phase)
        taken = {str(phase): seconds for phase, seconds in self._seconds.items()} | self._details
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._details.clear()
        return taken


class Span:
    """A block whose time belongs to one phase; see `Clock.measure`."""

    __slots__ = ("_begun", "_clock", "_counts", "_detail", "_outer", "_phase")

    def __init__(self, clock: Clock, phase: Phase, detail: str | None) -> None:
        self._clock, self._phase, self._detail = clock, phase, detail
        self._counts = False

    def __enter__(self) -> None:
        self._counts = threading.get_ident() == self._clock.thread
        if self._counts:
            self._outer = self._clock.switch(self._phase)
            self._begun = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._counts:
            self._clock.switch(self._outer)
            if self._detail is not None:
                self._clock.note(self._detail, time.perf_counter() - self._begun)


def divide_waiting(seconds: Mapping[str, float], rendering: float) -> dict[str, float]:
    """Divide the time of waiting for simulators between physics and rendering; returns seconds by phase.

    Args:
        seconds: of `Clock.take`, all waiting under `simulate`.
        rendering: share of rendering in the simulator processes' working time, 0 .. 1.
    """
    waited = seconds[Phase.simulate]
    return {**seconds, Phase.simulate: waited * (1.0 - rendering), Phase.render: waited * rendering}
