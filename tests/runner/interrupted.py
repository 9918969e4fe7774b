"""Runs that are stopped where it hurts, and how to compare them with one that never was."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_runs import Run

from embodyrl.rollout.collector import Collector, Rollout
from embodyrl.runner.checkpoint import Manifest

NOT_COMPARED = ("config.yaml", "origin.json", "trainer/counters.json")
"""Files of a checkpoint that hold the run's folder and its times."""


@contextmanager
def signal_in_collection(number: signal.Signals, collection: int) -> Iterator[None]:
    """Send this process a signal when it begins to collect for the `collection`-th time, amid an iteration."""
    collect, count = Collector.collect, 0

    def counted(self: Collector, *arguments: Any) -> Rollout:
        nonlocal count
        count += 1
        if count == collection:
            os.kill(os.getpid(), number)
        return collect(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "collect", counted)
        yield


def contents(run_dir: Path, iteration: int) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint that has to be the same."""
    files = Manifest.read(run_dir / "checkpoints" / f"{iteration:06d}").files
    return {name: str(facts["sha256"]) for name, facts in files.items() if name not in NOT_COMPARED}


def metrics_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Metrics but times by iteration; an evaluation that was made up for has a line of its own."""
    merged: dict[int, dict[str, Any]] = {}
    for row in Run(run_dir).metrics():
        merged[row["iteration"]] = merged.get(row["iteration"], {}) | row
    return merged


def assert_same_run(one: Path, other: Path, iteration: int) -> None:
    """That two runs came to the same: all metrics but times, weights, optimiser, random streams, simulators' states."""
    assert metrics_of(one) == metrics_of(other)
    expected = contents(one, iteration)
    assert contents(other, iteration) == expected
    assert any(name.startswith("policy/") for name in expected) and "trainer/engine.safetensors" in expected
