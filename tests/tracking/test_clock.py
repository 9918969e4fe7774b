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


class Gpu:
    """A GPU with a queue of work, on the test's time. It makes its events and counts the waits for them."""

    def __init__(self, now: list[float]) -> None:
        self.now = now
        self.free_at = 0.0
        self.waits = 0

    def queue(self, seconds: float) -> None:
        """Begin some work as soon as what was queued before is done."""
        self.free_at = max(self.free_at, self.now[0]) + seconds

    def wait(self) -> None:
        """Read a result."""
        self.now[0] = max(self.free_at, self.now[0])

    def event(self) -> GpuEvent:
        return GpuEvent(self)


class GpuEvent:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at = max(self.gpu.free_at, self.gpu.now[0])

    def synchronize(self) -> None:
        self.gpu.waits += 1
        self.gpu.now[0] = max(self.at, self.gpu.now[0])

    def elapsed_time(self, end: GpuEvent) -> float:
        assert self.gpu.now[0] >= end.at, "the GPU has not come so far"
        return 1000.0 * (end.at - self.at)


def test_waiting_for_a_result_of_the_gpu_counts_for_the_phase_that_computes_it(now: list[float]) -> None:
    gpu = Gpu(now)
    clock = Clock(gpu.event)
    with clock.measure(Phase.record):
        for _ in range(2):
            with clock.measure(Phase.infer):
                with clock.measure(Phase.preprocess):
                    now[0] += 1
                gpu.queue(7)
                now[0] += 2
            gpu.wait()  # 5 s more
            now[0] += 0.5
            with clock.measure(Phase.simulate):
                now[0] += 3
    assert gpu.waits == 0
    assert spent(clock) == {"preprocess": 2.0, "infer": 14.0, "record": 1.0, "simulate": 6.0}
    assert gpu.waits == 1 and spent(clock) == {}


def test_time_that_the_program_did_not_wait_for_the_gpu_is_not_moved(now: list[float]) -> None:
    gpu = Gpu(now)
    clock = Clock(gpu.event)
    with clock.measure(Phase.infer):
        gpu.queue(10)
        now[0] += 1
    now[0] += 2  # of the 9 s that the GPU still needs, 2 pass here and the rest while simulators work
    with clock.measure(Phase.simulate):
        now[0] += 20
    with clock.measure(Phase.train):
        gpu.queue(4)
        gpu.wait()
        now[0] += 1
    assert spent(clock) == {"infer": 3.0, "simulate": 20.0, "train": 5.0}


def test_what_the_gpu_still_has_to_do_when_times_are_taken_counts_for_its_phase(now: list[float]) -> None:
    gpu = Gpu(now)
    clock = Clock(gpu.event)
    with clock.measure(Phase.train):
        gpu.queue(8)
        now[0] += 1
    assert spent(clock) == {"train": 8.0}
    with clock.measure(Phase.train):
        now[0] += 1
        assert spent(clock) == {"train": 1.0}
        now[0] += 1
    assert spent(clock) == {"train": 1.0}


def test_waiting_is_divided_as_the_simulators_divided_their_work() -> None:
    assert divide_waiting({"simulate": 8.0, "render": 0.0, "train": 1.0}, 0.25) == {
        "simulate": 6.0,
        "render": 2.0,
        "train": 1.0,
    }
