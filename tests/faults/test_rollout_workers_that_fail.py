"""Runs whose rollout workers die, hang or raise, or that are ended themselves: it is said who, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import programs
import psutil
import pytest
from begun import await_rows
from processes import stop
from programs import Program, children_of

pytestmark = pytest.mark.faults

WORDS = [
    *("-m", "embodyrl", "run", "experiment/gym_pendulum", "placement.rollout.workers=2", "env.num_envs=4"),
    *("env.workers=2", "env.max_episode_steps=40", "rollout.num_chunks=8", "model.hidden_sizes=[8]"),
    *(
        "run.eval_every=0",
        "run.save_every=1",
        "run.iterations=100000",
        "tracking.sinks=[jsonl]",
        "tracking.report=false",
    ),
    *("algorithm.minibatches=2", "algorithm.epochs=1"),
]


class Started:
    """A run that has begun to learn."""

    def __init__(self, path: Path, process: Program) -> None:
        self.path = path
        self.process = process
        own = psutil.Process(process.pid)
        self.everyone = children_of(own, recursive=True)
        self.workers = sorted(children_of(own), key=lambda each: each.create_time())
        assert len(self.workers) == 2 and len(self.everyone) >= 4

    def ending(self, within_s: float) -> tuple[int, str]:
        """Exit code and stderr, once it has ended and every process with it."""
        _, err = self.process.communicate(timeout=within_s)
        assert not psutil.wait_procs(self.everyone, timeout=60)[1], "processes are left"
        return self.process.returncode, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    running: list[Program] = []

    def begin(*words: str) -> Started:
        path = tmp_path / "run"
        process = Program([*WORDS, f"run.dir={path}", *words], stdout=-1, stderr=-1, text=True)
        running.append(process)
        await_rows(process, path)
        return Started(path, process)

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_a_worker_that_is_killed_is_named(start: Callable[..., Started]) -> None:
    run = start()
    run.workers[1].kill()
    code, err = run.ending(within_s=5)
    assert code == 1 and "Traceback" not in err
    assert "error: rollout worker" in err and f"(pid {run.workers[1].pid}, envs" in err
    assert "was killed by SIGKILL" in err
    assert f"pid {run.workers[1].pid}" in (run.path / "run.log").read_text().splitlines()[-1]


KILLED_MEANWHILE = """
import os, signal, sys
from embodyrl.cli.main import main
from embodyrl.runner import disaggregated

map_rollout = disaggregated.map_rollout

def killing(shared, *arguments, **options):
    pid = int(shared.address.split("/")[2])
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    print("killed", pid, file=sys.stderr)
    return map_rollout(shared, *arguments, **options)

disaggregated.map_rollout = killing
main()
"""


def test_a_worker_that_is_killed_while_its_rollout_is_mapped_is_named(tmp_path: Path) -> None:
    _, _, *words = WORDS
    done = programs.run(["-c", KILLED_MEANWHILE, *words, f"run.dir={tmp_path / 'run'}"], timeout=240)
    pid = re.search(r"^killed (\d+)$", done.stderr, re.MULTILINE)
    assert pid and done.returncode == 1, done.stderr
    assert re.search(rf"error: rollout worker .*\(pid {pid[1]}, envs.*was killed by SIGKILL", done.stderr), done.stderr


def test_a_worker_that_hangs_is_named_when_time_is_up_with_what_it_was_doing(start: Callable[..., Started]) -> None:
    run = start("placement.rollout.timeout_s=10")  # also for its start
    stop(run.workers[0].pid)
    code, err = run.ending(within_s=25)
    assert (
        code == 1
        and f"pid {run.workers[0].pid}" in err
        and re.search("did not answer '(collect|state)' within 10 s", err)
    )


def test_what_a_worker_raises_is_told_and_names_both_processes(start: Callable[..., Started]) -> None:
    run = start("rollout.mode=async")
    simulator = children_of(run.workers[0])[0]
    simulators = {each.pid for each in children_of(run.workers[0], recursive=True)}
    simulator.kill()
    code, err = run.ending(within_s=10)
    assert code == 1 and "Traceback" not in err
    assert f"(pid {run.workers[0].pid}, envs" in err and "' raised WorkerDied: env worker" in err
    assert any(f"pid {pid}" in err for pid in simulators)


def test_a_request_to_stop_is_heard_and_saved_and_a_kill_leaves_nothing(start: Callable[..., Started]) -> None:
    run = start("rollout.mode=async")
    for each in [run.process, *run.everyone]:  # as a terminal or a batch system does
        os.kill(each.pid, signal.SIGTERM)
    code, _ = run.ending(within_s=20)
    assert code == 143 and (run.path / "summary.json").exists()
    again = Program(["-m", "embodyrl", "resume", str(run.path)], stdout=-1, stderr=-1, text=True)
    await_rows(again, run.path, len((run.path / "metrics.jsonl").read_text().splitlines()) + 2)
    started = Started(run.path, again)
    again.kill()
    assert started.ending(within_s=10)[0] == -signal.SIGKILL
