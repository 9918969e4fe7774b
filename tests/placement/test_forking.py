"""Workers that are forked from a process which has imported what they need."""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from placement_services import Service

from embodyrl.placement.launcher import RemoteError, WorkerDied
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.plan import WorkerSpec
from embodyrl.placement.process import ForkedProcess, Zygote, describe_exit

HERE = str(Path(__file__).parent)


def specs(count, preload, **options):
    return [WorkerSpec(role="test", rank=rank, preload=preload, **options) for rank in range(count)]


@pytest.fixture
def launcher(tmp_path):
    running = LocalLauncher(log_dir=tmp_path / "logs")
    yield running
    running.close()


def start(launcher, count=2, preload=("colorsys",), **options):
    return launcher.start(specs(count, preload, **options), Service, [(i,) for i in range(count)], timeout=240)


def call(launcher, worker, method, *args):
    return launcher.gather([worker.request(method, *args)], timeout=240)[0]


def test_workers_find_the_modules_imported_and_share_a_parent(launcher):
    workers = start(launcher)
    parents = {call(launcher, worker, "parent") for worker in workers}
    assert len(parents) == 1 and os.getpid() not in parents
    assert all("colorsys" in call(launcher, worker, "modules") for worker in workers)


def test_a_function_of_a_module_can_be_called_before_forking(launcher, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    (worker,) = start(launcher, 1, ("fake_machine", "asyncio:new_event_loop"))
    assert {"fake_machine", "asyncio"} <= set(call(launcher, worker, "modules"))


def test_workers_have_the_same_files_open_either_way(launcher):
    forked, spawned = start(launcher)[1], start(launcher, preload=None)[1]
    assert call(launcher, forked, "descriptors") == call(launcher, spawned, "descriptors")


def test_each_worker_has_its_own_environment_and_log(launcher, tmp_path, monkeypatch):
    monkeypatch.setenv("EMBODYRL_TEST_OLD", "1")
    launched = [
        WorkerSpec(role="test", rank=rank, preload=(), env_vars={"EMBODYRL_TEST": str(rank), "EMBODYRL_SAME": "x"})
        for rank in range(2)
    ]
    workers = launcher.start(launched, Service, [(0,), (1,)], timeout=240)
    assert [call(launcher, worker, "environment", "EMBODYRL_TEST") for worker in workers] == ["0", "1"]
    assert [call(launcher, worker, "environment", "EMBODYRL_SAME") for worker in workers] == ["x", "x"]
    monkeypatch.delenv("EMBODYRL_TEST_OLD")
    monkeypatch.setenv("EMBODYRL_TEST_NEW", "2")
    (late,) = launcher.start([WorkerSpec(role="test", rank=2, preload=())], Service, [(2,)], timeout=240)
    assert call(launcher, late, "environment", "EMBODYRL_TEST_OLD") is None
    assert call(launcher, late, "environment", "EMBODYRL_TEST_NEW") == "2"
    assert call(launcher, late, "parent") == call(launcher, workers[0], "parent")
    with pytest.raises(WorkerDied, match="out of here"):
        call(launcher, workers[1], "leave", 1)
    assert (tmp_path / "logs/test-1.log").read_text() == "out of here\nfor good\n"
    assert (tmp_path / "logs/test-0.log").read_text() == ""


def test_workers_do_not_draw_the_same_random_numbers(launcher):
    drawn = [call(launcher, worker, "random_numbers") for worker in start(launcher, 2, ("numpy",))]
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_names_the_signal(launcher, number):
    workers = start(launcher)
    os.kill(workers[0].pid, number)
    with pytest.raises(WorkerDied, match=f"was killed by {number.name}"):
        call(launcher, workers[0], "echo", 1)
    assert not Path(f"/proc/{workers[0].pid}").exists()  # not even a zombie
    assert call(launcher, workers[1], "echo", 1) == 1


def test_the_death_of_the_common_parent_is_named(launcher):
    workers = start(launcher)
    zygote = call(launcher, workers[0], "parent")
    os.kill(zygote, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        call(launcher, workers[1], "hang")
    assert f"died with the process that it was forked from (pid {zygote}), which was killed by SIGKILL" in str(
        caught.value
    )
    again = start(launcher)  # from a new one
    assert call(launcher, again[0], "parent") != zygote


def test_no_process_is_left_when_the_last_worker_has_stopped(launcher):
    workers = start(launcher)
    zygote = call(launcher, workers[0], "parent")
    launcher.stop(workers[:1])
    assert psutil.pid_exists(zygote)
    launcher.stop(workers[1:])
    assert not any(Path(f"/proc/{pid}").exists() for pid in (zygote, *(worker.pid for worker in workers)))


def test_a_module_that_starts_threads_is_not_forked(launcher, monkeypatch, caplog):
    monkeypatch.syspath_prepend(HERE)
    workers = start(launcher, preload=("unsafe_to_fork",))
    assert {call(launcher, worker, "parent") for worker in workers} == {os.getpid()}
    (record,) = caplog.records
    assert record.getMessage() == (
        "test processes start one by one, since forking is not safe: importing unsafe_to_fork started 1 threads"
    )


def test_a_module_that_cannot_be_imported_is_left_to_the_workers(launcher, caplog):
    workers = start(launcher, preload=("no_such_module",))
    assert call(launcher, workers[0], "parent") == os.getpid()
    assert "no_such_module could not be imported (ModuleNotFoundError" in caplog.text


def test_a_module_that_kills_its_process_is_named_with_its_output(launcher, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    with pytest.raises(WorkerDied) as caught:
        start(launcher, preload=("killed_on_import",))
    text = str(caught.value)
    assert text.startswith("test worker 0 was not started: the process that workers are forked from (pid ")
    assert "was killed by SIGKILL" in text and text.endswith("here it comes")


def test_a_module_that_hangs_shows_where(launcher, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    with pytest.raises(WorkerDied, match=r"hung for 3 s and was killed") as caught:
        launcher.start(specs(1, ("hangs_on_import",)), Service, [(0,)], timeout=3)
    assert "hangs_on_import.py" in str(caught.value)


@pytest.mark.parametrize("preload", [None, ()])
def test_a_question_on_stdin_is_an_error_and_no_hang(launcher, preload):
    (worker,) = start(launcher, 1, preload)
    with pytest.raises(RemoteError, match="'read_stdin' raised EOFError"):
        call(launcher, worker, "read_stdin")


def test_the_module_path_is_the_parents(launcher):
    (worker,) = start(launcher, 1, ())
    assert HERE in sys.path and "placement_services" in call(launcher, worker, "modules")


def test_a_request_that_a_signal_interrupts_leaves_the_next_one_its_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(timeout: float) -> NoReturn:
        raise KeyboardInterrupt

    zygote = Zygote([], env=dict(os.environ), log=(tmp_path / "log").open("w+b"), timeout=240)
    ours, theirs = socket.socketpair()

    def fork() -> ForkedProcess:
        with (tmp_path / "worker").open("w+b") as log:
            return zygote.fork(os.environ, line=theirs, log=log, timeout=240)

    first = fork()
    for ask in (fork, first.kill):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(zygote, "_receive", interrupted)
            ask()
    second = fork()
    assert psutil.Process(second.pid).ppid() == zygote.pid and second.pid != first.pid
    second.kill()
    assert second.how_it_ended() == describe_exit(-signal.SIGKILL)
    first.kill()  # does nothing: its id may be another's by now
    zygote.close()
    ours.close()
    theirs.close()
