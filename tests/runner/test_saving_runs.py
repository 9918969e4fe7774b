"""Runs that save: in the background, the best and the last only, and what they do when a checkpoint is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import Run, Runs, copy_of, resumed

from embodyrl.cli import train
from embodyrl.errors import at_line
from embodyrl.runner.checkpoint import Manifest, verify


def names(run: Run) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


def target(run: Run, link: str) -> str:
    return (run.path / "checkpoints" / link).resolve().name


def test_saving_in_the_background_writes_the_same_bytes(small_runs: Runs) -> None:
    waiting, meanwhile = (
        small_runs("run.save_every=1", "run.iterations=4", "run.eval_every=0", *more)
        for more in ([], ["run.save_async=true"])
    )
    assert names(waiting) == names(meanwhile) and len(names(waiting)) == 5
    for iteration in range(1, 5):
        verify(meanwhile.checkpoint(iteration))
        assert meanwhile.contents(iteration) == waiting.contents(iteration)
    assert meanwhile.log().count("saved ") == 4 and meanwhile.log().count("of them waiting)") == 4


def test_a_run_keeps_its_best_and_its_last_checkpoints(
    small_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["run.keep_last=1", "run.keep_best=mean_return", "run.eval_every=1", "engine.optimizer.lr=0.02"]
    run = small_run("run", *settings, "run.iterations=4", "run.save_every=0")
    returns = {int(key): each["eval/return"] for key, each in run.summary["evaluations"].items() if key != "0"}
    best = max(returns, key=lambda key: returns[key])
    assert best != 4, "choose another learning rate: this best one is saved anyway"
    assert names(run) == sorted({f"{best:06d}", "000004", "best", "last"})
    assert (target(run, "best"), target(run, "last")) == (f"{best:06d}", "000004")
    assert Manifest.read(run.path / "checkpoints" / "best").metrics["eval/return"] == returns[best]
    capsys.readouterr()
    assert train.evaluate(run.path / "checkpoints" / "best", []) == 0
    assert f"return {returns[best]:.2f}" in capsys.readouterr().out
    assert train.resume(run.path, ["run.iterations=5", "run.keep_best=none", "run.keep_last=2"]) == 0
    assert names(run) == sorted({f"{best:06d}", "000004", "000005", "best", "last"})


def test_a_damaged_last_checkpoint_is_named_and_the_one_before_it_taken(
    small_runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = small_runs("run.iterations=4", "run.save_every=2")
    path = copy_of(whole, tmp_path / "run")
    weights = path / "checkpoints/last/policy/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    capsys.readouterr()
    assert train.evaluate(path, []) == 0
    assert "warning: checkpoints/000004 is damaged: policy/model.safetensors has " in capsys.readouterr().out
    again = resumed(path)
    words = "Taking 000002 instead, the newest that is whole"
    assert words in capsys.readouterr().out and words in again.log()
    assert again.merged() == whole.merged()
    place = (path / "checkpoints/last").resolve()
    assert place.name == "000004-2" and verify(place).iteration == 4
    assert (place / "policy/model.safetensors").read_bytes() == (
        whole.checkpoint(4) / "policy/model.safetensors"
    ).read_bytes()


def test_a_config_that_was_cut_short_or_changed_in_the_folder_is_refused(small_runs: Runs, tmp_path: Path) -> None:
    run = copy_of(small_runs("run.iterations=1"), tmp_path / "run")
    path = run / "config.yaml"
    text = path.read_text()
    for damaged, words in (
        (text.replace("gamma: 0.9", "gamma: 0.5"), r"algorithm\.gamma = 0\.5"),
        (text[:2000], "faults"),
    ):
        assert damaged != text
        path.write_text(damaged)
        with pytest.raises(ValueError, match=words):
            train.resume(run, ["run.iterations=2"])
    path.write_text(text)
    again = resumed(run, "run.iterations=2", "run.eval_every=0")
    assert json.loads((again.path / "checkpoints/last/manifest.json").read_text())["iteration"] == 2


@pytest.mark.parametrize("step", ["embodyrl.runner.checkpointing.lock_of", "embodyrl.runner.reproduction.Lock.save"])
def test_a_record_of_reproduction_that_fails_is_a_warning_and_the_checkpoint_whole(
    step: str, small_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise TypeError("act() missing 1 required positional argument: 'generator'")

    monkeypatch.setattr(step, fails)
    run = small_run("run", "run.iterations=2", "run.save_every=1", "run.eval_every=0")
    for iteration in (1, 2):
        verify(run.checkpoint(iteration))
        assert not (run.checkpoint(iteration) / "lock.safetensors").exists()
    (warning,) = (line for line in run.log().splitlines() if "warning:" in line)
    assert "no record of reproduction (lock.safetensors), which embodyrl verify needs; all else is saved" in warning
    assert (
        f"TypeError: act() missing 1 required positional argument: 'generator' ({at_line(__file__, 0)[:-1]}" in warning
    )
    monkeypatch.undo()
    assert train.resume(run.path, ["run.iterations=3"]) == 0
