"""Real processes that are killed, hang, raise or return rubbish.

Deadlines are generous (60 s) and tests short (30 s): a fault that only a deadline ends would not pass.
"""

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from programs import children_of
from toy_simulator import Do, ToyConfig, actions, episode

from embodyrl.config.schema import StartMethod
from embodyrl.envs.manager import EnvManager, InvalidResult
from embodyrl.errors import UserError
from embodyrl.placement.launcher import RemoteError, WorkerDied, WorkerError, WorkerTimeout

pytestmark = [pytest.mark.faults]
ALL = range(4)


@pytest.fixture(params=["spawn", "fork"])
def start(request):
    """Starts four slots in two processes, which begin in either way."""

    def manager(**options):
        settings = {"num_envs": 4, "workers": 2, "step_timeout_s": 60.0, "start_method": StartMethod(request.param)}
        return EnvManager(ToyConfig(**{**settings, **options}), chunk_size=1, plugins=["toy_simulator"])

    return manager


@pytest.fixture
def manager(start):
    with start() as running:
        running.reset(ALL, [episode(1)] * 4)
        yield running


def gone(pid):
    """Whether a process has ended; it may take the kernel a moment."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid):
            return True
        time.sleep(0.01)
    return False


def test_killed_between_calls(manager):
    victim = manager.workers[1]
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        manager.step(ALL, actions(4))
    text = str(caught.value)
    assert text.startswith(f"env worker 1 (pid {victim.pid}, envs 2..3) was killed by SIGKILL")
    assert "after 'reset'" in text or "during 'step'" in text
    assert (caught.value.role, caught.value.rank, caught.value.pid) == ("env", 1, victim.pid)


def test_killed_during_a_call(manager):
    victim = manager.workers[0]
    with pytest.raises(WorkerDied) as caught:
        manager.step(ALL, actions(4, slot1=Do.DIE))
    text = str(caught.value)
    assert f"env worker 0 (pid {victim.pid}, envs 0..1) was killed by SIGKILL" in text
    assert "during 'step'" in text
    assert text.endswith("the arm has come off")
    assert gone(victim.pid)


def test_killed_while_another_worker_is_awaited(manager):
    manager.send([0], actions(1, slot0=Do.HANG))
    manager.send([2], actions(1, slot0=Do.DIE))
    with pytest.raises(WorkerDied, match="env worker 1"):
        manager.receive([0, 2])


def test_killed_while_it_starts(start):
    with pytest.raises(WorkerDied, match=r"was killed by SIGKILL .*during 'start'"):
        start(start="killed")


def test_a_start_that_hangs(start):
    with pytest.raises(WorkerTimeout, match=r"did not answer 'start' within 1\.5 s"):
        start(start="not", startup_timeout_s=1.5)


def test_after_a_failure_the_manager_says_so_and_closes(manager):
    with pytest.raises(WorkerDied):
        manager.step(ALL, actions(4, slot0=Do.DIE))
    with pytest.raises(RuntimeError, match=r"cannot continue after: env worker 0 .* was killed by SIGKILL"):
        manager.reset(ALL, [episode(1)] * 4)
    pids = [worker.pid for worker in manager.workers]
    manager.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_exception_brings_its_traceback(manager):
    with pytest.raises(RemoteError) as caught:
        manager.step(ALL, actions(4, slot3=Do.RAISE))
    error = caught.value
    assert (error.type_name, error.rank) == ("ArithmeticError", 1)
    assert error.remote_message.startswith("cannot add 0.5")
    assert "env 0 of this worker is env 2 of the run" in error.remote_message
    assert error.remote_traceback.count('  File "') == error.remote_traceback.count("toy_simulator.py") == 2
    assert "in step" in str(error) and str(error).count("is env 2 of the run") == 1
    assert psutil.pid_exists(error.pid)  # raising does not end a worker


def test_debugging_keeps_what_led_to_it(start, monkeypatch):
    monkeypatch.setenv("EMBODYRL_DEBUG", "1")
    with pytest.raises(RemoteError, match=r"(?s)child\.py.*worker\.py.*toy_simulator\.py"):
        start(start="badly")


def test_the_simulators_exit_is_an_exception_too(manager):
    with pytest.raises(RemoteError, match="'step' raised SystemExit: 3"):
        manager.step(ALL, actions(4, slot0=Do.EXIT))


def test_an_exception_at_the_start_ends_all_workers(start):
    before = {child.pid for child in children_of(psutil.Process())}
    with pytest.raises(RemoteError, match="'start' raised ValueError: no such robot"):
        start(start="badly")
    assert {child.pid for child in children_of(psutil.Process())} <= before


def test_a_users_mistake_is_told_as_one(start):
    with pytest.raises(UserError, match=r"^the assets are missing: download them$"):
        start(start="refused")


def test_an_unknown_simulator_is_a_users_mistake(start):
    with pytest.raises(UserError, match="'tyo' is not registered - did you mean 'toy'"):
        start(name="tyo")


def test_a_plugin_that_cannot_be_imported_is_a_users_mistake():
    with pytest.raises(UserError, match="plug-in 'no_such_module' cannot be imported in a worker process"):
        EnvManager(ToyConfig(num_envs=1), chunk_size=1, plugins=["no_such_module"])


def test_plugins_are_found_in_their_folder(tmp_path):
    (tmp_path / "other_folder_plugin.py").write_text("import toy_simulator\nprint('imported')\n")
    config = ToyConfig(num_envs=1)
    with EnvManager(config, chunk_size=1, plugins=["other_folder_plugin"], plugin_path=str(tmp_path), log_dir=tmp_path):
        assert (tmp_path / "env-0.log").read_text() == "imported\n"


def test_a_hang_ends_at_the_deadline_and_shows_where(start):
    with start(step_timeout_s=1.0) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        hung, fine = (worker.pid for worker in manager.workers)
        with pytest.raises(WorkerTimeout) as caught:
            manager.step(ALL, actions(4, slot0=Do.HANG))
        text = str(caught.value)
        assert text.startswith(f"env worker 0 (pid {hung}, envs 0..1) did not answer 'step' within 1 s and was killed")
        assert "toy_simulator.py" in text  # the stack it was hanging in
        assert "env.step_timeout_s" in caught.value.__notes__[0]
        assert gone(hung)
        assert psutil.pid_exists(fine)


@pytest.mark.parametrize("do", [Do.NAN_REWARD, Do.INF_OBSERVATION])
def test_numbers_that_are_not_finite_are_refused(manager, do):
    manager.step(ALL, actions(4))
    with pytest.raises(InvalidResult) as caught:
        manager.step(ALL, actions(4, slot2=do))
    key, value = ("reward", "nan") if do is Do.NAN_REWARD else (r"observation.proprio[0]", "inf")
    worker = manager.workers[1]
    assert (
        str(caught.value)
        == f"env worker 1 (pid {worker.pid}, envs 2..3): {key} of env 2 is {value} at step 2 of its episode"
    )
    assert isinstance(caught.value, WorkerError)


def test_the_step_of_a_bad_reward_inside_a_chunk():
    config = ToyConfig(num_envs=1)
    with EnvManager(config, chunk_size=3, plugins=["toy_simulator"]) as manager:
        manager.reset([0], [episode(1)])
        manager.step([0], actions(1, 3))
        with pytest.raises(InvalidResult, match="reward of env 0 is nan at step 6"):
            manager.step([0], actions(1, 3, slot0=Do.NAN_REWARD))


def test_a_final_observation_that_is_not_finite_is_refused(start):
    with start(max_episode_steps=1) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        with pytest.raises(InvalidResult, match=r"observation\.proprio\[0\] of env 3 is inf at step 1"):
            manager.step(ALL, actions(4, slot3=Do.INF_OBSERVATION), [episode(2)] * 4)


def test_a_hung_slot_is_noticed_though_others_are_served(start):
    with start(step_timeout_s=1.0, max_episode_steps=10**6) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        manager.send(ALL, actions(4, slot1=Do.HANG))
        with pytest.raises(
            WorkerTimeout, match=r"env worker 0 .* did not answer 'step' within 1 s and was killed"
        ) as end:
            while True:
                slots, _ = manager.receive_ready(1)
                manager.send(slots, actions(len(slots)))
        assert "env.step_timeout_s" in end.value.__notes__[0]


def test_a_death_is_noticed_while_others_are_served(manager):
    manager.send(ALL, actions(4, slot3=Do.DIE))
    with pytest.raises(WorkerDied, match=r"env worker 1 .* was killed by SIGKILL .*during 'step'"):
        while True:
            manager.receive_ready(1)


def test_close_does_not_wait_for_a_hung_worker(manager):
    manager.send([0], actions(1, slot0=Do.HANG))
    pids = [worker.pid for worker in manager.workers]
    manager.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_no_process_descriptor_or_shared_memory_is_left(start):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    def mine():
        return {child.pid for child in children_of(psutil.Process(), recursive=True)}

    def named_memory():  # what other tests have in /dev/shm, at the same time or in this process before, is theirs
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in ("self", *mine())]
        return {line.split(maxsplit=5)[5] for text in maps for line in text.splitlines() if "/dev/shm/" in line}

    start().close()  # whatever is opened once
    before, named = (descriptors(), mine()), named_memory()
    with start(images=True) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        assert named_memory() <= named
        assert {worker.pid for worker in manager.workers} <= mine() - before[1]
    assert descriptors() == before[0]
    assert mine() <= before[1]  # neither running nor a zombie


def test_a_worker_killed_while_closing_leaves_no_zombie(manager):
    for worker in manager.workers:
        os.kill(worker.pid, signal.SIGKILL)
    pids = [worker.pid for worker in manager.workers]
    manager.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_interrupted_wait_leaves_no_half_used_manager(manager):
    def interrupt(*_):
        raise KeyboardInterrupt  # as Ctrl-C does, also where the tests run in a shell's background, deaf to SIGINT

    manager.send([0], actions(1, slot0=Do.HANG))
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        manager.receive([0])
    with pytest.raises(RuntimeError, match=r"cannot continue after: KeyboardInterrupt\(\)"):
        manager.receive([0])


def test_interrupts_do_not_reach_the_workers(manager):
    for worker in manager.workers:
        os.kill(worker.pid, signal.SIGINT)
    result = manager.step(ALL, actions(4))
    assert np.isfinite(result.rewards).all()
