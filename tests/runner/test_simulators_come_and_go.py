"""Whole runs whose simulator processes die in between (env.on_worker_death)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import programs
import pytest

MORTAL = """
plugins: [counter_simulator]
seed: 1
run: {dir: out, iterations: 2, eval_every: 0, save_every: 0}
env: {name: mortal, tasks: [count], num_envs: 2, workers: 2, max_episode_steps: 5, on_worker_death: %s}
eval: {episodes: 4}
model: {name: mlp, hidden_sizes: [8]}
rollout: {num_chunks: 8}
algorithm: {name: ppo, minibatches: 2, epochs: 1}
tracking: {sinks: [jsonl], report: false}
"""


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
def test_by_default_a_death_ends_the_run_with_its_name(tmp_path: Path) -> None:
    done = run_mortal(tmp_path, "fail")
    assert done.returncode == 1
    assert "\nerror: env worker" in done.stderr and "was killed by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.faults
def test_a_run_goes_on_after_a_death_which_counts_after_a_resume(tmp_path: Path) -> None:
    done = run_mortal(tmp_path, "restart", "env.max_restarts=1")
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "out" / "run.log").read_text()
    assert log.count("replaced a simulator process; its episodes are invalid. env worker") == 1
    assert "was killed by SIGKILL" in log
    assert deaths(tmp_path) == (2, 1)
    again = with_mortal(tmp_path, "resume", "out", "run.iterations=4")
    assert again.returncode == 1
    assert "simulator processes died 2 times in this run, and env.max_restarts is 1" in again.stderr
    more = with_mortal(tmp_path, "resume", "out", "run.iterations=4", "env.max_restarts=2")
    assert more.returncode == 0, more.stderr
    assert deaths(tmp_path) == (4, 2)


def deaths(tmp_path: Path) -> tuple[int, int]:
    """The last iteration, and the deaths that its metrics count."""
    row = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    return row["iteration"], row["env/restarts"]
