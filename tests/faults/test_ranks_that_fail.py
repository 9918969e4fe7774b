"""Rows 10, 12, 13 and 32 of the fault matrix for runs of two ranks: the one that is gone is named, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from begun import await_rows
from programs import Program, children_of

pytestmark = pytest.mark.faults

SMALL = [
    "env.num_envs=4",
    "env.workers=2",
    "env.max_episode_steps=40",
    "rollout.num_chunks=8",
    "algorithm.epochs=1",
    "algorithm.minibatches=2",
    "model.hidden_sizes=[8]",
    "run.eval_every=0",
    "run.iterations=100000",
    "tracking.sinks=[jsonl]",
    "tracking.report=false",
]
OWN = ("-m", "embodyrl", "run", "experiment/gym_pendulum", "engine.parallel.world_size=2")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", *OWN[:4])


@dataclass
class Started:
    """A run of two ranks that has begun to learn."""

    path: Path
    process: Program
    ranks: list[psutil.Process]
    everyone: list[psutil.Process]

    def ending(self) -> tuple[int, str]:
        """Exit code and stderr, once it has ended and every process with it."""
        _, err = self.process.communicate(timeout=240)
        assert not psutil.wait_procs(self.everyone, timeout=60)[1], "processes are left"
        return self.process.returncode, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    running: list[Program] = []

    def begin(*command: str) -> Started:
        path = tmp_path / "run"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = [*command, *SMALL, f"run.dir={path}"]
        process = Program(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        running.append(process)
        await_rows(process, path)
        first = psutil.Process(process.pid)
        children = children_of(first, recursive=True)
        if command[:4] == OWN[:4]:
            ranks = [first, *(each for each in children if each.name() == "rank 1")]
        else:
            ranks = sorted(
                (each for each in children if "run" in each.cmdline()), key=lambda each: int(each.environ()["RANK"])
            )
        assert len(ranks) == 2
        return Started(path, process, ranks, children)

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_a_killed_rank_is_named_and_the_run_fails(start: Callable[..., Started]) -> None:
    run = start(*OWN)
    run.ranks[1].kill()
    code, err = run.ending()
    assert code == 1 and "Traceback" not in err
    assert f"error: rank 1 (pid {run.ranks[1].pid}) was killed by SIGKILL" in err
    assert "rank 1" in (run.path / "run.log").read_text().splitlines()[-1]
    assert not (run.path / ".ranks").exists()


def test_a_rank_whose_simulator_died_is_quoted(start: Callable[..., Started]) -> None:
    run = start(*OWN)
    victim = next(each for each in run.everyone if is_worker(each, run.ranks[1]))
    victim.kill()
    code, err = run.ending()
    assert code == 1 and f"rank 1 (pid {run.ranks[1].pid}) exited with code 1" in err
    assert f"pid {victim.pid}" in err and "SIGKILL" in err, "what the rank itself said"


def is_worker(process: psutil.Process, rank: psutil.Process) -> bool:
    """Whether a process simulates for a rank."""
    return process.is_running() and rank in process.parents() and not children_of(process)


def test_a_hung_rank_is_named_when_time_is_up(start: Callable[..., Started]) -> None:
    run = start(*OWN, "engine.parallel.timeout_s=3")
    run.ranks[1].suspend()
    code, err = run.ending()
    assert code == 1
    assert f"rank 1 (pid {run.ranks[1].pid}) did not answer within 3 s" in err and "engine.parallel.timeout_s" in err


def test_ranks_die_with_the_first_one(start: Callable[..., Started]) -> None:
    run = start(*OWN)
    run.ranks[0].kill()
    assert run.ending()[0] == -signal.SIGKILL


@pytest.mark.slow  # torchrun starts interpreters
def test_the_others_name_a_rank_that_torchrun_started(start: Callable[..., Started]) -> None:
    run = start(*TORCHRUN)
    run.ranks[1].kill()
    code, err = run.ending()
    assert code == 1
    assert f"rank 0 cannot continue: rank 1 (pid {run.ranks[1].pid}) ended" in err


def test_a_signal_to_any_rank_stops_all_and_is_saved(start: Callable[..., Started]) -> None:
    run = start(*OWN)
    run.ranks[1].send_signal(signal.SIGTERM)
    code, err = run.ending()
    assert code == 143, err
    assert (run.path / "checkpoints" / "last" / "manifest.json").is_file()
