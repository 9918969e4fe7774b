"""Asynchronous rollouts learn what one process learns that collects the same number of rollouts ahead, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from slow import rest_slow
from small_runs import THREE_OF_FOUR, Run, kill_after
from test_workers import CASES, PENDULUM, outcome, workers

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.registry import SupportedModel
from embodyrl.rollout.episodes import Rollout
from embodyrl.runner import share

SETTINGS = ["run.iterations=6", "run.save_every=2", "run.eval_every=2"]


DAPO = [
    *("algorithm=dapo", "rollout.episodes=whole", "rollout.num_chunks=6", "rollout.group_size=2"),
    *("plugins=[three_of_four]", "algorithm.filter=three_of_four", "algorithm.reward=dense", "algorithm.minibatches=1"),
]
"""Two rollouts in most iterations, and groups that wait."""


class Ahead(share.OwnRollouts):
    """Rollouts of a single process that acts some iterations before it learns."""

    staleness = 0

    def __init__(self, own: share.EnvShare) -> None:
        super().__init__(own)
        self.queue: list[Rollout] = []

    def collect(self) -> Rollout:
        while len(self.queue) < max(1, min(self.staleness + 1, self.iterations_left)):
            self.queue.append(super().collect())
        return self.queue.pop(0)


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Run]:
    """Train in this process: begin("name", "key=value", ...)."""
    (tmp_path / "my.yaml").write_text(PENDULUM)
    (tmp_path / "three_of_four.py").write_text(THREE_OF_FOUR)

    def run(name: str, *overrides: str) -> Run:
        path = tmp_path / name
        settings = [*SETTINGS, f"run.dir={path}", *overrides]
        assert train.run(load_config(str(tmp_path / "my.yaml"), settings, trust=True)) == 0
        return Run(path)

    return run


def lagging(staleness: int, count: int) -> list[str]:
    return ["rollout.mode=async", f"rollout.max_staleness={staleness}", workers(count)]


def learned(run: Run) -> tuple[object, ...]:
    """Metrics, but those of asynchronous runs alone, and final weights."""
    rows, weights = outcome(run)
    assert isinstance(rows, list)
    return [{key: row[key] for key in row if not key.startswith("async/")} for row in rows], weights


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch, begin: Callable[..., Run]) -> Callable[..., tuple[object, ...]]:
    """What one process learns that collects some rollouts ahead: reference(staleness, "key=value", ...)."""

    def learn(staleness: int, *overrides: str) -> tuple[object, ...]:
        with monkeypatch.context() as patch:
            patch.setattr(share, "OwnRollouts", Ahead)
            patch.setattr(Ahead, "staleness", staleness)
            return learned(begin("reference", *overrides))

    return learn


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("staleness", "count", "case"),
    rest_slow([(1, 2, "continuous"), (0, 1, "continuous"), (4, 1, "continuous"), (1, 1, "images"), (1, 2, "dapo")]),
)
def test_a_run_ahead_of_learning_is_that_of_one_process_that_is(
    staleness: int, count: int, case: str, begin: Callable[..., Run], reference: Callable[..., tuple[object, ...]]
) -> None:
    if case == "images" and SupportedModel.entry("openvla_oft").missing():
        pytest.skip("openvla_oft is not installed")
    settings = [*(DAPO if case == "dapo" else CASES[case]), "run.save_every=0"]
    run = begin("run", *settings, *lagging(staleness, count))
    assert learned(run) == reference(staleness, *settings)
    lags = [row["async/lag_max"] for row in run.metrics() if "async/lag_max" in row]
    assert case == "dapo" or lags == [float(min(iteration, staleness)) for iteration in range(6)]


@pytest.mark.timeout(300)
def test_a_run_that_was_killed_goes_on_with_what_waits_in_its_checkpoint(
    begin: Callable[..., Run], reference: Callable[..., tuple[object, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "killed"
    words = ["-m", "embodyrl", "run", str(tmp_path / "my.yaml"), *SETTINGS, *lagging(2, 2), f"run.dir={path}"]
    kill_after(path / "checkpoints" / "000002", words)
    assert len(list((path / "checkpoints" / "000002" / "trainer").glob("waiting_*.safetensors"))) == 2
    assert train.resume(path, [workers(1)]) == 0
    again, whole = learned(Run(path)), reference(2)
    assert again[1] == whole[1] and again[0][-1] == whole[0][-1]  # type: ignore[index]
