"""The same YAML gives the same numbers on this machine and on two, whoever plays where, and after one was lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import programs
import pytest
from raylets import ADDRESS, HEAD, OTHER, Raylets, left_over, of_runs
from safetensors.torch import load_file
from small_runs import Run

BASE = [
    *("experiment/gym_pendulum", "run.iterations=3", "run.eval_every=0", "run.save_every=1", "eval.episodes=4"),
    *("env.num_envs=4", "env.workers=2", "env.max_episode_steps=40", "rollout.blocks=2", "rollout.num_chunks=64"),
    "tracking.sinks=[console,jsonl]",
    "tracking.report=false",
]
ON_RAY = ["placement.backend=ray", f"placement.address={ADDRESS}"]
WORKERS = ["placement.rollout.workers=2"]
RANKS = ["engine.parallel.world_size=2"]
SEPARATE = [*WORKERS, *RANKS, "rollout.mode=async", "tracking.video.episodes=2"]
REPLAY = (
    *("algorithm=sac", "model.head=squashed", "rollout.num_chunks=16", "algorithm.off_policy.batch_size=32"),
    *("algorithm.off_policy.replay.start_after=100", "algorithm.off_policy.replay.capacity=400"),
    "algorithm.off_policy.critics.hidden_sizes=[16]",
)
HYBRID = ["placement.simulators.nodes=b"]
LONG = ["run.iterations=24"]
MINUTES = pytest.mark.by_hand(reason="runs on clusters cost minutes, and each part of this has a smaller test here")


def program(run_dir: Path, *settings: str, command: str = "run", fresh: bool = False) -> subprocess.Popen[str]:
    """Start a program; `fresh`: as an interpreter, which says how much torch may talk before it loads it,
    and is loading it when a signal comes early."""
    words = [*BASE, f"run.dir={run_dir}"] if command == "run" else [str(run_dir)]
    words = ["-m", "embodyrl", command, *words, *settings]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": run_dir.parent}
    if fresh:
        return subprocess.Popen([sys.executable, *words], **streams)
    # `of_runs` finds interpreters by their command lines.
    on_ray = command == "resume" or ON_RAY[0] in settings
    return programs.Program(words, children="fresh" if on_ray else "warm", **streams)


def finished(running: subprocess.Popen[str], code: int = 0) -> str:
    said, _ = running.communicate(timeout=240)
    assert running.returncode == code, said
    return said


def results(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Metrics but times and what is sent to other machines, and weights."""
    weights = load_file(run_dir / "checkpoints/last/policy/model.safetensors")
    metrics = [
        {name: row[name] for name in row if not name.startswith("traffic/") and not name.endswith("waited_s")}
        for row in Run(run_dir).metrics()
    ]
    return metrics, {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of runs on this machine alone, by their settings."""

    @cache
    def run(*settings: str) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
        run_dir = tmp_path_factory.mktemp("here") / "run"
        finished(program(run_dir, *settings))
        return results(run_dir)

    return run


@pytest.mark.parametrize("more", [(), pytest.param(REPLAY, marks=MINUTES)], ids=["newest", "replay"])
def test_two_machines_give_the_numbers_of_one(
    more: tuple[str, ...], raylets: Raylets, here: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    said = finished(program(run_dir, *ON_RAY, *SEPARATE, *more, fresh=True))
    assert f"processes  {HEAD}: rank 0" in said and f"processes  {OTHER}: " in said
    assert "(raylet)" not in said and "[W" not in said
    assert results(run_dir) == here(*SEPARATE, *more)
    assert (run_dir / "videos/iteration_000003.mp4").exists()


@MINUTES
def test_ranks_of_two_machines_stop_at_a_signal_and_go_on_from_what_was_saved(
    raylets: Raylets, here: Any, tmp_path: Path
) -> None:
    run_dir, iterations = tmp_path / "run", "run.iterations=10"
    running = program(run_dir, *ON_RAY, *RANKS, iterations, fresh=True)
    wait_for(run_dir, 3)
    running.terminate()
    said = finished(running, code=143)
    assert f"processes  {HEAD}: rank 0" in said and f"{OTHER}: rank 1" in said
    assert "(raylet)" not in said and "[W" not in said and "Traceback" not in said
    finished(program(run_dir, command="resume"))
    assert results(run_dir) == here(*RANKS, iterations)


def wait_for(run_dir: Path, iterations: int) -> None:
    deadline, metrics = time.monotonic() + 240, run_dir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < iterations:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@MINUTES
def test_a_run_that_loses_its_simulators_is_resumed_to_the_same_end(
    raylets: Raylets, here: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    running = program(run_dir, *ON_RAY, *HYBRID, *LONG)
    wait_for(run_dir, 3)
    raylets.kill_other()
    said = finished(running, code=1)
    assert f"error: machine {OTHER} is lost, with simulator host 0: Ray there does not answer any more" in said
    assert "Traceback" not in said and "(raylet)" not in said
    assert left_over() == []
    raylets.add_other()
    finished(program(run_dir, command="resume"))
    assert results(run_dir) == here(*LONG)


def test_a_run_plans_again_on_what_is_left(raylets: Raylets, here: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    running = program(run_dir, *ON_RAY, *WORKERS, *LONG, "placement.on_loss=resume")
    wait_for(run_dir, 3)
    raylets.kill_other()
    said = finished(running)
    raylets.add_other()
    assert f"warning: machine {OTHER} is lost, with rollout worker 1" in said
    assert f"placement.on_loss is resume: continuing from {run_dir}/checkpoints/0000" in said
    assert results(run_dir) == here(*LONG)


def test_a_worker_elsewhere_that_is_killed_is_named_and_nothing_is_left(raylets: Raylets, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    running = program(run_dir, *ON_RAY, *WORKERS, *LONG)
    wait_for(run_dir, 2)
    [worker] = [each for each in of_runs() if "rollout worker 1 on" in " ".join(each.cmdline())]
    worker.kill()
    said = finished(running, code=1)
    assert f"error: rollout worker 1 on machine {OTHER} (pid {worker.pid}" in said
    assert "was killed by SIGKILL" in said
    assert left_over() == []


def test_a_signal_while_a_run_starts_ends_it_and_leaves_nothing(raylets: Raylets, tmp_path: Path) -> None:
    running = program(tmp_path / "run", *ON_RAY, *WORKERS, *LONG, fresh=True)
    assert running.stdout is not None
    while "starting" not in running.stdout.readline():
        assert running.poll() is None
    time.sleep(0.5)  # it waits for Ray
    running.terminate()
    said = finished(running, code=143)
    assert said.endswith("stopped by SIGTERM\n") and "Traceback" not in said and "***" not in said
    assert left_over() == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["placement.address=127.0.0.2:6398"], "no Ray cluster answers at 127.0.0.2:6398: on the machine that is to"),
        (["placement.ranks.nodes=b"], f"the first rank is this process, on machine {HEAD}, but the ranks belong on"),
    ],
)
def test_what_a_cluster_does_not_have_is_said_at_once(
    settings: list[str], message: str, raylets: Raylets, tmp_path: Path
) -> None:
    said = finished(program(tmp_path / "run", *ON_RAY, *settings), code=2)
    assert f"error: {message}" in said and "Traceback" not in said


def test_a_plan_shows_the_machines(raylets: Raylets, tmp_path: Path) -> None:
    words = ["-m", "embodyrl", "plan", *BASE, *ON_RAY, *HYBRID]
    done = programs.run(words, env=os.environ | {"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert f"{HEAD}  rank 0 (blocks 0-1)" in done.stdout and f"{OTHER}  simulators of rank 0" in done.stdout
    assert "simulators send observations of" in done.stdout
