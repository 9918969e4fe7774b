"""Whole runs whose simulator processes end in between: on purpose (env.offload), or by dying (env.on_worker_death)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import programs
import pytest
from small_runs import Run

from embodyrl.cli import train

MORTAL = """
plugins: [counter_simulator]
seed: 1
run: {dir: out, iterations: 3, eval_every: 0, save_every: 0}
env: {name: mortal, tasks: [count], num_envs: 2, workers: 2, max_episode_steps: 5, on_worker_death: %s}
eval: {episodes: 4}
model: {name: mlp, hidden_sizes: [8]}
rollout: {num_chunks: 8}
algorithm: {name: ppo, minibatches: 2, epochs: 1}
tracking: {sinks: [jsonl], report: false}
"""


def without_memory(run: Run) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if not key.startswith("memory/")} for row in run.metrics()]


def test_a_run_that_offloads_learns_the_same_and_says_what_it_frees(
    small_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = small_run("plain", "run.iterations=3")
    offloading = small_run("offloading", "run.iterations=3", "env.offload=true")
    assert without_memory(offloading) == plain.metrics()
    assert offloading.digest(3, "policy/model.safetensors") == plain.digest(3, "policy/model.safetensors")
    freed = [row["memory/simulators_freed_mib"] for row in offloading.metrics() if row["iteration"]]
    assert len(freed) == 3 and all(15 < each < 2000 for each in freed)
    log = (offloading.path / "run.log").read_text()
    assert log.count("offload: the simulators are gone while the policy learns, which frees") == 1


def test_a_run_that_offloads_resumes_bit_for_bit(small_run: Callable[..., Run]) -> None:
    whole = small_run("whole", "env.offload=true")
    parted = small_run("parted", "env.offload=true", "run.iterations=3")
    assert train.resume(parted.path, ["run.iterations=6"]) == 0
    assert Run(parted.path).digest(6, "policy/model.safetensors") == whole.digest(6, "policy/model.safetensors")
    assert Run(parted.path).summary["evaluations"]["6"] == whole.summary["evaluations"]["6"]


def run_mortal(tmp_path: Path, policy: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """`embodyrl run` with a simulator that dies once."""
    shutil.copy(Path(__file__).parents[1] / "rollout" / "counter_simulator.py", tmp_path)
    (tmp_path / "mortal.yaml").write_text(MORTAL % policy)
    return with_mortal(tmp_path, "run", "mortal.yaml", *overrides)


def with_mortal(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the program, during which the simulator dies once."""
    (tmp_path / "alive").touch()
    environment = {**os.environ, "MORTAL": str(tmp_path / "alive")}
    return programs.run(["-m", "embodyrl", *arguments], cwd=tmp_path, env=environment, timeout=300)


@pytest.mark.faults
def test_a_run_goes_on_after_a_death_and_tells(tmp_path: Path) -> None:
    done = run_mortal(tmp_path, "restart")
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "out" / "run.log").read_text()
    assert log.count("replaced a simulator process; its episodes are invalid. env worker") == 1
    assert "was killed by SIGKILL" in log
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["iteration"] == 3 and rows[-1]["env/restarts"] == 1


@pytest.mark.faults
def test_by_default_a_death_ends_the_run_with_its_name(tmp_path: Path) -> None:
    done = run_mortal(tmp_path, "fail")
    assert done.returncode == 1
    assert "\nerror: env worker" in done.stderr and "was killed by SIGKILL" in done.stderr


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_what_died_before_a_resume_counts_after_it(tmp_path: Path) -> None:
    assert run_mortal(tmp_path, "restart", "env.max_restarts=1", "run.iterations=2").returncode == 0
    again = with_mortal(tmp_path, "resume", "out", "run.iterations=4")
    assert again.returncode == 1
    assert "simulator processes died 2 times in this run, and env.max_restarts is 1" in again.stderr
    more = with_mortal(tmp_path, "resume", "out", "run.iterations=4", "env.max_restarts=2")
    assert more.returncode == 0, more.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["iteration"] == 4 and rows[-1]["env/restarts"] == 2
