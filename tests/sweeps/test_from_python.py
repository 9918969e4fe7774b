"""Sweeps from Python: the runs and results of `embodyrl run --seeds`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "runner"))  # where `small_runs` is

from small_runs import SMALL

import embodyrl
from embodyrl.sweeps.folder import SweepError

SHORT = [*SMALL, "run.iterations=1", "run.eval_every=0", "env.workers=1"]


def test_a_sweep_has_its_runs_and_results(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep"
    swept = ["algorithm.gamma=0.8,0.9", f"run.dir={path}"]
    sweep = embodyrl.sweep("gym_pendulum", [*SHORT, *swept], seeds=[3], at_once=1)
    assert capfd.readouterr() == ("", "")
    assert [run.path.name for run in sweep.runs] == ["algorithm.gamma=0.8,seed=3", "algorithm.gamma=0.9,seed=3"]
    found = json.loads((path / "results.json").read_text())
    assert (sweep.rows, sweep.summary, sweep.best) == (found["runs"], found["settings"], found["best"])
    for run, row in zip(sweep.runs, sweep.rows, strict=True):
        assert run.evaluation is not None and run.evaluation.mean_return == row["eval/return"]
    assert sweep.report == path / "report.html" and sweep.report.is_file()
    with pytest.raises(embodyrl.UserError, match=r"is a sweep of several runs: open it with embodyrl\.Sweep\('"):
        embodyrl.Run(path)
    with pytest.raises(SweepError, match=f"swep is no sweep .* did you mean '{path}'"):
        embodyrl.Sweep(path.with_name("swep"))
    assert embodyrl.Sweep(path).rows == sweep.rows and repr(sweep) == f"Sweep({str(path)!r})"
    with pytest.raises(embodyrl.UserError, match="never overwritten"):
        embodyrl.sweep("gym_pendulum", [*SHORT, *swept], seeds=2)
    again = embodyrl.resume_sweep(path, ["run.iterations=2"], at_once=1)
    assert [run.summary["iterations"] for run in again.runs] == [2, 2]


def test_a_run_that_fails_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "sweep"

    def spoil() -> None:
        """Put something of somebody's own where a run wants its folder, once this was found free."""
        while not (path / "sweep.json").exists():
            time.sleep(0.001)
        (path / "seed=2").write_text("mine")

    threading.Thread(target=spoil, daemon=True).start()
    with pytest.raises(embodyrl.RunError) as caught:
        embodyrl.sweep("gym_pendulum", [*SHORT, f"run.dir={path}"], seeds=2, at_once=1)
    again = f"embodyrl.resume_sweep({str(path)!r})"
    assert str(caught.value).startswith(
        f"1 of 2 runs failed, and {again} tries them again:\nseed=2: could not be started"
    )
    sweep = embodyrl.Sweep(path)
    assert [row["state"] for row in sweep.rows] == ["finished", "missing"] and len(sweep.runs) == 1


def test_ctrl_c_saves_what_runs(tmp_path: Path) -> None:
    path = tmp_path / "sweep"

    def interrupt() -> None:
        metrics = path / "seed=1" / "metrics.jsonl"
        while not metrics.exists() or not metrics.stat().st_size:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt, match=r"stopped and saved: embodyrl\.resume_sweep\("):
        embodyrl.sweep("gym_pendulum", [*SHORT, "run.iterations=4000", f"run.dir={path}"], seeds=2, at_once=1)
    assert [row["state"] for row in embodyrl.Sweep(path).rows] == ["interrupted", "missing"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"seeds": "3"}, "seeds = '3': give their number, or a list of them"),
    ({"seeds": []}, "seeds = []: give their number"),
    ({"seeds": 0}, "seeds = 0: want an integer of 1 or more"),
    ({"seeds": [2, 2]}, "names a seed more than once"),
    ({"seeds": 2, "at_once": 0}, "at_once = 0: want an integer of 1 or more"),
    ({}, "nothing has several values: give seeds"),
    ({"seeds": 2, "overrides": ["algorithm.gamma=2.0"]}, "algorithm.gamma = 2.0"),
]


def test_what_cannot_be_swept_is_refused(tmp_path: Path) -> None:
    wrong = []
    for arguments, expected in REFUSED:
        overrides = [f"run.dir={tmp_path / 'sweep'}", *arguments.get("overrides", [])]
        with pytest.raises(embodyrl.UserError) as caught:
            embodyrl.sweep("gym_pendulum", overrides, **{k: v for k, v in arguments.items() if k != "overrides"})
        if expected not in str(caught.value) or (tmp_path / "sweep").exists():
            wrong.append((arguments, str(caught.value)))
    assert not wrong


def test_another_folder_is_no_sweep(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="is no sweep"):
        embodyrl.Sweep(tmp_path)
    with pytest.raises(SweepError, match="is no sweep"):
        embodyrl.resume_sweep(tmp_path)
