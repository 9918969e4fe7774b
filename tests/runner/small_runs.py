"""A run so small that it takes seconds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
from programs import Program

SMALL = [
    "env.num_envs=4",
    "env.workers=2",
    "env.max_episode_steps=40",
    "rollout.num_chunks=24",
    "algorithm.epochs=2",
    "algorithm.minibatches=2",
    "model.hidden_sizes=[16]",
    "eval.episodes=5",
    "run.eval_every=2",
    "run.save_every=3",
    "run.iterations=6",
    "tracking.sinks=[jsonl]",
    "tracking.report=false",
    "engine.optimizer.schedule=constant",
]
"""Pendulum, made so small that a run takes seconds; episodes (40 steps) straddle rollouts (24). The
learning rate is constant, because one that falls over run.iterations depends on where a run is meant to end."""


THREE_OF_FOUR = """
from embodyrl.registry import FILTERS


def three_of_four(played):
    played = played.any(1)
    played[-1] = False
    return played


FILTERS.register("three_of_four", target=three_of_four, group=True, summary="all groups but the last")
"""
"""A plug-in: a filter that leaves a group out, so that an iteration collects twice and groups wait."""


class Run:
    """A finished run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.summary: dict[str, Any] = json.loads((path / "summary.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl, without times."""
        rows = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]

    def digest(self, iteration: int, name: str) -> str:
        """Hash of a file in a checkpoint."""
        manifest = json.loads((self.path / "checkpoints" / f"{iteration:06d}" / "manifest.json").read_text())
        return str(manifest["files"][name]["sha256"])


def kill_after(checkpoint: Path, words: list[str]) -> None:
    """Run a program until a checkpoint is there, then kill it; nothing of it may be left."""
    with Program(words, stdout=-1, stderr=-1, text=True) as program:
        deadline = time.monotonic() + 90
        while not checkpoint.exists():
            assert program.poll() is None and time.monotonic() < deadline, program.communicate()
            time.sleep(0.01)
        everyone = psutil.Process(program.pid).children(recursive=True)
        program.kill()
    assert not psutil.wait_procs(everyone, timeout=10)[1]
