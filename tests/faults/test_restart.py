"""env.on_worker_death=restart: a simulator process that dies is replaced, and nothing goes on from an earlier state."""

import os
import signal
import time

import numpy as np
import psutil
import pytest
from processes import living
from slow import rest_slow
from toy_simulator import Do, ToyConfig, actions, episode

from embodyrl.config.schema import OnWorkerDeath, StartMethod
from embodyrl.envs.manager import EnvManager
from embodyrl.envs.manager.pool import TooManyDeaths
from embodyrl.placement.launcher import RemoteError, WorkerDied, WorkerTimeout

pytestmark = [pytest.mark.faults]
ALL = range(4)


@pytest.fixture(params=["spawn", "fork"])
def start(request):
    """Starts four slots in two processes, which begin in either way."""

    def manager(**options):
        settings = {
            "num_envs": 4,
            "workers": 2,
            "step_timeout_s": 60.0,
            "start_method": StartMethod(request.param),
            "on_worker_death": OnWorkerDeath.restart,
            "max_restarts": 3,
        }
        return EnvManager(ToyConfig(**{**settings, **options}), chunk_size=1, plugins=["toy_simulator"])

    return manager


@pytest.fixture
def manager(start):
    with start() as running:
        running.reset(ALL, [episode(1, seed=slot) for slot in ALL])
        yield running


def end(process):
    """Kill a process and wait until it is dead, without reaping it: that is its parent's business."""
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 240
    while living([process.pid]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("when", ["between calls", "during a call"])
def test_the_episodes_of_a_process_that_dies_are_lost_and_those_of_others_go_on(manager, when):
    manager.step(ALL, actions(4))
    victim, survivor = manager.workers
    following = [episode(50, seed=10 + slot) for slot in ALL]
    if when == "between calls":
        end(victim)
        result = manager.step(ALL, actions(4), following)
    else:
        result = manager.step(ALL, actions(4, slot1=Do.DIE), following)
    assert result.lost.tolist() == [True, True, False, False]
    assert result.steps.tolist() == [0, 0, 1, 1]
    assert not result.ended.any() and not result.rewards[:2].any() and result.rewards[2:].all()
    # The next episode is at its start: total as its start state says, no steps.
    np.testing.assert_array_equal(result.observation.proprio[:2], [[50, 0, 7], [50, 0, 7]])
    assert result.observation.proprio[2:, 1].tolist() == [2, 2]
    assert manager.workers[0].pid != victim.pid and manager.workers[1].pid == survivor.pid
    [death] = manager.take_deaths()
    assert str(victim.pid) in str(death) and "SIGKILL" in str(death) and not manager.take_deaths()
    after = manager.step(ALL, actions(4))
    assert not after.lost.any() and after.observation.proprio[:, 1].tolist() == [1, 1, 3, 3]


def test_what_follows_is_the_same_as_without_a_death(start):
    """The episode after the lost one is that episode, bit for bit, whichever process plays it."""

    def second_episode(die):
        with start() as manager:
            manager.reset(ALL, [episode(1, seed=slot) for slot in ALL])
            following = [episode(5, seed=20 + slot) for slot in ALL]
            how = Do.DIE if die else Do.END
            manager.step(ALL, actions(4, slot0=how, slot1=how, slot2=Do.END, slot3=Do.END), following)
            return [manager.step(ALL, actions(4, number=0.1 * step)).rewards.copy() for step in range(4)]

    np.testing.assert_array_equal(second_episode(die=True), second_episode(die=False))


def test_a_slot_that_was_not_being_stepped_is_lost_as_well_and_says_so_at_its_next_step(manager):
    result = manager.step([0, 2], actions(2, slot0=Do.DIE), [episode(50), None])
    assert result.lost.tolist() == [True, False]
    other = manager.step([1], actions(1))  # nothing is known that it could play next
    assert other.lost.tolist() == [True] and other.steps.tolist() == [0]
    with pytest.raises(ValueError, match=r"envs \[1\] play no episode"):
        manager.step([1], actions(1))
    manager.reset([1], [episode(3)])
    assert manager.step([1], actions(1)).observation.proprio[0, 1] == 1


def test_a_lost_state_stays_lost_when_it_is_saved_and_restored(manager, start):
    manager.step([0], actions(1, slot0=Do.DIE), [episode(50)])
    states = manager.get_state(ALL)
    with start() as other:
        other.set_state(ALL, states)
        result = other.step(ALL, actions(4), [episode(9)] * 4)
    assert result.lost.tolist() == [False, True, False, False]
    np.testing.assert_array_equal(result.observation.proprio[1], [9, 0, 7])


def test_a_process_that_dies_over_a_reset_is_asked_again(manager):
    end(manager.workers[1])
    observation = manager.reset([0, 3], [episode(4), episode(6)])
    assert observation.proprio[:, 0].tolist() == [4, 6]
    result = manager.step(ALL, actions(4))
    assert result.lost.tolist() == [False, False, True, False]


def test_a_hang_counts_as_a_death(start):
    with start(step_timeout_s=1.0) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        result = manager.step(ALL, actions(4, slot3=Do.HANG), [episode(2)] * 4)
        assert result.lost.tolist() == [False, False, True, True]
        [death] = manager.take_deaths()
        assert isinstance(death, WorkerTimeout)


def test_ready_slots_are_served_while_another_process_is_replaced(start):
    with start(workers=4) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        manager.send(ALL, actions(4, slot2=Do.DIE), [episode(8)] * 4)
        lost, seen = {}, []
        while len(seen) < 4:
            slots, result = manager.receive_ready(1)
            seen += slots.tolist()
            lost |= dict(zip(slots.tolist(), result.lost.tolist(), strict=True))
        assert lost == {0: False, 1: False, 2: True, 3: False}


def test_a_video_of_a_lost_chunk_is_empty(manager):
    result, videos = manager.step_recorded(ALL, actions(4, slot0=Do.DIE), [episode(2)] * 4)
    assert result.lost.tolist() == [True, True, False, False]
    assert [len(video) for video in videos] == [0, 0, 1, 1]


def test_deaths_without_end_end_the_run(manager):
    for _ in range(3):
        manager.step(ALL, actions(4, slot0=Do.DIE), [episode(1)] * 4)
    with pytest.raises(TooManyDeaths) as caught:
        manager.step(ALL, actions(4, slot0=Do.DIE), [episode(1)] * 4)
    text = str(caught.value)
    assert "died 4 times in this run, and env.max_restarts is 3" in text and "killed by SIGKILL" in text
    assert len(manager.take_deaths()) == 3


@pytest.fixture
def doomed(tmp_path, monkeypatch):
    """`doomed(n)` has the next n processes die while they start; with short pauses in between."""
    monkeypatch.setattr("embodyrl.envs.manager.pool.PAUSE_S", 0.05)
    path = tmp_path / "doomed"

    def set_number(number):
        path.write_text(str(number))
        return path

    return set_number


def test_a_replacement_that_dies_at_its_start_is_replaced_and_counted(start, doomed):
    with start(doomed=str(doomed(0)), max_restarts=4) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        path = doomed(2)
        result = manager.step(ALL, actions(4, slot0=Do.DIE), [episode(50)] * 4)
        assert result.lost.tolist() == [True, True, False, False] and path.read_text() == "0"
        np.testing.assert_array_equal(result.observation.proprio[:2], [[50, 0, 7], [50, 0, 7]])
        first, *others = [str(death) for death in manager.take_deaths()]
        assert "during 'step'" in first
        assert len(others) == 2 and all("SIGKILL" in text and "during 'start'" in text for text in others)
        assert not manager.step(ALL, actions(4)).lost.any()


def test_replacements_that_all_die_at_their_start_end_the_run_at_the_limit(start, doomed):
    with start(doomed=str(doomed(0))) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        path = doomed(1000)
        with pytest.raises(TooManyDeaths, match=r"died 4 times in this run, and env.max_restarts is 3") as caught:
            manager.step(ALL, actions(4, slot0=Do.DIE), [episode(50)] * 4)
        assert "during 'start'" in str(caught.value) and path.read_text() == "997"
        pids = [worker.pid for worker in manager.workers]
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("start", rest_slow(["fork", "spawn"]), indirect=True)  # it waits for long, and in vain
def test_a_replacement_that_hangs_at_its_start_is_given_up_in_time(start, doomed, tmp_path):
    hangs = tmp_path / "hangs"
    with start(hangs=str(hangs), max_restarts=1, startup_timeout_s=15.0) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        hangs.touch()
        begin = time.monotonic()
        with pytest.raises(TooManyDeaths, match="did not answer 'start' within 15 s"):
            manager.step(ALL, actions(4, slot0=Do.DIE), [episode(50)] * 4)
        assert time.monotonic() - begin < 60


def test_processes_that_die_when_they_are_brought_back_are_started_again(start, doomed):
    with start(doomed=str(doomed(0))) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        before = manager.step(ALL, actions(4)).observation.proprio
        manager.offload()
        doomed(1)
        assert np.array_equal(manager.observe(ALL).proprio, before)  # nothing is lost: the states are there
        assert not manager.step(ALL, actions(4)).lost.any() and len(manager.take_deaths()) == 1


def test_processes_that_always_die_when_they_are_brought_back_end_the_run(start, doomed):
    with start(doomed=str(doomed(0))) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        manager.offload()
        doomed(1000)
        with pytest.raises(TooManyDeaths, match=r"env\.max_restarts is 3"):
            manager.onload()


def test_what_was_replaced_earlier_in_the_run_counts(manager):
    manager.count_restarts(3)
    with pytest.raises(TooManyDeaths, match="died 4 times in this run"):
        manager.step(ALL, actions(4, slot0=Do.DIE), [episode(1)] * 4)


def test_a_first_start_that_fails_is_not_tried_again(start, doomed):
    path = doomed(1000)
    with pytest.raises(WorkerDied, match=r"killed by SIGKILL .* during 'start'"):
        start(doomed=str(path))
    assert int(path.read_text()) >= 998


def test_an_exception_is_no_death(manager):
    with pytest.raises(RemoteError, match="cannot add"):
        manager.step(ALL, actions(4, slot0=Do.RAISE), [episode(1)] * 4)


def test_no_process_of_a_replaced_worker_is_left(manager):
    victim = manager.workers[0].pid
    manager.step(ALL, actions(4, slot0=Do.DIE), [episode(1)] * 4)
    assert not living([victim])
    pids = [worker.pid for worker in manager.workers]
    manager.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
