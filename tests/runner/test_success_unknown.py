"""Success that the simulator does not report is a dash wherever it is shown, and success that says nothing is doubted.

One run of two iterations, its report and a comparison: 4 s of CPU time, for all the places that show success.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import SMALL, Run

import embodyrl
from embodyrl.cli import train
from embodyrl.cli.watch import watch
from embodyrl.config import load_config
from embodyrl.errors import UserError
from embodyrl.runner.session import closing_lines
from embodyrl.runs.record import read_run
from embodyrl.tracking.report import write_report
from embodyrl.tracking.report.compare import by_task, group
from embodyrl.tracking.report.comparison import write_comparison, write_data

SILENT = [*SMALL, "env.success_return=null", "env.max_episode_steps=10", "run.iterations=2", "rollout.num_chunks=12"]
"""Pendulum says nothing of success."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose settings ask for success."""
    path = tmp_path_factory.mktemp("silent") / "run"
    asked = ["run.stop_at_success=0.5", "run.keep_best=eval/success_once", "tracking.video.episodes=1"]
    assert train.run(load_config("experiment/gym_pendulum", [*SILENT, *asked, f"run.dir={path}"])) == 0
    return Run(path)


def test_unknown_success_is_a_dash_and_no_metric(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert not [name for row in run.metrics() for name in row if "success" in name]
    log = run.log()
    assert "success -  return" in log and "success 0" not in log
    assert log.count("run.stop_at_success and run.keep_best can do nothing: simulator 'gymnasium' does not say") == 1
    assert "success - -> -" in closing_lines(run.summary, run.path)
    watch(run.path, once=True)
    assert "success -  return" in capsys.readouterr().out
    [*records] = map(json.loads, (run.path / "evaluations/000002.jsonl").read_text().splitlines())
    assert {(each["success"], each["success_at_end"]) for each in records} == {(None, None)}


def test_reports_show_unknown_success_as_a_dash(run: Run, tmp_path: Path) -> None:
    page = write_report(run.path).read_text()
    assert "<b>–</b>" in page and "failed" not in page.split("<h2>")[-1].split("<script")[0]
    both = [read_run(run.path), read_run(run.path)]
    [experiment] = group(both)
    assert (experiment.success, experiment.interval, experiment.over_episodes, experiment.by_task()) == (None,) * 3 + (
        {},
    )
    write_comparison(both, tmp_path / "both.html")
    assert "no evaluation yet" not in (tmp_path / "both.html").read_text()
    write_data(both, tmp_path / "data")
    [row] = json.loads((tmp_path / "data/experiments.json").read_text())
    assert row["success_mean"] is None and row["return_mean"] < 0


def test_comparisons_show_unknown_success_as_a_dash(run: Run, tmp_path: Path) -> None:
    found = embodyrl.compare(run.path, run.path, episodes=2, out=tmp_path / "pair")
    table = found.text()
    assert "success is unknown" in table and "0.00 .." not in table
    row = found.as_json()["evaluations"][0]
    assert (row["success"], row["successes"], row["success_low"]) == (None, None, None)


def test_what_pays_for_success_needs_it(tmp_path: Path) -> None:
    words = [*SILENT, "algorithm.reward=success", "rollout.episodes=whole", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=r"rewards success, but simulator 'gymnasium' does not say whether Pendulum-v1"):
        embodyrl.train("experiment/gym_pendulum", words)


def test_success_that_is_named_only_when_it_comes_has_the_same_rate_everywhere(tmp_path: Path) -> None:
    words = [*SILENT, "env.tasks=[EmbodyrlQuiet-v0]", "env.max_episode_steps=auto", "plugins=[solved_at_reset]"]
    path = tmp_path / "run"
    assert train.run(load_config("experiment/gym_pendulum", [*words, "eval.episodes=8", f"run.dir={path}"])) == 0
    alone = Run(path).metrics()[-1]["eval/success_once"]
    assert 0.0 < alone < 1.0
    compared = embodyrl.compare(path, path, episodes=8, trust=True).as_json()["evaluations"][0]
    assert (compared["success"], compared["episodes"]) == (alone, 8)
    [of_task] = by_task(read_run(path).evaluations[-1])
    assert (of_task.successes / of_task.trials, of_task.trials) == (alone, 8)


def test_success_that_holds_at_reset_is_said_once(tmp_path: Path) -> None:
    words = [*SILENT, "env.tasks=[EmbodyrlSolved-v0]", "env.max_episode_steps=auto", "plugins=[solved_at_reset]"]
    assert train.run(load_config("experiment/gym_pendulum", [*words, f"run.dir={tmp_path / 'run'}"])) == 0
    log = Run(tmp_path / "run").log()
    assert log.count("success held after the first action already in 5 of 5 episodes: if it holds at reset") == 1
