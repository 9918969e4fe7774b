"""Every second of a run belongs to one phase: measured against a clock outside."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from small_runs import SMALL, Runs

from embodyrl.config import load_config
from embodyrl.runner.opening import open_runner
from embodyrl.runner.rundir import RunDir, write_config
from embodyrl.tracking.clock import Phase


class Watch:
    """A sink that notes when it is told something."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, Mapping[str, float]]] = []

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((time.perf_counter(), metrics))

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, Mapping[str, float]]]:
    """When the metrics of each iteration came, and what they were; with images, evaluations and checkpoints."""
    path = tmp_path_factory.mktemp("watched") / "run"
    images = ["env.cameras=[render]", "env.image_size=[32,32]", "rollout.num_chunks=4", "env.max_episode_steps=10"]
    images += ["env.num_envs=2", "env.workers=1", "eval.episodes=2"]
    loaded = load_config("experiment/gym_pendulum", [*SMALL, *images, f"run.dir={path}", "run.iterations=5"])
    directory, watch = RunDir.create(loaded.config), Watch()
    write_config(directory.path, loaded)
    with open_runner(loaded, directory, started=time.monotonic()) as runner:
        runner.context.sinks = [watch]
        assert runner.run() == 0
    directory.close()
    return watch.rows


def phases(metrics: Mapping[str, float], prefix: str) -> float:
    return sum(metrics[f"{prefix}/{phase}"] for phase in Phase)


def test_the_phases_add_up_to_the_time_between_two_rows(
    watched: list[tuple[float, Mapping[str, float]]],
) -> None:
    (begin, _), *later = watched
    counted = sum(phases(row, "time") for _, row in later)
    counted += sum(phases(row, "time/eval") for _, row in later if "time/eval" in row)
    # Between the clocks' times and ours some lines are executed, during which a busy machine may do something else.
    assert counted == pytest.approx(later[-1][0] - begin, rel=0.02, abs=0.05)
    for _, row in later:
        assert phases(row, "time") == pytest.approx(row["time/iteration"], rel=1e-6)
        if "time/eval" in row:
            assert phases(row, "time/eval") == pytest.approx(row["time/eval"], rel=1e-6)


def test_what_happens_has_its_phase(watched: list[tuple[float, Mapping[str, float]]]) -> None:
    rows = [row for _, row in watched[1:]]
    for name in ("simulate", "render", "infer", "preprocess", "record", "train"):
        assert all(row[f"time/{name}"] > 0 for row in rows), name
    assert [row["time/save"] > 0 for row in rows] == [False, False, False, True, False]  # saved after the third row
    assert [("time/eval" in row) for row in rows] == [False, True, False, True, True]
    assert all(row["time/eval/infer"] > 0 and row["time/eval/render"] > 0 for row in rows if "time/eval" in row)
    assert sum(row["time/idle"] for row in rows) < 0.1 * sum(row["time/iteration"] for row in rows)


def test_without_images_nothing_is_drawn_and_the_summary_has_it_all(small_runs: Runs) -> None:
    run = small_runs("run.iterations=1", "tracking.report=true")
    seconds = run.summary["phases_s"]
    assert set(seconds) == set(Phase) and seconds["render"] == 0.0 and seconds["save"] > 0.0
    assert Path(run.path / "report.html").read_text().count("Where the time went") == 1
