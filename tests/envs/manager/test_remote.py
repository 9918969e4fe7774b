"""Simulators on another machine: what they return is what an EnvManager returns, and every way to lose them is noticed.
What holds for both is in `test_manager.py`."""

import dataclasses
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import programs
import psutil
import pytest
from far_away import HOST, far, launch
from processes import living, stop
from toy_simulator import Do, ToyConfig, actions, episode

from embodyrl.config import load_config
from embodyrl.config.schema import OnWorkerDeath
from embodyrl.envs.manager import EnvManager, InvalidResult, remote
from embodyrl.envs.manager.host import host_simulators
from embodyrl.envs.manager.messages import Message, own_memory
from embodyrl.envs.manager.pool import TooManyDeaths
from embodyrl.envs.manager.remote import RemoteManager
from embodyrl.envs.options import GymnasiumConfig
from embodyrl.envs.types import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.placement.launcher import RemoteError, WorkerDied, WorkerTimeout
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.plan import WorkerSpec
from embodyrl.placement.ranks import RankInfo
from embodyrl.placement.transport.line import LineError, LineLost, LineTimeout, Listener

ALL = range(4)
SMALL = ("rewards", "success", "terminated", "truncated", "steps", "lost")


def start(kind=far, *, chunk_size=1, every_step=False, **options):
    settings = {"num_envs": 4, "workers": 2, "max_episode_steps": 5}
    config = ToyConfig(**{**settings, **options})
    return kind(config, chunk_size=chunk_size, every_step=every_step, plugins=["toy_simulator"])


def same(left, right):
    for name in ("images", "proprio"):
        assert (getattr(left, name) is None) == (getattr(right, name) is None)
        if getattr(left, name) is not None:
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name), strict=True)
    assert left.task_descriptions == right.task_descriptions


def same_step(left, right):
    for name in SMALL:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), strict=True)
    for name in ("step_images", "step_proprio"):
        assert (getattr(left, name) is None) == (getattr(right, name) is None)
        if getattr(left, name) is not None:
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name), strict=True)
    same(left.observation, right.observation)
    same(left.final_observation, right.final_observation)
    assert (left.final_observation is left.observation) == (right.final_observation is right.observation)


@pytest.mark.parametrize("every_step", [False, True])
def test_a_rollout_with_images_is_the_same(every_step):
    """In any grouping of the slots, with episodes of other tasks that begin meanwhile."""
    dice, numbers = np.random.default_rng(1), iter(range(10**6))
    options = {"images": True, "chunk_size": 2, "every_step": every_step, "max_episode_steps": 7}
    with start(EnvManager, **options) as here, start(**options) as there:
        assert here.spec == there.spec
        episodes = [episode(next(numbers), seed=slot, task=("add", "subtract")[slot % 2]) for slot in ALL]
        same(here.reset(ALL, episodes), there.reset(ALL, episodes))
        ended = 0
        for groups in [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3, 0], [2], [1]], [[2, 1, 0, 3]], [[1, 2, 3], [0]]] * 6:
            for slots in groups:
                chunk = np.zeros((len(slots), 2, 2), np.float32)
                chunk[..., 1] = dice.uniform(-1, 1, (len(slots), 2))
                chunk[..., 0] = dice.random((len(slots), 2)) < 0.2  # Do.END
                following = [episode(next(numbers), seed=slot, task="add") for slot in slots]
                results = [each.step(slots, chunk, following) for each in (here, there)]
                same_step(*results)
                ended += results[0].ended.sum()
        assert ended > 10
        same(here.observe([2, 0]), there.observe([2, 0]))
        np.testing.assert_array_equal(here.render(ALL), there.render(ALL))
        assert here.get_state(ALL) == there.get_state(ALL)


def test_a_rollout_of_pendulum_is_the_same():
    config = GymnasiumConfig(name="gymnasium", tasks=["Pendulum-v1"], num_envs=2, workers=1, max_episode_steps=5)

    def of(state, seed):
        return EpisodeSpec(task="Pendulum-v1", start_state=state, seed=seed)

    with EnvManager(config, chunk_size=2) as here, far(config, chunk_size=2) as there:
        assert here.spec == there.spec
        for each in (here, there):
            each.reset([0, 1], [of(slot, slot) for slot in (0, 1)])
        for number in range(8):
            chunk = np.full((2, 2, 1), 0.1 * number, np.float32)
            same_step(*(each.step([0, 1], chunk, [of(9 + number, number)] * 2) for each in (here, there)))


def test_images_stay_as_long_as_those_of_a_manager():
    """Until the second next result of their slots, also where parts of the slots take turns."""
    with start(images=True) as manager:
        manager.reset(ALL, [episode(10 * slot + 10) for slot in ALL])
        seen = {}
        for slots in [(0, 1), (2, 3)] * 4:
            now = manager.step(list(slots), actions(2, number=5.0), [episode(50)] * 2).observation.images
            if slots in seen:
                images, copy = seen[slots]
                np.testing.assert_array_equal(images, copy)
                assert not np.shares_memory(images, now)
            seen[slots] = now, now.copy()
        assert not np.array_equal(*(copy for _, copy in seen.values()))


def test_states_cross_over():
    with start(EnvManager) as here, start() as there:
        here.reset(ALL, [episode(slot, seed=slot) for slot in ALL])
        here.step(ALL, actions(4))
        assert there.set_state(ALL, here.get_state(ALL)) == []
        assert there.take_mismatches() == []
        same_step(here.step(ALL, actions(4)), there.step(ALL, actions(4)))
        here.set_state(ALL, there.get_state(ALL))
        same_step(here.step(ALL, actions(4)), there.step(ALL, actions(4)))


def test_offloading():
    with start() as manager:
        manager.reset(ALL, [episode(slot, seed=slot) for slot in ALL])
        before = manager.observe(ALL)
        assert manager.offload() > 0
        assert manager.offload() == 0
        assert manager.take_deaths() == []
        same(manager.observe(ALL), before)
        manager.offload()
        manager.onload()
        assert manager.step(ALL, actions(4)).observation.proprio[:, 1].tolist() == [1] * 4


def test_what_it_does_is_measured():
    with start() as manager:
        manager.reset(ALL, [episode(1)] * 4)
        manager.take_work()
        manager.step(ALL, actions(4, slot0=Do.SLOW))
        assert manager.take_work().busy_s >= 0.5
        assert manager.take_work().busy_s < 0.1


def test_neither_sending_nor_ready_slots_wait_for_one_that_hangs():
    with start(workers=4, step_timeout_s=4.0) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        manager.send(ALL, actions(4, slot2=Do.HANG))
        slots, result = manager.receive_ready(3)
        assert slots.tolist() == [0, 1, 3] and result.steps.tolist() == [1, 1, 1]
        with pytest.raises(WorkerTimeout, match="did not answer 'step' within 4 s"):
            manager.receive_ready(1)


def test_one_of_several_processes_that_play_gets_its_share(tmp_path):
    """As a run starts it: from a config, with its plug-ins, in a folder with a space."""
    loaded = load_config("gym_pendulum", ["env.num_envs=4", "env.workers=2"])
    place = RankInfo(rank=1, size=2, local_rank=0, local_size=1)
    logs = tmp_path / "simulators of 1"
    launcher = LocalLauncher()
    [worker] = launcher.start(
        [WorkerSpec(role="simulators", rank=1)], host_simulators, [(loaded, place, HOST, logs)], timeout=240
    )
    with RemoteManager(launcher.gather([worker.request("address")], timeout=10)[0]) as manager:
        assert manager.num_envs == 2 and manager.chunk_size == loaded.config.rollout.chunk_size
        task = next(iter(manager.spec.tasks))
        manager.reset([0, 1], [EpisodeSpec(task=task, start_state=np.int64(3), seed=np.int64(4))] * 2)
        assert [path.name for path in logs.iterdir() if path.name.startswith("env")] == ["env-0.log"]
    launcher.close()


# ---- simulators that fail


def test_a_process_that_dies_is_an_error_that_names_the_machine():
    with start() as manager:
        manager.reset(ALL, [episode(1)] * 4)
        with pytest.raises(
            WorkerDied, match=rf"(?s)on {HOST}, env worker 1 \(pid \d+, .*the arm has come off"
        ) as caught:
            manager.step(ALL, actions(4, slot3=Do.DIE))
        assert (caught.value.role, caught.value.rank) == ("env", 1) and caught.value.pid > 0
        with pytest.raises(RuntimeError, match="this EnvManager cannot continue after"):
            manager.observe(ALL)


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        (Do.RAISE, RemoteError, "'step' raised ArithmeticError: cannot add 0.5"),
        (Do.NAN_REWARD, InvalidResult, "reward of env 2 is nan at step 1 of its episode"),
        (Do.HANG, WorkerTimeout, "did not answer 'step' within 3 s and was killed"),
    ],
)
def test_other_errors_keep_their_class_and_text(what, error, text):
    with start(step_timeout_s=3.0) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        with pytest.raises(error, match=rf"on {HOST}, .*{text}") as caught:
            manager.step(ALL, actions(4, slot2=what))
        assert type(caught.value) is error
    if error is RemoteError:
        assert caught.value.type_name == "ArithmeticError" and "cannot add" in caught.value.remote_traceback


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_process_that_fails_is_replaced(how):
    options = {"on_worker_death": OnWorkerDeath.restart, "max_restarts": 1}
    with start(**options, step_timeout_s=3.0 if how == "hangs" else 60.0) as manager:
        manager.count_restarts(0)
        manager.reset(ALL, [episode(1)] * 4)
        what = Do.DIE if how == "dies" else Do.HANG
        result = manager.step(ALL, actions(4, slot1=what), [episode(50)] * 4)
        assert result.lost.tolist() == [True, True, False, False]
        np.testing.assert_array_equal(result.observation.proprio[:2], [[50, 0, 7], [50, 0, 7]])
        [death] = manager.take_deaths()
        assert isinstance(death, WorkerDied if how == "dies" else WorkerTimeout)
        assert str(death).startswith(f"on {HOST}, env worker 0")
        assert not manager.step(ALL, actions(4)).lost.any()
        with pytest.raises(TooManyDeaths, match=r"env\.max_restarts is 1"):
            manager.step(ALL, actions(4, slot1=Do.DIE), [episode(50)] * 4)


def test_replacing_a_process_may_take_longer_than_a_step(monkeypatch, tmp_path):
    """The host says that it does, so the deadline for a host that hangs may stay close to that for a step."""
    monkeypatch.setattr(remote, "SLACK_S", 0.2)
    doomed = tmp_path / "doomed"
    options = {"on_worker_death": OnWorkerDeath.restart, "step_timeout_s": 2.5, "doomed": str(doomed)}
    with start(**options) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        doomed.write_text("2")  # so many die while they start; the pauses alone take 3 s
        begin = time.monotonic()
        result = manager.step(ALL, actions(4, slot1=Do.DIE), [episode(50)] * 4)
        assert time.monotonic() - begin > 2.7
        assert result.lost.tolist() == [True, True, False, False] and len(manager.take_deaths()) == 3


def test_a_mistake_of_the_user_stays_one():
    with pytest.raises(RemoteError, match="the assets are missing: download them") as caught:
        start(start="refused")
    assert caught.value.is_user_error


# ---- hosts that fail


@pytest.fixture
def alone():
    """A host with one process of simulators: the manager, the host's pid and the pids of all processes."""
    with start(workers=1, num_envs=2, step_timeout_s=3.0) as manager:
        manager.reset([0, 1], [episode(1)] * 2)
        host = manager.worker.pid
        yield (
            manager,
            host,
            [host, *(child.pid for child in programs.children_of(psutil.Process(host), recursive=True))],
        )


def gone(pids, within_s):
    deadline = time.monotonic() + within_s
    while left := living(pids):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_a_host_that_is_killed(alone):
    manager, host, pids = alone
    manager.send([0, 1], actions(2, slot0=Do.SLOW))
    os.kill(host, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(LineLost, match=rf"the simulators at {manager.address} failed in 'receive': .* is gone"):
        manager.receive([0, 1])
    assert time.monotonic() - begin < 12.0
    with pytest.raises(LineLost, match="failed in 'observe'"):
        manager.observe([0])
    gone(pids[1:], 5.0)


def test_a_host_that_hangs(alone, monkeypatch):
    monkeypatch.setattr(remote, "SLACK_S", 1.0)
    manager, host, _ = alone
    stop(host)
    begin = time.monotonic()
    with pytest.raises(LineTimeout, match=rf"at {manager.address} failed in 'step': .* did not answer within 4 s"):
        manager.step([0, 1], actions(2))
    assert 3.5 < time.monotonic() - begin < 30.0
    with pytest.raises(LineTimeout, match="did not answer within 4 s"):
        manager.step([0, 1], actions(2))
    begin = time.monotonic()
    RemoteManager.close(manager)
    assert time.monotonic() - begin < 4.0
    os.kill(host, signal.SIGCONT)


def test_a_manager_that_goes_away_ends_its_simulators(alone):
    manager, host, pids = alone
    manager._line.close()
    gone(pids[1:], 8.0)
    assert psutil.pid_exists(host)  # whoever launched it ends it


def test_a_manager_that_is_closed_ends_its_simulators(alone):
    manager, _, pids = alone
    RemoteManager.close(manager)
    assert not living(pids[1:])
    manager.close()
    with pytest.raises(RuntimeError, match="this RemoteManager is closed"):
        manager.observe([0])


PLAYS = """
import sys, time
sys.path.append(sys.argv[1])
from toy_simulator import episode
from embodyrl.envs.manager.remote import RemoteManager
from embodyrl.placement.transport.line import Address
manager = RemoteManager(Address(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
manager.reset([0], [episode(1)])
print("plays", flush=True)
time.sleep(1000)
"""


def test_a_process_that_plays_and_is_killed_takes_its_simulators_along():
    launcher, worker, address = launch(ToyConfig(num_envs=1, workers=1), chunk_size=1, plugins=["toy_simulator"])
    simulators = [child.pid for child in programs.children_of(psutil.Process(worker.pid), recursive=True)]
    words = [str(Path(__file__).parent), address.host, str(address.port), address.token]
    player = programs.Program(["-c", PLAYS, *words], stdout=subprocess.PIPE)
    assert player.stdout.readline() == b"plays\n"
    player.kill()
    gone(simulators, 8.0)
    player.communicate()
    launcher.close()


def test_a_wrong_token():
    launcher, _, address = launch(ToyConfig(num_envs=1, workers=1), chunk_size=1, plugins=["toy_simulator"])
    with pytest.raises(LineError, match="the token is wrong"):
        RemoteManager(dataclasses.replace(address, token="guess"))
    with RemoteManager(address) as manager:
        manager.reset([0], [episode(1)])
        with pytest.raises(ConnectionRefusedError):  # it serves one, and listens no more
            socket.create_connection((address.host, address.port), timeout=5)
    launcher.close()


def test_nobody_comes():
    config = ToyConfig(num_envs=1, workers=1)
    launcher, worker, address = launch(config, patience_s=2.0, chunk_size=1, plugins=["toy_simulator"])
    gone([child.pid for child in programs.children_of(psutil.Process(worker.pid), recursive=True)], 10.0)
    with pytest.raises(LineLost, match="cannot open a line"):
        RemoteManager(address)
    launcher.close()


def test_a_host_on_an_address_of_another_machine(monkeypatch):
    monkeypatch.setattr("far_away.HOST", "192.0.2.1")
    with pytest.raises(RemoteError, match=r"cannot listen on 192\.0\.2\.1"):
        start()


def test_nothing_is_left(alone):
    _, host, _ = alone
    before = len(os.listdir("/proc/self/fd"))
    others = {each.pid for each in programs.children_of(psutil.Process(), recursive=True)}
    with start(workers=2) as manager:
        manager.reset(ALL, [episode(1)] * 4)
        manager.step(ALL, actions(4))
    assert len(os.listdir("/proc/self/fd")) == before
    assert {each.pid for each in programs.children_of(psutil.Process(), recursive=True)} == others
    assert psutil.pid_exists(host)


SPEC = SimulatorSpec(
    tasks={"push": "push it"},
    actions=(ActionField(name="arm", meaning="native", unit="1", low=(-1.0,), high=(1.0,)),),
    proprio_dim=3,
    max_episode_steps=5,
    control_frequency=10.0,
)
DESCRIBED = {
    "spec": dataclasses.asdict(SPEC),
    "num_envs": 2,
    "chunk_size": 1,
    "step_timeout_s": 5,
    "startup_timeout_s": 5,
}
SEEN = {"tasks": [0, 0]}
PROPRIO = np.zeros((2, 3), np.float32)


def asked(call, *answers):
    """What comes of a call to a host that gives these answers, one to each request."""

    def serve(listener):
        with listener.accept(10.0) as line:
            for answer in answers:
                Message.receive(line, timeout_s=10.0, place=own_memory)
                answer.send(line, timeout_s=10.0) if isinstance(answer, Message) else line.send(answer, timeout_s=10.0)
            line.wait(10.0)

    with Listener(HOST) as listener:
        serving = threading.Thread(target=serve, args=(listener,), daemon=True)
        serving.start()
        try:
            with RemoteManager(listener.address, timeout_s=10.0) as manager:
                return call(manager)
        finally:
            serving.join(10)


def test_odd_answers_of_a_host_are_errors_that_name_it():
    """Of another version, or of a stranger with the token: no KeyError, and nothing that is wrong is believed."""
    good = Message(DESCRIBED)
    ready = Message({**SEEN, "slots": [0, 7]}, {"proprio": PROPRIO})
    odd = {
        "no description": (None, {"arrays": []}),
        "no arrays": (None, {}),
        "no spec": (None, Message({**DESCRIBED, "spec": {}})),
        "no tasks": (None, Message({**DESCRIBED, "spec": {**DESCRIBED["spec"], "tasks": []}})),
        "texts for numbers": (None, Message({**DESCRIBED, "spec": {**DESCRIBED["spec"], "proprio_dim": "3"}})),
        "no envs": (None, Message({**DESCRIBED, "num_envs": 0})),
        "no deadline": (None, Message({**DESCRIBED, "step_timeout_s": float("1e300")})),
        "nothing seen": (lambda far: far.observe([0, 1]), good, Message()),
        "no such task": (lambda far: far.observe([0, 1]), good, Message({"tasks": [0, 99]}, {"proprio": PROPRIO})),
        "one env": (lambda far: far.observe([0, 1]), good, Message({"tasks": [0]}, {"proprio": PROPRIO[:1]})),
        "other sizes": (lambda far: far.observe([0, 1]), good, Message(SEEN, {"proprio": PROPRIO[:, :2]})),
        "other numbers": (lambda far: far.observe([0, 1]), good, Message(SEEN, {"proprio": PROPRIO.astype(int)})),
        "no results": (lambda far: far.receive([0, 1]), good, Message(SEEN, {"proprio": PROPRIO})),
        "no such envs": (lambda far: far.receive_ready(1), good, ready),
        "no value": (lambda far: far.take_work(), good, Message()),
        "three times": (lambda far: far.take_work(), good, Message({"value": [1.0, 2.0, 3.0]})),
        "a wait without an end": (lambda far: far.offload(), good, Message({"more_s": "long"})),
        "no states": (lambda far: far.get_state([0, 1]), good, Message()),
        "no error": (lambda far: far.onload(), good, Message({"error": {"kind": "WorkerDied"}})),
        "no images": (lambda far: far.render([0]), good, Message()),
    }
    faults = {}
    for name, (call, *answers) in odd.items():
        try:
            asked(call or (lambda far: far), *answers)
        except LineError as error:
            if f"the simulators at {HOST}:" not in str(error) or "cannot be understood" not in str(error):
                faults[name] = str(error)
        except Exception as error:
            faults[name] = repr(error)
        else:
            faults[name] = "believed"
    assert not faults
    seen = asked(lambda far: far.observe([0, 1]), good, Message(SEEN, {"proprio": PROPRIO}))
    assert seen.task_descriptions == ["push it", "push it"]
