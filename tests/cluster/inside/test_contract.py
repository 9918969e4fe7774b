"""One contract for both launchers: workers of this machine, and of a cluster."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
from processes import living
from raylets import ADDRESS, HEAD, OTHER, Raylets, of_runs

from embodyrl.config import load_config
from embodyrl.placement.cluster import ClusterError, RayCluster
from embodyrl.placement.launcher import Launcher, MachineLost, RemoteError, Worker, WorkerDied, WorkerTimeout
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.plan import WorkerSpec
from embodyrl.placement.ray import RayLauncher
from embodyrl.placement.run_plan import Plan, plan_run
from embodyrl.placement.topology import Gpu

SERVICES = Path(__file__).parents[2] / "placement"
sys.path.append(str(SERVICES))

from placement_services import MarksItsEnd, Notified, Service  # noqa: E402

Start = Callable[..., list[Worker]]


@pytest.fixture(scope="module")
def cluster(raylets: Raylets) -> Iterator[RayCluster]:
    with RayCluster(ADDRESS, timeout_s=60) as joined:
        joined.machines()
        yield joined


@pytest.fixture(scope="module", params=["local", "ray"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    with ExitStack() as stack:
        own: Launcher
        if request.param == "local":
            stack.enter_context(programs.fresh_children())  # which `of_runs` finds by their command lines
            own = LocalLauncher(plugin_path=str(SERVICES))
        else:
            own = RayLauncher(request.getfixturevalue("cluster"), plugin_path=str(SERVICES))
        stack.callback(own.close)
        yield own


def specs(launcher: Launcher, count: int) -> list[WorkerSpec]:
    """The first beside us, the second on the other machine, and so on."""
    hosts = [HEAD, OTHER] if isinstance(launcher, RayLauncher) else [""]
    return [WorkerSpec(role="test", rank=rank, machine=hosts[rank % len(hosts)]) for rank in range(count)]


@pytest.fixture(scope="module")
def pair(launcher: Launcher) -> list[Worker]:
    """Two workers that no test ends."""
    return launcher.start(specs(launcher, 2), Service, [(0,), (1,)], timeout=240)


@pytest.fixture
def victim(launcher: Launcher) -> Iterator[Worker]:
    """A worker, on the other machine if there is one."""
    [worker] = launcher.start(specs(launcher, 2)[1:], Service, [(1,)], timeout=240)
    yield worker
    launcher.stop([worker])


def call(launcher: Launcher, worker: Worker, method: str, *args: object, timeout: float = 60.0) -> Any:
    return launcher.gather([worker.request(method, *args)], timeout=timeout)[0]


def name(launcher: Launcher, worker: Worker) -> str:
    where = f" on machine {worker.spec.machine}" if isinstance(launcher, RayLauncher) else ""
    return f"test worker {worker.spec.rank}{where} (pid {worker.pid})"


def test_results_come_in_the_order_of_the_requests(launcher: Launcher, pair: list[Worker]) -> None:
    requests = [pair[1].request("slow_echo", "a", 0.2), pair[0].request("echo", None), pair[1].request("echo", "c")]
    assert launcher.gather(requests, timeout=240) == ["a", None, "c"]
    first, second = pair[0].request("echo", 1), pair[0].request("echo", 2)
    assert launcher.gather([second], timeout=240) == [2] and launcher.gather([first], timeout=60) == [1]
    assert call(launcher, pair[1], "echo", 3, timeout=math.inf) == 3


def test_workers_are_where_the_plan_says(launcher: Launcher, pair: list[Worker]) -> None:
    assert len({worker.pid for worker in pair}) == 2
    raylets = [each.pid for each in psutil.process_iter(["name"]) if each.info["name"] == "raylet"]
    if isinstance(launcher, RayLauncher):
        above = [{each.pid for each in psutil.Process(worker.pid).parents()} & set(raylets) for worker in pair]
        assert len(above[0]) == len(above[1]) == 1 and above[0] != above[1]


def test_waiting_for_any_leaves_the_rest_under_way(launcher: Launcher, pair: list[Worker]) -> None:
    slow, quick = pair[0].request("slow_echo", "slow", 1.0), pair[1].request("echo", "quick")
    assert not pair[0].is_idle
    assert launcher.wait_any([slow, quick]) == [quick]
    assert launcher.gather([quick], timeout=240) == ["quick"]
    assert launcher.wait_any([slow]) == [slow] and launcher.gather([slow], timeout=240) == ["slow"]
    assert pair[0].is_idle


def test_exceptions_are_told_and_late_replies_dropped(launcher: Launcher, pair: list[Worker]) -> None:
    requests = [pair[1].request("fail", "early"), pair[0].request("slow_echo", "late", 0.5)]
    with pytest.raises(RemoteError) as caught:
        launcher.gather(requests, timeout=240)
    error = caught.value
    assert (error.role, error.rank, error.pid, error.type_name) == ("test", 1, pair[1].pid, "KeyError")
    assert str(error).startswith(f"{name(launcher, pair[1])}: 'fail' raised KeyError: 'early'\n")
    assert "placement_services.py" in error.remote_traceback and not error.is_user_error
    assert call(launcher, pair[0], "echo", "new") == "new"
    failing = pair[0].request("fail", "twice")
    for take in (launcher.wait_any, launcher.wait_any, lambda requests: launcher.gather(requests, timeout=240)):
        with pytest.raises(RemoteError, match="KeyError: 'twice'"):
            launcher.gather(take([failing]), timeout=240)
    with pytest.raises(RemoteError, match="has no attribute 'no_such'"):
        call(launcher, pair[0], "no_such")
    with pytest.raises(RemoteError, match="not a public method"):
        call(launcher, pair[0], "_hidden")


def test_a_worker_that_lives_is_looked_at_in_no_time(launcher: Launcher, pair: list[Worker]) -> None:
    times = []
    for _ in range(50):
        start = time.perf_counter()
        pair[1].raise_if_dead()
        times.append(time.perf_counter() - start)
    assert sorted(times)[25] < 2e-2


def test_file_descriptors_do_not_travel_between_machines(
    launcher: Launcher, pair: list[Worker], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with (tmp_path / "file").open("rb") as file:
        if isinstance(launcher, LocalLauncher):
            assert launcher.gather([pair[0].request("read", fds=[file.fileno()])], timeout=240) == [b"content"]
            return
        with pytest.raises(TypeError, match="is not on this machine: it cannot be given file descriptors"):
            pair[0].request("read", fds=[file.fileno()])


def test_a_ring(launcher: Launcher) -> None:
    [worker] = launcher.start(specs(launcher, 1), Notified, [(0,)], timeout=240)
    call(launcher, worker, "prepare", "fail", "rung")
    with pytest.raises(RemoteError, match="raised KeyError: 'rung'"):
        launcher.gather([worker.notify("step")], timeout=240)
    launcher.stop([worker])


def test_a_hang_ends_at_the_deadline_with_stacks(launcher: Launcher, victim: Worker) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match="did not answer 'hang' within 1 s and was killed") as caught:
        launcher.wait_any([victim.request("hang", timeout=1.0)])
    assert time.monotonic() - start < 30.0
    assert "placement_services.py" in str(caught.value) and str(caught.value).startswith(name(launcher, victim))
    assert not psutil.pid_exists(victim.pid)


def test_a_hang_ends_when_those_who_wait_give_up(launcher: Launcher, victim: Worker) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match="did not answer 'hang' within 1 s and was killed"):
        launcher.gather([victim.request("hang")], timeout=1.0)
    assert time.monotonic() - start < 30.0
    _, alive = psutil.wait_procs(living([victim.pid]), timeout=60)
    assert not alive


@pytest.mark.parametrize("idle", [False, True], ids=["busy", "idle"])
def test_a_death_is_told_at_once(launcher: Launcher, victim: Worker, idle: bool) -> None:
    request = None if idle else victim.request("hang")
    time.sleep(0.3)
    os.kill(victim.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerDied, match="was killed by SIGKILL") as caught:
        while idle:
            victim.raise_if_dead()
            time.sleep(0.01)
        assert request is not None
        launcher.gather([request], timeout=240)
    assert time.monotonic() - start < 30.0
    assert not isinstance(caught.value, MachineLost) and str(caught.value).startswith(name(launcher, victim))
    for _ in range(2):
        with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
            call(launcher, victim, "echo", 1)


def test_an_exit_names_code_and_output(launcher: Launcher, victim: Worker) -> None:
    with pytest.raises(WorkerDied) as caught:
        call(launcher, victim, "leave", 7)
    assert str(caught.value).startswith(f"{name(launcher, victim)} exited with code 7 during 'leave'")
    assert str(caught.value).endswith("out of here\nfor good")


def test_what_fails_at_the_start_leaves_nobody(launcher: Launcher) -> None:
    before = of_runs()
    with pytest.raises(RemoteError, match=r"'start' raised TypeError: .*missing 1 required positional argument"):
        launcher.start(specs(launcher, 2), Service, [(0,), ()], timeout=240)
    deadline = time.monotonic() + 240
    while left := [each for each in of_runs() if each not in before]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_start_has_a_deadline(launcher: Launcher, fresh_children: None) -> None:
    with pytest.raises(WorkerTimeout, match=r"did not answer 'start' within 0\.01 s|was not started"):
        launcher.start(specs(launcher, 1), Service, [(0,)], timeout=0.01)


def test_stopping_lets_the_service_close(launcher: Launcher, tmp_path: Path) -> None:
    workers = launcher.start(specs(launcher, 1), MarksItsEnd, [(str(tmp_path / "mark"),)], timeout=240)
    launcher.stop(workers)
    assert (tmp_path / "mark").read_text() == "closed"
    assert not psutil.pid_exists(workers[0].pid)
    with pytest.raises(WorkerDied, match="has been closed"):
        workers[0].request("echo", 1)


# ---- a cluster alone


def plan_of(cluster: RayCluster, *settings: str, ranks: int = 1) -> Any:
    config = load_config(
        "experiment/gym_pendulum", [f"placement.address={ADDRESS}", "placement.backend=ray", *settings]
    )
    return plan_run(config.config, cluster.machines(), ranks)


def test_machines_come_with_labels_and_this_one_first(cluster: RayCluster) -> None:
    found = cluster.machines()
    assert [(each.name, each.labels, each.address) for each in found] == [(HEAD, ("a",), HEAD), (OTHER, ("b",), OTHER)]
    assert all(each.inventory.cores == found[0].inventory.cores for each in found)


def test_a_reservation_is_one_group_that_is_given_back(cluster: RayCluster) -> None:
    from ray.util import placement_group_table

    def groups() -> list[Any]:
        return [each for each in placement_group_table().values() if each["state"] == "CREATED"]

    cluster.reserve(plan_of(cluster, "placement.rollout.workers=2", "placement.simulators.nodes=b"), timeout_s=30)
    [group] = groups()
    assert len(group["bundles"]) == 5
    cluster.give_back()
    assert groups() == []


def test_what_there_is_no_room_for_is_said_at_the_deadline(raylets: Raylets) -> None:
    import ray

    with RayCluster(ADDRESS, timeout_s=60) as cluster:
        other = ray.util.placement_group([{"CPU": 4.0, f"node:{OTHER}": 0.5}])
        assert other.wait(30)
        plan = plan_of(cluster, "placement.simulators.nodes=b")
        with pytest.raises(ClusterError, match=rf"no room .* 1 s \(CPU of machine {OTHER}: 0 free, 3 wanted\): wait"):
            cluster.reserve(plan, timeout_s=1.0)
        ray.util.remove_placement_group(other)


PROGRAM = """
import sys, time
from embodyrl.placement.cluster import RayCluster
from embodyrl.placement.ray import RayLauncher
from embodyrl.placement.plan import WorkerSpec
sys.path.append({services!r})
from placement_services import Service
with RayCluster({address!r}, timeout_s=60) as cluster:
    launcher = RayLauncher(cluster, plugin_path={services!r})
    workers = launcher.start([WorkerSpec(role="test", rank=0, machine=host) for host in {hosts!r}], Service,
                             [(0,), (1,)], timeout=240)
    print(*(worker.pid for worker in workers), flush=True)
    try:
        launcher.gather([worker.request("hang", timeout=1000.0) for worker in workers], timeout=1000.0)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.fixture
def program(raylets: Raylets) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A program with a worker on each machine, which hang, and their ids."""
    text = PROGRAM.format(services=str(SERVICES), address=ADDRESS, hosts=[HEAD, OTHER])
    running = programs.Program(["-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    yield running, [int(word) for word in running.stdout.readline().split()]
    running.kill()
    running.communicate()


def test_workers_end_with_their_program(program: tuple[subprocess.Popen[str], list[int]]) -> None:
    running, pids = program
    children = [psutil.Process(pid) for pid in pids]
    running.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_a_ray_actor_that_is_killed_is_no_lost_machine(program: tuple[subprocess.Popen[str], list[int]]) -> None:
    running, pids = program
    child = psutil.Process(pids[1])
    actor = child.parent()
    assert actor is not None
    actor.kill()
    said, _ = running.communicate(timeout=240)
    assert f"WorkerDied test worker 0 on machine {OTHER} (pid {pids[1]}) ended during 'hang', because the Ray" in said
    _, alive = psutil.wait_procs(living(pids), timeout=60)
    assert not alive


def test_a_lost_machine_is_named_and_ray_does_not_talk(
    raylets: Raylets, program: tuple[subprocess.Popen[str], list[int]]
) -> None:
    running, pids = program
    raylets.kill_other()
    said, _ = running.communicate(timeout=240)
    raylets.add_other()
    assert said == f"MachineLost machine {OTHER} is lost, with test worker 0: Ray there does not answer any more\n"
    _, alive = psutil.wait_procs(living(pids), timeout=60)
    assert not alive


def test_gpus_are_those_that_ray_gives(raylets: Raylets) -> None:
    raylets.kill_other()
    raylets.add_other(gpus=2)
    gpus = [Gpu(index=number, address=f"0000:0{number}:00.0", uuid=f"GPU-{number}", node=None) for number in range(2)]
    apart = [
        WorkerSpec(
            role=role,
            rank=rank,
            machine=OTHER,
            gpus=(gpus[gpu],),
            env_vars={"CUDA_VISIBLE_DEVICES": gpus[gpu].uuid or ""},
        )
        for role, rank, gpu in (("rank", 1, 0), ("rollout", 0, 1), ("rollout", 1, 0))
    ]
    first = WorkerSpec(role="rank", rank=0, machine=HEAD)
    with RayCluster(ADDRESS, timeout_s=60) as cluster:
        machines = cluster.machines()
        cluster.reserve(Plan(specs=(first, *apart), machines=tuple(machines)), timeout_s=30)
        launcher = RayLauncher(cluster, plugin_path=str(SERVICES))
        workers = launcher.start(apart, Service, [(0,)] * 3, timeout=240)
        shown = [call(launcher, worker, "environment", "CUDA_VISIBLE_DEVICES") for worker in workers]
        # Those that the plan puts on one GPU share one, whichever Ray gives them; the third has the other.
        assert shown[0] == shown[2] and {shown[0], shown[1]} == {"0", "1"}
        assert cluster.gpu_here is None
        launcher.close()
        cluster.give_back()
        three = [replace(apart[0], rank=rank, gpus=(replace(gpus[0], index=rank),)) for rank in range(3)]
        with pytest.raises(ClusterError, match=f"machine {OTHER} offers Ray 2 GPUs, and 3 are wanted there"):
            cluster.reserve(Plan(specs=tuple(three), machines=tuple(machines)), timeout_s=30)
