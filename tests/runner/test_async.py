"""Asynchronous rollouts learn what one process learns that collects the same number of rollouts ahead, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from slow import rest_slow
from small_runs import Run, Runs, kill_in, resumed
from test_workers import Take, apart, outcome, workers

from embodyrl.rollout.episodes import Rollout
from embodyrl.runner import share

__all__ = ["apart"]  # a fixture

SETTINGS = ["run.iterations=6", "run.save_every=2", "run.eval_every=2"]


DAPO = [
    *("algorithm=dapo", "rollout.episodes=whole", "rollout.num_chunks=6", "rollout.group_size=2"),
    *("plugins=[three_of_four]", "algorithm.filter=three_of_four", "algorithm.reward=dense", "algorithm.minibatches=1"),
]
"""Two rollouts in most iterations, and groups that wait."""


class Ahead(share.LocalRollouts):
    """Rollouts of a single process that acts some iterations before it learns."""

    staleness = 0

    def __init__(self, own: share.LocalEnvs) -> None:
        super().__init__(own)
        self.queue: list[Rollout] = []

    def collect(self, *, random: bool = False) -> Rollout:
        while len(self.queue) < max(1, min(self.staleness + 1, self.iterations_left)):
            self.queue.append(super().collect(random=random))
        return self.queue.pop(0)


def lagging(staleness: int, count: int) -> list[str]:
    return ["rollout.mode=async", f"rollout.max_staleness={staleness}", workers(count)]


def learned(run: Run) -> tuple[object, ...]:
    """Metrics, but those of asynchronous runs alone, and final weights."""
    rows, weights = outcome(run)
    assert isinstance(rows, list)
    return [{key: row[key] for key in row if not key.startswith("async/")} for row in rows], weights


def reference(staleness: int, runs: Runs, path: Path, *overrides: str) -> tuple[object, ...]:
    """What one process learns that collects some rollouts ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(share, "LocalRollouts", Ahead)
        patch.setattr(Ahead, "staleness", staleness)
        return learned(runs.fresh(path, *SETTINGS, *overrides))


@pytest.mark.parametrize(
    ("staleness", "count", "case"),
    rest_slow([(2, 2, "continuous"), (0, 1, "continuous"), (4, 1, "continuous"), (1, 1, "images"), (1, 2, "dapo")]),
)
def test_a_run_ahead_of_learning_is_that_of_one_process_that_is(
    staleness: int, count: int, case: str, apart: Take, tmp_path: Path
) -> None:
    runs = apart("continuous" if case == "dapo" else case)
    settings = DAPO if case == "dapo" else []
    run = runs(*SETTINGS, *settings, *lagging(staleness, count))
    assert learned(run) == reference(staleness, runs, tmp_path / "reference", *settings)
    lags = [row["async/lag_max"] for row in run.metrics() if "async/lag_max" in row]
    assert case == "dapo" or lags == [float(min(iteration, staleness)) for iteration in range(6)]


@pytest.mark.faults
def test_a_run_that_was_killed_goes_on_with_what_waits_in_its_checkpoint(apart: Take, tmp_path: Path) -> None:
    runs, path = apart("continuous"), tmp_path / "killed"
    kill_in(3, path, runs.words(path, *SETTINGS, *lagging(2, 2)))
    assert len(list((path / "checkpoints" / "000002" / "trainer").glob("waiting_*.safetensors"))) == 2
    assert learned(resumed(path, workers(1))) == learned(runs(*SETTINGS, *lagging(2, 2)))
