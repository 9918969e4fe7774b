"""Runs with several simulators: metrics of each, other numbers of processes, killed and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import SMALL, Runs, assert_same_run, kill_in, resumed

import embodyrl
from embodyrl.config import ConfigError, ConfigUse, load_config
from embodyrl.runner.start_rules import start_rules
from embodyrl.runs.record import read_run
from embodyrl.tracking.report.compare import by_source
from embodyrl.tracking.report.page import page_of

MIXED = """
defaults: [model: mlp, algorithm: ppo, _self_]
env:
  mix:
    - {env: gym/pendulum, share: 2, name: earth}
    - {env: gym/pendulum, share: 1, name: moon, simulator: {kwargs: {g: 1.62}, success_return: -100.0}}
seed: 1
run: {name: mixed}
"""
SAC = [
    "rollout.blocks=2",
    *("algorithm=sac", "model.head=squashed", "algorithm.off_policy.batch_size=32"),
    *("algorithm.off_policy.replay.start_after=40", "algorithm.off_policy.replay.capacity=400"),
    "algorithm.off_policy.critics.hidden_sizes=[16]",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "mixed.yaml").write_text(MIXED)
    return Runs(folder, folder / "mixed.yaml", SMALL)


def test_each_simulator_has_metrics_and_a_place_in_the_report(runs: Runs, tmp_path: Path) -> None:
    run = runs()
    last = run.metrics()[-1]
    assert {"eval/success_once/earth", "eval/success_once/moon", "env/success_recent/moon"} <= set(last)
    for row in run.metrics():
        if row.get("env/episodes"):
            assert row.get("env/episodes/earth", 0) + row.get("env/episodes/moon", 0) == row["env/episodes"]
    record = read_run(run.path)
    assert record.final is not None
    assert [(rate.name, rate.trials) for rate in by_source(record.final)] == [("earth", 3), ("moon", 2)]
    page = page_of(record, tmp_path)
    assert "<h2>Simulators</h2>" in page and "moon/Pendulum-v1" in page


def test_an_evaluation_says_how_each_simulator_went(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    embodyrl.evaluate(runs().path, progress=True)
    said = capsys.readouterr().out
    assert "evaluation  5 episodes" in said and "\n  earth  3 episodes" in said and "\n  moon   2 episodes" in said


def test_the_number_of_processes_changes_nothing(runs: Runs, tmp_path: Path) -> None:
    assert_same_run(runs(), runs.fresh(tmp_path / "one", "env.workers=1"), 6)


@pytest.mark.slow
def test_a_replay_has_what_workers_play_in_each_simulator(runs: Runs, tmp_path: Path) -> None:
    """Two workers, which are interpreters that import torch."""
    replayed = Runs(tmp_path, runs.config, [*(each for each in SMALL if "algorithm." not in each), *SAC])
    assert_same_run(replayed(), replayed("placement.rollout.workers=2"), 6)


@pytest.mark.faults
def test_a_run_that_was_killed_goes_on_bit_for_bit(runs: Runs, tmp_path: Path) -> None:
    kill_in(4, tmp_path / "killed", runs.words(tmp_path / "killed"))
    assert_same_run(runs(), resumed(tmp_path / "killed"), 6)


def test_the_config_of_a_run_is_whole_without_the_files_of_its_simulators(runs: Runs) -> None:
    saved = load_config(runs().path / "config.yaml", trust=True).config
    again = load_config(runs.config, [*SMALL, f"run.dir={saved.run.dir}"]).config
    assert saved == again and [source.env.max_episode_steps for source in saved.env.sources] == [40, 40]


def test_what_a_simulator_of_a_mix_does_not_take_is_found_where_it_is_written(runs: Runs) -> None:
    wrong = Path(runs.config).with_name("wrong.yaml")
    wrong.write_text(MIXED.replace("g: 1.62", "gg: 1.62"))
    with pytest.raises(ConfigError, match=r"wrong\.yaml:6:74: moon: 'Pendulum-v1' takes no argument 'gg'"):
        load_config(wrong, use=ConfigUse.check, also=[start_rules])
