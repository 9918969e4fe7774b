import os
import signal
import time

import psutil
import pytest
from placement_services import Notified

from embodyrl.placement.launcher import RemoteError, WorkerDied, WorkerTimeout
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.plan import WorkerSpec


@pytest.fixture
def launcher():
    running = LocalLauncher()
    yield running
    running.close()


@pytest.fixture(params=[None, ("json",)], ids=["spawn", "fork"])
def three(launcher, request):
    specs = [WorkerSpec(role="test", rank=rank, preload=request.param) for rank in range(3)]
    return launcher.start(specs, Notified, [(0,), (1,), (2,)], timeout=240)


def prepare(launcher, worker, method, *args):
    launcher.gather([worker.request("prepare", method, *args)], timeout=240)


def test_rings_are_answered_again_and_again(launcher, three):
    for worker in three:
        prepare(launcher, worker, "echo", 0)
    for _ in range(20):
        assert launcher.gather([worker.notify("step") for worker in three], timeout=240) == [None] * 3
    assert launcher.gather([three[1].request("echo", "after")], timeout=240) == ["after"]


def test_a_ring_must_not_overtake_anything(launcher, three):
    prepare(launcher, three[0], "slow_echo", 0, 0.2)
    first = three[0].notify("step")
    assert not three[0].is_idle
    with pytest.raises(RuntimeError, match="is busy with 'step'"):
        three[0].notify("step")
    second = three[0].request("echo", "second")
    with pytest.raises(RuntimeError, match="is busy with 'echo'"):
        three[0].notify("step")
    assert launcher.gather([second, first], timeout=240) == ["second", None]
    assert three[0].is_idle


def test_a_ring_that_nobody_waits_for_any_more_answers_nothing(launcher, three):
    prepare(launcher, three[0], "fail", "early")
    prepare(launcher, three[1], "slow_echo", 0, 0.3)
    with pytest.raises(RemoteError, match=r"worker 0 .*: 'step' raised KeyError: 'early'"):
        launcher.gather([three[0].notify("step"), three[1].notify("step")], timeout=240)
    assert three[0].is_idle
    assert not three[1].is_idle  # its answer is still to come, and must not be taken for that of another ring
    assert launcher.gather([three[1].request("echo", "new")], timeout=240) == ["new"]


def test_waiting_for_any_wakes_for_the_first_answer(launcher, three):
    for number, worker in enumerate(three):
        prepare(launcher, worker, "slow_echo", 0, [0.6, 0.0, 0.3][number])
    requests = [worker.notify("step") for worker in three]
    order = []
    while requests:
        ready = launcher.wait_any(requests)
        launcher.gather(ready, timeout=0.0)
        order += [request.worker.spec.rank for request in ready]
        requests = [request for request in requests if request not in ready]
    assert order == [1, 2, 0]


def test_a_death_is_seen_at_once_though_others_are_awaited(launcher, three):
    prepare(launcher, three[0], "leave", 3)
    prepare(launcher, three[1], "echo", 0)
    prepare(launcher, three[2], "hang")
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=r"worker 0 .* exited with code 3 during 'step'"):
        launcher.gather([worker.notify("step") for worker in three], timeout=240)
    assert time.monotonic() - start < 10


def test_a_ring_for_a_dead_worker_says_how_it_ended(launcher, three):
    prepare(launcher, three[0], "echo", 0)
    os.kill(three[0].pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(WorkerDied, match=r"worker 0 .* was killed by SIGKILL"):
            launcher.gather([three[0].notify("step")], timeout=240)


def test_an_idle_worker_that_dies_does_not_keep_the_others_awake(launcher, three):
    prepare(launcher, three[1], "slow_echo", 0, 0.5)
    os.kill(three[0].pid, signal.SIGKILL)
    before = psutil.Process().cpu_times()
    assert launcher.gather([three[1].notify("step")], timeout=240) == [None]
    after = psutil.Process().cpu_times()
    assert after.user + after.system - before.user - before.system < 0.25
    with pytest.raises(WorkerDied, match=r"worker 0 .* was killed by SIGKILL .* after 'start'"):
        three[0].request("echo", 1)


def test_a_worker_that_hangs_on_a_ring_is_killed_and_shows_its_stacks(launcher, three):
    prepare(launcher, three[0], "hang")
    prepare(launcher, three[1], "echo", 0)
    with pytest.raises(WorkerTimeout, match=r"(?s)did not answer 'step' within 0\.5 s and was killed.*in hang"):
        launcher.gather([three[0].notify("step"), three[1].notify("step")], timeout=0.5)
    assert not psutil.pid_exists(three[0].pid)
    late = three[2].request("hang", timeout=0.3)
    with pytest.raises(WorkerTimeout, match=r"worker 2 .* within 0\.3 s"):
        launcher.wait_any([late])


def test_a_worker_that_answers_what_was_not_asked_is_killed(launcher, three):
    prepare(launcher, three[0], "write_everywhere", (7).to_bytes(8, "little"))
    with pytest.raises(WorkerDied, match=r"worker 0 .* sent what is no reply during 'step'"):
        launcher.gather([three[0].notify("step")], timeout=240)
