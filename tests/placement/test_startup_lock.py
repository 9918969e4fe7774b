"""Workers take turns, whatever becomes of the one whose turn it is."""

import os
import signal
from itertools import pairwise

import pytest
from placement_services import Service

from embodyrl.placement.launcher import WorkerTimeout
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.plan import WorkerSpec
from embodyrl.placement.startup_lock import one_at_a_time


@pytest.fixture(params=[None, ()], ids=["spawn", "fork"])
def workers(request, launcher):
    specs = [WorkerSpec(role="test", rank=rank, preload=request.param) for rank in range(3)]
    return launcher.start(specs, Service, [(rank,) for rank in range(3)], timeout=240)


@pytest.fixture
def launcher():
    running = LocalLauncher()
    yield running
    running.close()


def test_turns_do_not_overlap(launcher, workers):
    requests = [worker.request("take_turn", 0.1) for worker in workers for _ in range(2)]
    turns = sorted(launcher.gather(requests, timeout=240))
    assert len(turns) == 6
    for (_, ended), (began, _) in pairwise(turns):
        assert ended <= began


def test_a_worker_that_dies_in_its_turn_gives_it_back(launcher, workers):
    launcher.gather([workers[0].request("keep_turn")], timeout=240)
    waiting = workers[1].request("take_turn", 0.0)
    os.kill(workers[0].pid, signal.SIGKILL)
    launcher.gather([waiting, workers[2].request("take_turn", 0.0)], timeout=240)


def test_who_waits_for_long_says_for_whom(launcher, workers):
    launcher.gather([workers[0].request("keep_turn")], timeout=240)
    with pytest.raises(WorkerTimeout, match=rf"waiting for process {workers[0].pid} to rehearse, then"):
        launcher.gather([workers[1].request("take_turn", 0.0)], timeout=4)


def test_workers_started_apart_take_no_turns(launcher, workers):
    launcher.gather([workers[0].request("keep_turn")], timeout=240)
    other = LocalLauncher()
    (stranger,) = other.start([WorkerSpec(role="test", rank=0)], Service, [(0,)], timeout=240)
    other.gather([stranger.request("take_turn", 0.0)], timeout=240)
    other.close()


def test_outside_a_worker_there_is_nothing_to_wait_for():
    with one_at_a_time("rehearse"), one_at_a_time("rehearse again"):
        pass
