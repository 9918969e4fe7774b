"""`embodyrl report RUN RUN ...`: repetitions as mean and band, experiments side by side, tables and figures."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from reports import SCRIPT, make_run
from typer.testing import CliRunner

from embodyrl.cli.main import app
from embodyrl.errors import UserError
from embodyrl.runs.record import find_runs, read_run
from embodyrl.tracking.report.compare import evaluations_of, group, training_of
from embodyrl.tracking.report.series import CURVES


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two experiments: one of three seeds, one of a single run."""
    for seed, successes in ((2, 36), (1, 18), (3, 27)):
        make_run(tmp_path / "runs" / f"seed_{seed}", seed=seed, successes=successes)
    make_run(tmp_path / "runs" / "other", gamma=0.9, successes=18)
    return tmp_path / "runs"


def test_seeds_are_one_experiment_with_a_mean_and_an_interval(runs: Path) -> None:
    other, seeds = group([read_run(run) for run in find_runs(runs)])
    assert (seeds.seeds, other.seeds) == ("1, 2, 3", "1") and seeds.name.endswith(": algorithm.gamma=0.5")
    assert seeds.success == pytest.approx(0.75)
    # By hand: 0.5, 1, 0.75 have the standard deviation 0.25; 4.303 * 0.25 / sqrt(3) = 0.621, cut off at 1.
    assert seeds.interval == pytest.approx((0.129, 1.0), abs=1e-3)
    assert other.interval == other.over_episodes == pytest.approx((0.3447, 0.6553), abs=1e-3)
    assert {name: rate.trials for name, rate in seeds.by_task().items()} == {"push": 54, SCRIPT: 54}


def test_a_band_reaches_from_the_smallest_to_the_largest_seed(runs: Path) -> None:
    single, band = evaluations_of(
        group([read_run(run) for run in find_runs(runs)]), "eval/success_once", "env/total_steps"
    )
    assert (band.x, band.y, band.low, band.high) == ([0.0, 300.0], [0.0, 0.75], [0.0, 0.5], [0.0, 1.0])
    assert single.points and single.high[1] == pytest.approx(0.6553, abs=1e-3)


def test_iterations_that_not_all_seeds_have_are_left_out_of_the_mean(runs: Path) -> None:
    short = runs / "seed_2" / "metrics.jsonl"
    short.write_text("".join(line + "\n" for line in short.read_text().splitlines()[:3]))
    _, seeds = group([read_run(run) for run in find_runs(runs)])
    (line,), _ = training_of([seeds], next(curve for curve in CURVES if "env/return" in curve.metrics))
    assert line.iterations == [1, 2] and line.x == [100.0, 200.0]


def test_one_command_writes_page_numbers_and_figures(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="embodyrl[figures] is not installed")
    words = ["report", str(runs), "--data", str(tmp_path / "data"), "--figures", str(tmp_path / "figures")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0] == f"written to {runs / 'comparison.html'}"
    text = (runs / "comparison.html").read_text()
    assert "2 experiments, 4 runs" in text and SCRIPT not in text and "13 % to 100 %" in text
    with (tmp_path / "data" / "experiments.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["seeds"] for row in table] == ["1", "1, 2, 3"]
    assert table[1]["success_by_seed"] == "0.5000 1.0000 0.7500" and float(table[1]["success_mean"]) == 0.75
    whole = json.loads((tmp_path / "data" / "experiments.json").read_text())
    assert whole[1]["tasks"]["push"]["successes"] == 0 + 18 + 9 and len(whole[1]["evaluations"]) == 6
    figures = {path.name: path.read_bytes()[:5] for path in (tmp_path / "figures").iterdir()}
    assert figures["success.pdf"] == b"%PDF-" and figures["return_training.png"][1:4] == b"PNG"
    assert {name.partition(".")[0] for name in figures} >= {"success", "return", "explained_variance"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "page.pdf"], "the page is HTML"),
        (["--out", "/proc/nowhere/page.html"], "cannot be written: No such file or directory: name another place"),
        (["--data", "/proc/version"], "/proc/version cannot be written"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_sentence(runs: Path, words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["report", str(runs / "other"), *words])
    assert isinstance(result.exception, UserError) and message in str(result.exception)
