import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from placement_services import MarksItsEnd, Service, SlowToClose
from processes import living, stop

from embodyrl.placement.launcher import RemoteError, WorkerDied, WorkerTimeout
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.plan import WorkerSpec
from embodyrl.placement.topology import ROOT, allowed_cpus, read_nodes


@pytest.fixture(params=[None, ("json",)], ids=["spawn", "fork"])
def specs(request):
    """Makes specs of workers that are fresh interpreters, or forked from a process that has imported something."""

    def make(count, **options):
        return [WorkerSpec(role="test", rank=rank, **{"preload": request.param, **options}) for rank in range(count)]

    return make


@pytest.fixture
def launcher():
    running = LocalLauncher()
    yield running
    running.close()


@pytest.fixture
def pair(launcher, specs):
    return launcher.start(specs(2), Service, [(0,), (1,)], timeout=240)


def call(launcher, worker, method, *args, timeout=240, **options):
    return launcher.gather([worker.request(method, *args, **options)], timeout=timeout)[0]


def test_results_come_in_the_order_of_the_requests(launcher, pair):
    requests = [pair[1].request("slow_echo", "a", 0.1), pair[0].request("echo", None), pair[1].request("echo", "c")]
    assert launcher.gather(requests, timeout=240) == ["a", None, "c"]


def test_requests_of_one_worker_may_be_gathered_in_any_order(launcher, pair):
    first, second = pair[0].request("echo", 1), pair[0].request("echo", 2)
    assert launcher.gather([second], timeout=240) == [2]
    assert launcher.gather([first], timeout=240) == [1]


def test_messages_larger_than_any_buffer(launcher, pair):
    big = os.urandom(5_000_000)
    requests = [pair[0].request("echo", big) for _ in range(3)]  # more than the line holds, in both directions
    assert launcher.gather(requests, timeout=240) == [big] * 3


def test_file_descriptors_are_handed_over(launcher, pair, tmp_path):
    (tmp_path / "file").write_text("from the parent")
    with open(tmp_path / "file") as file:
        requests = [pair[0].request("echo", 1), pair[0].request("read", fds=[file.fileno()])]
        assert launcher.gather(requests, timeout=240) == [1, b"from the parent"]


def test_waiting_for_any_returns_what_is_there_and_leaves_the_rest_under_way(launcher, pair):
    slow, quick = pair[0].request("slow_echo", "slow", 0.5), pair[1].request("echo", "quick")
    assert launcher.wait_any([slow, quick]) == [quick]
    assert launcher.gather([quick], timeout=240) == ["quick"]
    assert launcher.wait_any([slow]) == [slow]
    assert launcher.wait_any([slow]) == [slow]
    assert launcher.gather([slow], timeout=240) == ["slow"]


def test_waiting_for_any_kills_the_worker_that_is_late_though_others_answer(launcher, pair):
    hung = pair[0].request("hang", timeout=0.5)
    with pytest.raises(WorkerTimeout, match=r"worker 0 .* did not answer 'hang' within 0\.5 s and was killed"):
        while True:
            quick = pair[1].request("echo", 1)
            assert launcher.wait_any([hung, quick]) == [quick]
            launcher.gather([quick], timeout=240)
    assert not psutil.pid_exists(pair[0].pid)
    assert call(launcher, pair[1], "echo", "fine") == "fine"


def test_a_request_is_not_late_because_of_those_before_it(launcher, pair):
    requests = [pair[0].request("slow_echo", number, 0.4, timeout=0.7) for number in range(3)]
    for request in requests:
        assert launcher.wait_any([request]) == [request]


def test_waiting_for_any_notices_a_death_and_an_exception(launcher, pair):
    hung, failing = pair[0].request("hang"), pair[1].request("fail", "lost")
    with pytest.raises(RemoteError, match="'fail' raised KeyError"):
        launcher.wait_any([hung, failing])
    os.kill(pair[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
        launcher.wait_any([hung])


def test_a_late_reply_never_answers_a_later_call(launcher, pair):
    requests = [pair[0].request("fail", "early"), pair[1].request("slow_echo", "late", 0.3)]
    with pytest.raises(RemoteError):
        launcher.gather(requests, timeout=240)
    assert call(launcher, pair[1], "echo", "new") == "new"
    assert call(launcher, pair[1], "echo", "newer") == "newer"


def test_a_reply_that_comes_after_the_deadline_answers_nothing(launcher, pair):
    with pytest.raises(WorkerTimeout):
        call(launcher, pair[0], "slow_echo", "late", 1.0, timeout=0.2)
    time.sleep(1.0)
    with pytest.raises(WorkerTimeout, match=r"did not answer 'slow_echo' within 0\.2 s and was killed"):
        call(launcher, pair[0], "echo", "new")
    assert call(launcher, pair[1], "echo", "fine") == "fine"


def test_an_exception_carries_the_remote_traceback(launcher, pair):
    with pytest.raises(RemoteError) as caught:
        call(launcher, pair[1], "fail", "lost")
    error = caught.value
    assert (error.role, error.rank, error.pid, error.type_name) == ("test", 1, pair[1].pid, "KeyError")
    assert error.remote_message == "'lost'"
    assert str(error).startswith(f"test worker 1 (pid {pair[1].pid}): 'fail' raised KeyError: 'lost'\n")
    assert "placement_services.py" in error.remote_traceback
    assert not error.is_user_error


def test_unknown_and_private_methods_are_errors(launcher, pair):
    with pytest.raises(RemoteError, match="has no attribute 'no_such'"):
        call(launcher, pair[0], "no_such")
    with pytest.raises(RemoteError, match="not a public method"):
        call(launcher, pair[0], "_hidden")


def test_an_argument_that_does_not_pickle_leaves_the_worker_in_order(launcher, pair):
    with pytest.raises(Exception, match=r"[Pp]ickle|local object"):
        pair[0].request("echo", lambda: None)
    assert call(launcher, pair[0], "echo", 1) == 1


def test_a_result_that_does_not_pickle_is_a_remote_error(launcher, pair):
    with pytest.raises(RemoteError, match="cannot pickle 'generator' object"):
        call(launcher, pair[0], "generator")


def test_an_exit_names_code_and_output(launcher, pair):
    with pytest.raises(WorkerDied) as caught:
        call(launcher, pair[0], "leave", 7)
    text = str(caught.value)
    assert text.startswith(f"test worker 0 (pid {pair[0].pid}) exited with code 7 during 'leave'")
    assert text.endswith("out of here\nfor good")


def test_the_log_file_is_named(tmp_path, specs):
    launcher = LocalLauncher(log_dir=tmp_path / "logs")
    (worker,) = launcher.start(specs(1), Service, [(0,)], timeout=240)
    with pytest.raises(WorkerDied, match=r"end of its output \(.*/logs/test-0\.log\)"):
        call(launcher, worker, "leave", 1)
    assert (tmp_path / "logs" / "test-0.log").read_text() == "out of here\nfor good\n"


def test_a_worker_that_hangs_up_is_killed(launcher, pair):
    with pytest.raises(WorkerDied, match="closed its line without ending, and was killed during 'hang_up'"):
        call(launcher, pair[0], "hang_up")


def test_a_worker_that_closes_its_line_is_named(launcher, pair):
    with pytest.raises(WorkerDied) as caught:
        call(launcher, pair[0], "close_descriptors")
    text = str(caught.value)
    assert text.startswith(f"test worker 0 (pid {pair[0].pid}) exited with code 1 during 'close_descriptors'")
    assert "file descriptors that are not its own" in text and "Traceback" not in text


@pytest.mark.parametrize("data", [b"\5\0\0\0hello", b"\x20\0\0\0" + b"\0" * 8 + b"\1" + b"no pickle at all, but 23!"])
def test_a_worker_that_sends_what_is_no_reply_is_named(launcher, pair, data):
    with pytest.raises(WorkerDied, match=r"^test worker 0 \(pid \d+\) sent what is no reply during 'write_everywhere'"):
        call(launcher, pair[0], "write_everywhere", data)
    assert not psutil.pid_exists(pair[0].pid)
    assert call(launcher, pair[1], "echo", 3) == 3


def test_a_worker_that_does_not_read_ends_at_the_deadline(launcher, pair):
    pair[0].request("hang")
    with pytest.raises(WorkerTimeout, match=r"did not answer 'echo' within 0\.5 s"):
        pair[0].request("echo", b"x" * 5_000_000, timeout=0.5)


def test_a_stopped_worker_ends_at_the_deadline(launcher, pair):
    stop(pair[0].pid)
    with pytest.raises(WorkerTimeout):
        call(launcher, pair[0], "echo", 1, timeout=0.5)
    assert not psutil.pid_exists(pair[0].pid)


def test_a_dead_worker_stays_dead(launcher, pair):
    os.kill(pair[0].pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
            call(launcher, pair[0], "echo", 1)


def test_environment_and_cpus_are_set_before_the_start(launcher, specs):
    cpu = min(os.sched_getaffinity(0))
    (worker,) = launcher.start(specs(1, cpus=(cpu,), env_vars={"EMBODYRL_TEST": "set"}), Service, [(0,)], timeout=240)
    assert call(launcher, worker, "environment", "EMBODYRL_TEST") == "set"
    assert call(launcher, worker, "cpus") == [cpu]


def test_memory_comes_from_the_node_of_the_plan(launcher, specs):
    node = read_nodes(ROOT, allowed_cpus())[0].id if Path("/sys/devices/system/node").is_dir() else None
    if node is None:
        pytest.skip("this kernel shows no NUMA nodes")
    bound, free = launcher.start(
        [*specs(1, memory_node=node), specs(2)[1]],
        Service,
        [(0,), (1,)],
        timeout=240,
    )
    preferred = 1
    assert call(launcher, bound, "memory_policy") == (preferred, [node])
    assert call(launcher, free, "memory_policy") == (0, [])


def test_a_binding_that_the_kernel_refuses_is_said_in_the_log(tmp_path, specs):
    launcher = LocalLauncher(log_dir=tmp_path)
    (worker,) = launcher.start(specs(1, memory_node=1000), Service, [(0,)], timeout=240)
    assert call(launcher, worker, "echo", 1) == 1
    launcher.close()
    assert "warning: NUMA binding failed, continuing without: " in (tmp_path / "test-0.log").read_text()
    assert "set_mempolicy for node 1000: Invalid argument" in (tmp_path / "test-0.log").read_text()


def test_close_lets_the_service_close(launcher, specs, tmp_path):
    launcher.start(specs(1), MarksItsEnd, [(str(tmp_path / "mark"),)], timeout=240)
    launcher.close()
    assert (tmp_path / "mark").read_text() == "closed"


def test_close_has_one_deadline_for_all(launcher, specs):
    workers = launcher.start(specs(3), SlowToClose, [(0,)] * 3, timeout=240)
    launcher.close(timeout=0.5)
    launcher.close()
    assert not any(psutil.pid_exists(worker.pid) for worker in workers)
    with pytest.raises(WorkerDied, match="has been closed"):
        workers[0].request("echo", 1)


def test_close_takes_the_workers_children_along(launcher, pair):
    grandchild = call(launcher, pair[0], "start_a_child")
    launcher.close()
    _, alive = psutil.wait_procs(living([grandchild]), timeout=60)
    assert not alive


def test_stop_ends_only_some(launcher, pair):
    launcher.stop([pair[0]])
    assert not psutil.pid_exists(pair[0].pid)
    assert call(launcher, pair[1], "echo", 1) == 1


def test_a_launcher_that_is_dropped_ends_its_workers(specs):
    launcher = LocalLauncher()
    (worker,) = launcher.start(specs(1), Service, [(0,)], timeout=240)
    del launcher
    assert not psutil.pid_exists(worker.pid)
