"""Runs that save: in the background, the best and the last only, and what they do when a checkpoint is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from interrupted import contents
from small_runs import Run

from embodyrl.cli import train
from embodyrl.runner.checkpoint import Manifest, verify


def names(run: Run) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


def target(run: Run, link: str) -> str:
    return (run.path / "checkpoints" / link).resolve().name


def test_saving_in_the_background_writes_the_same_bytes(small_run: Callable[..., Run]) -> None:
    waiting = small_run("waiting", "run.save_every=1")
    meanwhile = small_run("meanwhile", "run.save_every=1", "run.save_async=true")
    assert names(waiting) == names(meanwhile) and len(names(waiting)) == 7
    for iteration in range(1, 7):
        verify(meanwhile.path / "checkpoints" / f"{iteration:06d}")
        assert contents(meanwhile.path, iteration) == contents(waiting.path, iteration)
    log = (meanwhile.path / "run.log").read_text()
    assert log.count("saved ") == 6 and log.count("of them waiting)") == 6


def test_a_run_keeps_its_best_and_its_last_checkpoints(
    small_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["run.keep_last=1", "run.keep_best=mean_return", "run.eval_every=1", "engine.optimizer.lr=0.02"]
    run = small_run("run", *settings, "run.iterations=7", "run.save_every=0")
    returns = {int(key): each["eval/return"] for key, each in run.summary["evaluations"].items() if key != "0"}
    best = max(returns, key=lambda key: returns[key])
    assert best != 7, "choose another learning rate: this best one is saved anyway"
    assert names(run) == sorted({f"{best:06d}", "000007", "best", "last"})
    assert (target(run, "best"), target(run, "last")) == (f"{best:06d}", "000007")
    assert Manifest.read(run.path / "checkpoints" / "best").metrics["eval/return"] == returns[best]
    capsys.readouterr()
    assert train.evaluate(run.path / "checkpoints" / "best", []) == 0
    assert f"return {returns[best]:.2f}" in capsys.readouterr().out
    assert train.resume(run.path, ["run.iterations=8", "run.keep_best=none", "run.keep_last=2"]) == 0
    assert names(run) == sorted({f"{best:06d}", "000007", "000008", "best", "last"})


def test_a_damaged_last_checkpoint_is_named_and_the_one_before_it_taken(
    small_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = small_run("whole"), small_run("run", "run.iterations=4", "run.save_every=2")
    weights = run.path / "checkpoints/last/policy/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    capsys.readouterr()
    assert train.evaluate(run.path, []) == 0
    assert "warning: checkpoints/000004 is damaged: policy/model.safetensors has " in capsys.readouterr().out
    assert train.resume(run.path, ["run.iterations=6", "run.save_every=3"]) == 0
    words = "Taking 000002 instead, the newest that is whole"
    assert words in capsys.readouterr().out and words in (run.path / "run.log").read_text()
    assert {row["iteration"] for row in Run(run.path).metrics()} == set(range(7))
    assert contents(run.path, 6) == contents(whole.path, 6)


def test_settings_that_change_nothing_may_change(small_run: Callable[..., Run]) -> None:
    whole, half = small_run("whole"), small_run("half", "run.iterations=3")
    assert train.resume(half.path, ["run.iterations=6", "env.workers=1", "tracking.sinks=[jsonl,console]"]) == 0
    assert contents(whole.path, 6) == contents(half.path, 6)


def test_a_config_that_was_cut_short_or_changed_in_the_folder_is_refused(small_run: Callable[..., Run]) -> None:
    run = small_run("run", "run.iterations=1")
    path = run.path / "config.yaml"
    text = path.read_text()
    for damaged, words in (
        (text.replace("gamma: 0.9", "gamma: 0.5"), r"algorithm\.gamma = 0\.5"),
        (text[:2000], "faults"),
    ):
        assert damaged != text
        path.write_text(damaged)
        with pytest.raises(ValueError, match=words):
            train.resume(run.path, ["run.iterations=2"])
    path.write_text(text)
    assert train.resume(run.path, ["run.iterations=2"]) == 0
    assert json.loads((run.path / "checkpoints/last/manifest.json").read_text())["iteration"] == 2
