"""Losses and gradients that are no numbers: steps are left out, counted, written down, and end the run in the end."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import programs
import pytest
from safetensors.torch import load_file

pytestmark = [pytest.mark.faults]

ROOT = Path(__file__).parents[2]
SMALL = [
    "env.num_envs=4",
    "env.workers=1",
    "env.max_episode_steps=20",
    "rollout.num_chunks=16",
    "algorithm.epochs=1",
    "algorithm.minibatches=4",
    "model.hidden_sizes=[8]",
    "run.eval_every=0",
    "run.save_every=0",
    "run.iterations=3",
    "eval.episodes=1",
    "tracking.sinks=[jsonl]",
    "tracking.report=false",
]

EXPLODING = ["engine.optimizer.lr=10", "engine.optimizer.weight_decay=10"]
"""Each step makes the weights 99 times as large, until what comes of them is infinite."""


def run(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    words = ["-m", "embodyrl", "run", "experiment/gym_pendulum", f"run.dir={folder}", *SMALL, *settings]
    return programs.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_a_run_whose_weights_explode_ends_with_the_reason_and_the_batch(tmp_path: Path) -> None:
    done = run(tmp_path / "run", *EXPLODING, "engine.guard.max_skipped=1")
    assert done.returncode == 1, done.stderr
    assert "engine.guard.max_skipped is 1" in done.stderr and "Lower engine.optimizer.lr" in done.stderr
    assert "Traceback" not in done.stderr
    (dump,) = (tmp_path / "run" / "not_finite").iterdir()
    assert str(dump) in done.stderr and len(load_file(dump)["returns"]) == 16
    assert "max_skipped" in (tmp_path / "run" / "run.log").read_text()


def test_a_run_may_go_on_without_the_steps_that_cannot_be_made(tmp_path: Path) -> None:
    done = run(tmp_path / "run", *EXPLODING, "engine.guard.max_skipped=1000", "run.iterations=1")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0 < rows[-1]["train/skipped_steps"] < 4, "the first of four were made"
