"""report.html of one run: what it says, what it leaves out, and that nothing in it comes from elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reports import SCRIPT, make_run
from typer.testing import CliRunner

from embodyrl.cli.main import app
from embodyrl.errors import UserError
from embodyrl.runs.record import read_run
from embodyrl.tracking.report import write_report
from embodyrl.tracking.report.charts import WALL_CLOCK, chart
from embodyrl.tracking.report.compare import by_task, changes_from_defaults
from embodyrl.tracking.report.series import CURVES, curves_of, running_mean


class Page(HTMLParser):
    """Gathers a page's elements, addresses, and text outside of scripts and styles."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.items: dict[str, object] = {}
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "action", "data")]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"] and data.startswith("{"):
            self.items = json.loads(data)
        elif self.tags[-1:] not in (["script"], ["style"]):
            self.text += data


def test_a_report_has_results_with_intervals_learning_times_and_config(tmp_path: Path) -> None:
    make_run(tmp_path)
    page = Page(write_report(tmp_path))
    assert page.addresses == [], "nothing may be fetched"
    for text in ("75 %", "95 % interval 59 % to 86 %", "36 episodes", "Done after 3 iterations", "a processor"):
        assert text in page.text, text
    assert page.text.index("evaluation") < page.text.index("algorithm.gamma") < page.text.index("seed: 1  #")
    assert "render" in page.text and "engine.optimizer.lr" not in page.text.split("The whole config")[0]
    titles = {"Success", "Return", "Episode length", "Explained variance", "Seconds by phase"}
    assert all(title in page.text for title in titles) and "Temperature" not in page.text
    assert page.tags.count("figure") == len(page.items) == 6  # of what the rows have


def test_tasks_have_their_own_intervals_and_failures_come_first(tmp_path: Path) -> None:
    make_run(tmp_path)
    run = read_run(tmp_path)
    assert run.final is not None
    assert [(each.name, each.successes, each.trials) for each in by_task(run.final)] == [
        ("push", 9, 18),
        (SCRIPT, 18, 18),
    ]
    page = Page(write_report(tmp_path))
    assert "push <b>it</b>" in page.text
    tasks, episodes = page.text.index("9 of 18"), page.text.index("All 36 episodes")
    assert "29 % to 71 %" in page.text[tasks - 40 : tasks]  # Wilson's interval of 9 of 18
    first, last = page.text.index("failed", episodes), page.text.rindex("failed")
    assert page.text[first:last].count("success") == 0 and page.text[first - 10 : last].count("failed") == 8


def test_no_script_in_a_name_a_task_a_chart_or_a_file_reaches_the_page(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "graph.mmd").write_text(f"flowchart TD\n{SCRIPT}")
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "<script>.mp4").write_bytes(b"\0")
    (tmp_path / "run.log").write_text(f"2026-01-31 12:00:00  warning: {SCRIPT}\n")
    page = Page(write_report(tmp_path))
    assert page.tags.count("script") == 3 and "img" not in page.tags and "b" not in {*page.tags} - {"b"}
    assert page.text.count(SCRIPT) >= 5


def test_small_videos_are_in_the_page_and_large_ones_are_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path)
    (tmp_path / "videos").mkdir()
    for iteration, size in ((0, 4000), (2, 10), (3, 20)):
        (tmp_path / "videos" / f"iteration_{iteration:06d}.mp4").write_bytes(b"\0" * size)
    monkeypatch.setattr("embodyrl.tracking.report.page.EMBEDDED_MIB", 2000 / 2**20)
    page = Page(write_report(tmp_path))
    embedded, others = page.addresses[:2], page.addresses[2:]
    assert all(address.startswith("data:video/mp4;base64,AAAA") for address in embedded)
    assert others == ["videos/iteration_000000.mp4"] * 2  # the link, and the player
    assert "Recorded episodes of iteration 3: 2 of 4 failed" in page.text


@pytest.mark.parametrize("lost", ["summary.json", "metrics.jsonl", "evaluations/000003.jsonl"])
def test_a_run_without_one_of_its_files_has_a_report(tmp_path: Path, lost: str) -> None:
    make_run(tmp_path)
    (tmp_path / lost).unlink()
    page = Page(write_report(tmp_path))
    assert ("unfinished" in page.text) == (lost == "summary.json")
    assert "75 %" in page.text and "algorithm.gamma" in page.text


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    for needed, message in (("config.yaml", "holds no config.yaml"), ("", "holds no results yet")):
        with pytest.raises(UserError, match=message):
            write_report(tmp_path)
        (tmp_path / (needed or "x")).write_text("seed: 1\n")


def test_the_report_of_a_folder_without_runs_is_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(f"{tmp_path} holds no config.yaml")


def test_points_stand_at_their_env_steps_and_gaps_are_left_out(tmp_path: Path) -> None:
    make_run(tmp_path)
    run = read_run(tmp_path)
    success, returns = (curves_of(run, curve) for curve in CURVES[:2])
    (evaluated,) = success
    assert (evaluated.x, evaluated.y, evaluated.points) == ([0.0, 300.0], [0.0, 0.75], True)
    assert evaluated.low[1] == pytest.approx(0.5893, abs=1e-4)
    assert [(each.x, each.y) for each in returns] == [
        ([100.0, 200.0, 300.0], [1.0, 3.0, 5.0]),
        ([0.0, 300.0], [2.0, 2.0]),
    ]


def test_charts_can_be_drawn_over_the_wall_clock_where_it_is_known(tmp_path: Path) -> None:
    make_run(tmp_path)
    run = read_run(tmp_path)
    spent = [(row.get("time/iteration") or 0.0) + (row.get("time/eval") or 0.0) for row in run.rows]
    training, evaluated = curves_of(run, next(each for each in CURVES if "env/return" in each.metrics))
    assert training.minutes == pytest.approx([sum(spent[: at + 1]) / 60.0 for at in (1, 2, 3)])
    assert evaluated.minutes == pytest.approx([spent[0] / 60.0, sum(spent) / 60.0]) and training.minutes[0] > 0.0
    item = json.dumps(chart([training, evaluated], x_label="env steps"))
    assert item.count('"minutes"') >= 2 and WALL_CLOCK in item
    unknown = chart([training, replace(evaluated, minutes=())], x_label="env steps")
    assert '"steps"' not in json.dumps(unknown) and WALL_CLOCK not in json.dumps(unknown)
    untimed = read_run(tmp_path)
    untimed.rows = [row | {"time/iteration": None, "time/eval": None} for row in run.rows]
    assert not untimed.minutes


def test_lines_of_training_are_smooth_by_the_newest_episodes(tmp_path: Path) -> None:
    make_run(tmp_path)
    rows = [
        {"iteration": n, "env/total_steps": 10.0 * n, "env/return_recent": 5.0}
        | ({"env/return": float(n)} if n % 2 else {})
        for n in range(1, 5)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    single, smooth, *_ = curves_of(read_run(tmp_path), next(each for each in CURVES if "env/return" in each.metrics))
    assert (single.faint, single.name, single.y) == (True, "", [1.0, 3.0])
    assert (smooth.name, smooth.x, smooth.y) == ("training, newest episodes", [10.0, 20.0, 30.0, 40.0], [5.0] * 4)


def test_a_long_run_is_drawn_as_means_of_iterations(tmp_path: Path) -> None:
    make_run(tmp_path)
    rows = [{"iteration": n, "env/total_steps": 10.0 * n, "train/learning_rate": float(n % 2)} for n in range(1, 5001)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = next(each for each in CURVES if "train/learning_rate" in each.metrics)
    (line,) = curves_of(read_run(tmp_path), curve)
    assert len(line.x) == 500 and set(line.y) == {0.5} and line.x[-1] == 50_000 and "means of 10" in line.name
    assert running_mean([1.0, 2.0, 6.0, 4.0], 3) == pytest.approx([1.5, 3.0, 4.0, 5.0])


def test_settings_differ_from_the_defaults_of_the_components_that_are_chosen() -> None:
    config = {
        "seed": 0,
        "algorithm": {"name": "ppo", "gamma": 0.5, "epochs": 4, "loss": {"name": "of_a_plugin", "x": 1}},
        "engine": {"optimizer": {"lr": 3.0e-4}},
        "of": "another version",
    }
    found = {each.name: (each.value, each.default) for each in changes_from_defaults(config)}
    assert found["algorithm.gamma"] == ("0.5", "0.99") and found["algorithm.loss.x"] == ("1", "")
    assert found["of"] == ("another version", "")
    assert not found.keys() & {"algorithm.epochs", "engine.optimizer.lr"}
