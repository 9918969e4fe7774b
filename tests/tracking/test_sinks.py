from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodyrl.tracking import SinkContext
from embodyrl.tracking.console import ConsoleSink
from embodyrl.tracking.sinks import JsonlSink, TensorboardSink

METRICS = {
    "env/steps": 1024.0,
    "env/total_steps": 2048.0,
    "env/return": 3.25,
    "env/return_recent": 2.75,
    "time/iteration": 2.0,
    "time/simulate": 1.0,
    "time/infer": 0.5,
    "time/train": 0.25,
    "time/idle": 0.25,
    "time/env_steps_per_s": 512.0,
    "train/explained_variance": float("nan"),
}


def context(folder: Path, *, start: int = 0, iterations: int = 10) -> SinkContext:
    return SinkContext(run_dir=folder, iterations=iterations, start_iteration=start)


def test_jsonl_writes_one_object_per_iteration_and_null_for_nan(tmp_path: Path) -> None:
    sink = JsonlSink(context(tmp_path))
    for iteration in (1, 2):
        sink.log(iteration, METRICS)
    sink.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert rows[0]["env/return"] == 3.25 and rows[0]["train/explained_variance"] is None


def test_jsonl_drops_what_a_resumed_run_does_again_and_half_lines(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2}\n{"iteration": 3}\n{"iter')
    sink = JsonlSink(context(tmp_path, start=2))
    sink.log(3, {"env/return": 1.0})
    sink.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"iteration": 1}, {"iteration": 2}, {"iteration": 3, "env/return": 1.0}]


def test_console_writes_plain_aligned_lines_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(context(tmp_path, iterations=4))
    sink.log(0, {"eval/success_once": 0.0})
    sink.log(1, METRICS)
    sink.message("evaluation  100 episodes [0.1, 0.2]")
    sink.log(4, METRICS)
    sink.close()
    newest, titles, first, message, last = capsys.readouterr().out.splitlines()
    assert newest.startswith("return, success: means over the newest")
    assert titles.split()[:3] == ["iter", "env", "steps"] and titles.split()[-1] == "eta"
    assert len(titles) == len(first) == len(last)
    assert first.split()[:3] == ["1", "2,048", "2.75"] and " 50/  0/ 25/ 12/ 12 %" in first
    assert first.endswith("0:06") and last.endswith("0:00")
    assert message == "evaluation  100 episodes [0.1, 0.2]"


def test_console_shows_the_loss_of_a_run_that_learns_from_demonstrations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = ConsoleSink(context(tmp_path, iterations=1))
    sink.log(1, {"train/loss": 2.5, "train/grad_norm": 0.125, "train/learning_rate": 1e-3, "time/iteration": 2.0})
    sink.close()
    titles, row = capsys.readouterr().out.splitlines()
    assert titles.split()[:6] == ["iter", "loss", "grad", "norm", "learning", "rate"]
    assert row.split()[:4] == ["1", "2.5000", "0.125", "1.00e-03"]
    assert len(titles) == len(row)


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorboardSink(context(tmp_path))
    sink.log(1, {"env/return": 1.5})
    sink.log(2, {"env/return": 2.5})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("env/return")] == [(1, 1.5), (2, 2.5)]
