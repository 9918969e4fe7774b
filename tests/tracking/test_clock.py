"""The clock, on a time that the test sets."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from embodyrl.tracking import clock as module
from embodyrl.tracking.clock import Clock, Phase, divide_waiting


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time; a test changes `now[0]`."""
    time = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: time[0]))
    return time


def spent(clock: Clock) -> dict[str, float]:
    """Everything that is not 0."""
    return {name: seconds for name, seconds in clock.take().items() if seconds}


def test_a_second_counts_once_for_the_innermost_phase(now: list[float]) -> None:
    clock = Clock()
    now[0] += 1
    with clock.measure(Phase.train):
        now[0] += 2
        with clock.measure(Phase.preprocess):
            now[0] += 4
        now[0] += 8
    now[0] += 16
    assert spent(clock) == {"train": 10.0, "preprocess": 4.0, "idle": 17.0}
    assert spent(clock) == {}


def test_what_is_under_way_is_taken_as_far_as_it_got(now: list[float]) -> None:
    clock = Clock()
    with clock.measure(Phase.save):
        now[0] += 3
        assert spent(clock) == {"save": 3.0}
        now[0] += 1
    assert spent(clock) == {"save": 1.0}


def test_a_detail_counts_besides(now: list[float]) -> None:
    clock = Clock()
    with clock.measure(Phase.simulate, detail="onload"):
        now[0] += 2
    assert spent(clock) == {"simulate": 2.0, "onload": 2.0}


def test_items_count_while_they_come_and_not_while_they_are_used(now: list[float]) -> None:
    clock = Clock()

    def items():
        for number in range(2):
            now[0] += 1
            yield number

    got = []
    for item in clock.pulling(Phase.preprocess, items()):
        now[0] += 10
        got.append(item)
    assert got == [0, 1] and spent(clock) == {"preprocess": 2.0, "idle": 20.0}


def test_an_exception_ends_its_phase(now: list[float]) -> None:
    clock = Clock()
    with pytest.raises(ZeroDivisionError), clock.measure(Phase.infer):
        raise ZeroDivisionError
    now[0] += 1
    assert spent(clock) == {"idle": 1.0}


def test_other_threads_do_not_count(now: list[float]) -> None:
    clock = Clock()

    def work() -> None:
        with clock.measure(Phase.infer):
            now[0] += 5

    thread = threading.Thread(target=work)
    with clock.measure(Phase.train):
        thread.start()
        thread.join()
    assert spent(clock) == {"train": 5.0}


def test_the_gpu_is_waited_for_when_the_last_computing_phase_ends(now: list[float]) -> None:
    waits: list[float] = []

    def synchronize() -> None:
        waits.append(now[0])
        now[0] += 7  # what the GPU still had to do

    clock = Clock(synchronize)
    with clock.measure(Phase.record):
        with clock.measure(Phase.infer):
            with clock.measure(Phase.preprocess):
                now[0] += 1
            now[0] += 1
        with clock.measure(Phase.simulate):
            now[0] += 1
    assert len(waits) == 1
    assert spent(clock) == {"preprocess": 1.0, "infer": 8.0, "simulate": 1.0}


def test_waiting_is_divided_as_the_simulators_divided_their_work() -> None:
    assert divide_waiting({"simulate": 8.0, "render": 0.0, "train": 1.0}, 0.25) == {
        "simulate": 6.0,
        "render": 2.0,
        "train": 1.0,
    }
