"""Whole runs with a simulator that does not come back from its saved states."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import programs
import pytest
from slow import rest_slow

pytestmark = pytest.mark.timeout(600)

PLUGIN = """
import os
import numpy as np
from embodyrl.config.schema import EnvConfig
from embodyrl.envs.base import Slot, SlotSimulator, Transition
from embodyrl.envs.types import ActionField, SimulatorSpec
from embodyrl.registry import SIMULATORS

__version__ = "1.0"
SPEED = 1.0


class Line(SlotSimulator):
    def __init__(self, config, num_slots):
        push = ActionField(name="push", meaning="normalized", unit="1", low=(-1.0,), high=(1.0,))
        spec = SimulatorSpec(tasks={"go": "go on"}, actions=(push,), proprio_dim=1,
                             max_episode_steps=config.max_episode_steps, control_frequency=1.0)
        super().__init__(spec, num_slots)

    def make_slot(self, task):
        return LineSlot()


class LineSlot(Slot):
    def reset(self, episode):
        random = np.random.default_rng(int.from_bytes(os.urandom(8)) if os.environ.get("DICE") else episode.seed)
        self.place = random.uniform()

    def step(self, action):
        self.place += SPEED * float(action[0])
        return Transition(-abs(self.place), False, False)

    def observe(self):
        return None, np.array([self.place], np.float32)


SIMULATORS.register("line", target=Line, options=EnvConfig, summary="a point on a line")
"""
CONFIG = """
plugins: [line]
seed: 1
run: {dir: out, iterations: 3, eval_every: 1, save_every: 0}
env: {name: line, tasks: [go], num_envs: 2, workers: 1, max_episode_steps: 50, start_method: fork}
eval: {episodes: 2}
model: {name: mlp, hidden_sizes: [8]}
rollout: {num_chunks: 8}
algorithm: {name: ppo, minibatches: 2, epochs: 1}
engine: {optimizer: {schedule: constant}}
tracking: {sinks: [console, jsonl], report: false}
"""


def embodyrl(folder: Path, *arguments: str, dice: bool) -> subprocess.CompletedProcess[str]:
    """Run a command of the program with the plug-in."""
    if not (folder / "line.yaml").exists():
        (folder / "line.yaml").write_text(CONFIG)
        (folder / "line.py").write_text(PLUGIN)
    environment = {**os.environ, "DICE": "1" if dice else "", "COLUMNS": "80"}
    return programs.run(["-m", "embodyrl", *arguments], cwd=folder, env=environment, timeout=560)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ranks", rest_slow([1, 2]))
def test_evaluations_void_what_is_in_progress_which_is_counted_and_said_once(tmp_path: Path, ranks: int) -> None:
    several = (f"engine.parallel.world_size={ranks}", f"env.workers={ranks}")
    done = embodyrl(tmp_path, "run", "line.yaml", *several, dice=True)
    assert done.returncode == 0, done.stderr
    # The evaluation before training interrupts nothing; the three others interrupt both slots.
    assert [row.get("env/restore_mismatches", 0.0) for row in rows(tmp_path)] == [0, 2, 4, 6]
    for text in (done.stdout, (tmp_path / "out" / "run.log").read_text()):
        words = " ".join(text.split())
        assert words.count("did not restore its saved states bit for bit in 2 envs (0, 1)") == 1
        assert "Their episodes are invalid" in words and "The one rule" in words
    log = (tmp_path / "out" / "workers" / "env-0.log").read_text()
    assert "slot 0, step 8 (task 'go', start state" in log and "is not bit for bit the one that was saved" in log


def test_offloading_is_refused_after_the_first_mismatch_and_the_run_goes_on_without(tmp_path: Path) -> None:
    refused = embodyrl(tmp_path, "run", "line.yaml", "env.offload=true", "run.eval_every=0", dice=True)
    assert refused.returncode == 1
    assert "env.offload is true, but simulator 'line' does not restore its saved states" in refused.stderr
    assert "embodyrl resume out env.offload=false" in refused.stderr and "Traceback" not in refused.stderr
    assert rows(tmp_path)[-1]["iteration"] == 2 and rows(tmp_path)[-1]["env/restore_mismatches"] == 2
    assert (tmp_path / "out" / "checkpoints" / "last").resolve().name == "000002"
    again = embodyrl(tmp_path, "resume", "out", dice=True)
    assert again.returncode == 1 and "env.offload is true" in again.stderr
    done = embodyrl(tmp_path, "resume", "out", "env.offload=false", dice=True)
    assert done.returncode == 0, done.stderr
    # Two in the run, two in each of the resumes, of which the first one saved nothing.
    assert rows(tmp_path)[-1]["iteration"] == 3 and rows(tmp_path)[-1]["env/restore_mismatches"] == 4


def test_a_resume_with_another_version_says_so_and_voids_what_does_not_come_back(tmp_path: Path) -> None:
    settings = ("run.eval_every=0", "env.offload=true")
    assert embodyrl(tmp_path, "run", "line.yaml", "run.iterations=1", *settings, dice=False).returncode == 0
    same = embodyrl(tmp_path, "resume", "out", "run.iterations=2", dice=False)
    assert same.returncode == 0 and "have changed" not in same.stdout and "did not restore" not in same.stdout
    (tmp_path / "line.py").write_text(PLUGIN.replace('"1.0"', '"1.1"').replace("SPEED = 1.0", "SPEED = 2.0"))
    other = embodyrl(tmp_path, "resume", "out", "run.iterations=4", dice=False)
    assert other.returncode == 0, other.stderr
    log = " ".join((tmp_path / "out" / "run.log").read_text().split())
    assert "simulators have changed since the checkpoint was saved: line 1.0 " in log and " -> 1.1 " in log
    assert log.count("did not restore its saved states bit for bit in 2 envs (0, 1)") == 1
    # These come back from states of their own, so offloading goes on and loses nothing more.
    assert [row.get("env/restore_mismatches", 0.0) for row in rows(tmp_path)[-2:]] == [2, 2]
