"""Time measurement of a run: every second belongs to one phase."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

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
"""Phases that queue work on a GPU, which may continue when they have ended."""


class Event(Protocol):
    """A mark in a GPU's queue of work, such as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Put the mark at the end of the queue."""

    def synchronize(self) -> None:
        """Wait until the GPU has reached the mark."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the time from this mark to another one [ms]; the GPU has reached both."""


class Clock:
    """Adds up the wall-clock seconds of the thread that made it, by phase.

    Each second counts once, for the innermost phase that is being measured; outside of all phases it is idle.
    Measurements of other threads are not counted, since the thread that waits for them counts its waiting.

    A GPU executes its work later than the program queues it, and the program waits for it only when it reads a result.
    Where computing phases end (`COMPUTING`), the clock does not wait, which would slow the program down, but records
    when the GPU gets there. `take` then moves the time that the GPU needed longer than the program from the phase that
    followed directly, in which the program waited for the result, to the computing phase that ended. It moves at most
    the time that passed until the next change of phase, so that the phases still add up to the wall clock. When a
    computing phase ends inside another one, the outer phase counts the rest.

    Args:
        make_event: makes marks in the GPU's queue; None where there is none.
    """

    def __init__(self, make_event: Callable[[], Event] | None = None) -> None:
        self.thread = threading.get_ident()
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._details: dict[str, float] = defaultdict(float)
        self._phase = Phase.idle
        self._since = time.perf_counter()
        self._queue = None if make_event is None else _Queue(make_event)

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
        before, now = self._phase, time.perf_counter()
        self._seconds[before] += now - self._since
        if self._queue is not None:
            self._queue.switch(before, phase, now, now - self._since)
        self._since, self._phase = now, phase
        return before

    def note(self, detail: str, seconds: float) -> None:
        """Add to a detail [s]."""
        self._details[detail] += seconds

    def divide(self, phase: Phase, seconds: Mapping[str, float], most: float) -> None:
        """Count seconds of a phase, in which this process waited for another one, as the other's phases.

        Args:
            phase: of the waiting, which is over.
            seconds: of the other process, as it took them from its clock. If it began earlier, they are shortened.
            most: how long this process has waited [s].
        """
        spent = {name: value for name, value in seconds.items() if name != Phase.idle}
        share = min(1.0, most / max(sum(spent[each] for each in Phase if each in spent), 1e-9))
        for name, value in spent.items():
            if name not in Phase.__members__:
                self._details[name] += share * value
            else:
                self._seconds[phase] -= share * value
                self._seconds[Phase(name)] += share * value

    def take(self) -> dict[str, float]:
        """Return the seconds of every phase since the last call, which add up to the time between the calls, and
        details [s]. Waits until the GPU is done with the computing phases that have ended."""
        if self._queue is not None:
            self._queue.wait()
        self.switch(self._phase)
        if self._queue is not None:
            for source, target, seconds in self._queue.take():
                self._seconds[source] -= seconds
                self._seconds[target] += seconds
        taken = {str(phase): seconds for phase, seconds in self._seconds.items()} | self._details
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._details.clear()
        return taken


@dataclass(kw_only=True)
class _Stretch:
    """Computing phases that followed each other, and the phase after them."""

    begin: Event
    end: Event
    seconds: float
    """What the program spent in them [s]."""
    last: Phase
    """The computing phase that ended."""
    after: Phase
    waited_s: float = 0.0
    """Seconds of the phase after them until the next change; what the program waited is part of them."""


class _Queue:
    """Marks in a GPU's queue of work where computing begins and ends."""

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._begun: tuple[Event, float] | None = None
        """Mark and time of the beginning of the stretch under way."""
        self._stretches: list[_Stretch] = []
        self._followed = True
        """False while the phase that follows the latest stretch is under way."""

    def switch(self, before: Phase, phase: Phase, now: float, seconds: float) -> None:
        """Note a change of phase.

        Args:
            before: the phase that ends.
            phase: the one that begins.
            now: on the program's clock [s].
            seconds: of the one that ends, since the last change [s].
        """
        if not self._followed:
            self._stretches[-1].waited_s, self._followed = seconds, True
        if before not in COMPUTING and phase in COMPUTING:
            self._begun = self._mark(), now
        elif before in COMPUTING and phase not in COMPUTING and self._begun is not None:
            (begin, since), self._begun = self._begun, None
            self._stretches.append(
                _Stretch(begin=begin, end=self._mark(), seconds=now - since, last=before, after=phase)
            )
            self._followed = False

    def _mark(self) -> Event:
        event = self._make_event()
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the GPU has done the work of all stretches."""
        if self._stretches:
            self._stretches[-1].end.synchronize()

    def take(self) -> Iterator[tuple[Phase, Phase, float]]:
        """Yield from which phase to which one to move how many seconds; forgets the stretches."""
        for each in self._stretches:
            late = each.begin.elapsed_time(each.end) / 1000.0 - each.seconds
            yield each.after, each.last, min(max(late, 0.0), each.waited_s)
        self._stretches, self._followed = [], True


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

    def __exit__(self, *_: object) -> None:
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
