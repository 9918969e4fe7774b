import csv
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "runner"))  # where `small_runs` is

from small_runs import SMALL, Run

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.errors import shell_command
from embodyrl.placement.plan import Inventory
from embodyrl.runner.build import ProgramInfo
from embodyrl.sweeps import session
from embodyrl.sweeps.axes import Axis, points_of
from embodyrl.sweeps.folder import Needs, Plan, State, SweepError, read_plan, state_of
from embodyrl.sweeps.results import read_results
from embodyrl.sweeps.session import SweepOptions
from embodyrl.sweeps.sharing import most_at_once, shares_of

QUIET = ProgramInfo(progress=False)
SHORT = ["run.iterations=1", "run.eval_every=0", "env.workers=1"]


def test_each_run_has_the_numbers_that_it_has_alone(sweep, tmp_path, capsys):
    ending = sweep(*SHORT, "algorithm.gamma=0.8,0.9", seeds="3,5", at_once=None)
    shown = capsys.readouterr().out
    assert ending.exit_code == 0 and "4 of 4 runs finished" in shown

    alone = tmp_path / "alone"
    words = [*SMALL, *SHORT, "algorithm.gamma=0.8", "seed=5", f"run.dir={alone}"]
    assert train.run(load_config("experiment/gym_pendulum", words)) == 0
    beside = Run(tmp_path / "sweep" / "algorithm.gamma=0.8,seed=5")
    assert beside.metrics() == Run(alone).metrics()
    assert beside.digest(1) == Run(alone).digest(1)

    # The table is that of the runs' own summaries.
    found = json.loads((tmp_path / "sweep" / "results.json").read_text())
    for row in found["runs"]:
        assert row["eval/return"] == Run(tmp_path / "sweep" / row["run"]).summary["eval/return"]
    for setting in found["settings"]:
        returns = [row["eval/return"] for row in found["runs"] if row["algorithm.gamma"] == setting["algorithm.gamma"]]
        assert setting["eval/return"] == pytest.approx(sum(returns) / 2) and len(set(returns)) == 2
        margin = 12.706 * abs(returns[0] - returns[1]) / 2  # t of one degree of freedom, times the standard error
        assert setting["eval/return/high"] - setting["eval/return"] == pytest.approx(margin, rel=1e-4)
    best = max(found["settings"], key=lambda row: (row["eval/success_once"], row["eval/return"]))
    assert found["best"] == best and f"gamma={best['algorithm.gamma']} *" in shown
    with (tmp_path / "sweep" / "runs.csv").open() as file:
        assert [float(row["eval/return"]) for row in csv.DictReader(file)] == [
            row["eval/return"] for row in found["runs"]
        ]

    # Nothing is left to do, and nothing is overwritten.
    before = (tmp_path / "sweep" / "algorithm.gamma=0.8,seed=5" / "run.log").read_bytes()
    assert session.go_on(tmp_path / "sweep", host=QUIET).exit_code == 0
    assert (tmp_path / "sweep" / "algorithm.gamma=0.8,seed=5" / "run.log").read_bytes() == before
    with pytest.raises(SweepError, match="never overwritten: continue with it: embodyrl resume"):
        sweep(seeds="2")


def test_a_stopped_sweep_saves_all_runs_and_goes_on(sweep, tmp_path, capsys):
    path = tmp_path / "sweep"

    def interrupt() -> None:
        while sum(file.stat().st_size > 0 for file in path.glob("seed=*/metrics.jsonl")) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    ending = sweep("run.iterations=400", "env.workers=1", "run.eval_every=0", "run.save_every=0", seeds="3")
    assert ending.exit_code == 130
    assert f"next: {shell_command('resume', path)}" in capsys.readouterr().out
    assert [state_of(path / f"seed={seed}") for seed in (1, 2, 3)] == [
        *(State.interrupted, State.interrupted),
        State.missing,
    ]
    stopped = [Run(path / f"seed={seed}").summary["iterations"] for seed in (1, 2)]
    assert all(0 < iterations < 400 for iterations in stopped)

    # One of them loses its checkpoints, and the sweep moves: runs go on, start again, and start.
    os.rename(path / "seed=2" / "checkpoints", tmp_path / "gone")
    moved = tmp_path / "moved"
    os.rename(path, moved)
    assert state_of(moved / "seed=2") is State.unsaved
    ending = session.go_on(moved, SweepOptions(overrides=[f"run.iterations={max(stopped) + 2}"]), QUIET)
    assert ending.exit_code == 0 and not path.exists()
    for seed in (1, 2, 3):
        rows = [row["iteration"] for row in Run(moved / f"seed={seed}").metrics()]
        assert [row for row in rows if row] == list(range(1, max(stopped) + 3))
    assert "resume     from" in (moved / "seed=1" / "run.log").read_text()
    assert len(list((moved / ".unsaved").glob("seed=2/*"))) > 0


def test_a_failed_run_does_not_stop_the_others(sweep, tmp_path, capsys):
    path = tmp_path / "sweep"

    def spoil() -> None:
        """Put something of somebody's own where two runs want their folders, once these were found free."""
        while not (path / "sweep.json").exists():
            time.sleep(0.001)
        (path / "seed=1").mkdir()
        (path / "seed=1" / "mine").touch()
        (path / "seed=2").write_text("mine")

    threading.Thread(target=spoil, daemon=True).start()
    ending = sweep(*SHORT, seeds="3", at_once=1)
    shown = " ".join(capsys.readouterr().out.split())  # a path with a space may go over two lines
    assert ending.exit_code == 1
    assert [state_of(path / f"seed={seed}") for seed in (2, 3)] == [State.missing, State.finished]
    assert f"{path / 'seed=1'} exists already and is never overwritten" in shown
    assert f"log: {path / 'seed=1' / 'console.log'}" in shown
    assert "failed: seed=2: could not be started" in shown and "1 of 3 runs finished" in shown


def machine(cores, gpus=0):
    return Inventory(cpus=tuple(range(cores)), cores=cores, gpus=tuple(range(gpus)))


GB = 1e9


@pytest.mark.parametrize(
    ("needs", "cores", "memory", "runs", "expected"),
    [
        (Needs(), 8, 100 * GB, 5, 5),
        (Needs(), 2, 100 * GB, 5, 2),
        (Needs(cores=4), 8, 100 * GB, 5, 2),
        (Needs(cores=16), 8, 100 * GB, 5, 1),
        (Needs(host=30 * GB), 8, 100 * GB, 5, 3),
        (Needs(host=300 * GB), 8, 100 * GB, 5, 1),
        (Needs(unknown="no idea"), 8, 100 * GB, 5, 1),
    ],
)
def test_as_many_runs_as_fit(needs, cores, memory, runs, expected):
    assert most_at_once(needs, machine(cores), memory, runs)[0] == expected


@pytest.mark.parametrize(
    ("needs", "names", "expected"),
    [
        (Needs(gpus=1, gpu=60 * GB, gpu_memory=80 * GB), "0,1", 2),
        (Needs(gpus=1, gpu=20 * GB, gpu_memory=80 * GB), "0,1", 6),
        (Needs(gpus=2, gpu=20 * GB, gpu_memory=80 * GB), "0,1,2,3", 2),
        (Needs(gpus=4, gpu=20 * GB, gpu_memory=80 * GB), "0,1", 1),
    ],
)
def test_gpus_are_shared_by_what_fits_on_each(needs, names, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    here = replace(machine(16), unlisted_gpus=True)
    count, _ = most_at_once(needs, here, 1000 * GB, 10)
    assert count == expected
    if needs.gpus <= len(names.split(",")):
        shares = shares_of(here, count, needs)
        assert all(len(share.gpus) == needs.gpus for share in shares)
        assert {name for share in shares for name in share.gpus} == set(names.split(","))


def test_cores_are_divided_evenly():
    shares = [share.cpus for share in shares_of(machine(8), 3, Needs())]
    assert shares == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert [share.cpus for share in shares_of(machine(2), 3, Needs())] == [(), (), ()]
    assert [share.cpus for share in shares_of(machine(2), 1, Needs())] == [()]


def test_a_sweep_whose_simulator_does_not_report_success_has_returns(tmp_path):
    evaluation = {"eval/return": 2.0, "eval/episode_length": 5.0, "eval/episodes": 4.0}
    points = points_of([Axis("algorithm.gamma", ("0.8", "0.9")), Axis("seed", ("1", "2"))])
    for number, point in enumerate(points):
        summary = {"name": "x", "iterations": 1, "env_steps": 1, "wall_s": 1.0, "env_steps_per_s": 1.0, "seed": 1}
        summary |= {"config_hash": "", "versions": {}, "evaluations": {"1": evaluation | {"eval/return": number + 1.0}}}
        (tmp_path / point.name).mkdir()
        (tmp_path / point.name / "config.yaml").touch()
        (tmp_path / point.name / "summary.json").write_text(json.dumps(summary))
    results = read_results(tmp_path, Plan(source="x", name="x", words=[], points=points))
    assert [setting.row()["eval/return"] for setting in results.settings] == [1.5, 3.5]
    assert results.settings[0].row()["eval/success_once"] is None and results.best is results.settings[1]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"points": []}', "[" * 100_000, '{"points": [{"name": "../x"}]}'])
def test_a_damaged_sweep_file(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(SweepError, match="is damaged"):
        read_plan(tmp_path)
