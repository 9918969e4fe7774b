from __future__ import annotations

import html
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from embodyrl.cli import train
from embodyrl.errors import UserError
from embodyrl.tracking.report import points_of, write_report


class Tags(HTMLParser):
    """Counts tags, gathers text, and notices what is fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


TIMES = {"time/iteration": 4.0, "time/simulate": 1.0, "time/train": 3.0}
EVALUATION_TIMES = {"time/eval": 2.0, "time/eval/simulate": 0.5, "time/eval/render": 1.5}


def make_run(folder: Path) -> None:
    evaluation = {
        "eval/success_once": 0.5,
        "eval/success_low": 0.4,
        "eval/success_high": 0.6,
        "eval/return": 2.0,
        "eval/episode_length": 50.0,
        "eval/episodes": 100.0,
    }
    summary = {
        "name": "a <b>bold</b> run",
        "seed": 1,
        "iterations": 2,
        "env_steps": 200,
        "wall_s": 3.0,
        "env_steps_per_s": 66.0,
        "versions": {"embodyrl": "0.1.0"},
        "config_hash": "0123456789abcdef",
        "evaluations": {"10": evaluation, "2": evaluation, "0": evaluation},
    }
    rows = [
        {"iteration": 0, **evaluation},
        {"iteration": 1, "env/total_steps": 100.0, "env/return": 1.0, "train/explained_variance": None, **TIMES},
        {"iteration": 2, "env/total_steps": 200.0, "env/return": 3.0, **evaluation, **TIMES, **EVALUATION_TIMES},
    ]
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("seed: 1  # <script>\n")


def test_a_report_is_one_file_with_curves_evaluations_and_config(tmp_path: Path) -> None:
    make_run(tmp_path)
    page = Tags()
    page.feed(write_report(tmp_path).read_text())
    assert page.links == [], "nothing may be fetched"
    assert page.count["polyline"] == 1 and page.count["circle"] == 2  # the return; two evaluations with a row
    assert page.count["tr"] == 4 + 11 and "script" not in page.count and "b" not in page.count
    assert "a <b>bold</b> run, seed 1" in page.text and "seed: 1  # <script>" in page.text
    assert page.text.index("0.40 to 0.60") > 0
    assert page.count["rect"] == 2 * 9  # a stack of phases for each iteration
    assert "2.0025.0 %0.5025.0 %" in page.text and "render0.000.0 %1.5075.0 %" in page.text


def test_no_script_in_a_chart_or_a_name_reaches_the_page(tmp_path: Path) -> None:
    make_run(tmp_path)
    chart = "flowchart TD\n<script>alert(1)</script>"
    (tmp_path / "graph.mmd").write_text(chart)
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary["name"] = "<script>alert(2)</script>"
    summary["versions"]["<script>"] = "<script>"
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "<script>.mp4").touch()
    page = Tags()
    page.feed(text := write_report(tmp_path).read_text())
    assert "script" not in page.count
    assert chart in page.text and html.escape(chart) in text


def test_videos_are_shown_from_the_run_directory(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "videos").mkdir()
    for name in ("iteration_000000.mp4", "iteration_000040.mp4"):
        (tmp_path / "videos" / name).touch()
    page = Tags()
    page.feed(write_report(tmp_path).read_text())
    videos = ["videos/iteration_000000.mp4", "videos/iteration_000040.mp4"]
    assert page.links == [*videos, videos[-1]] and page.count["video"] == 1


def test_points_stand_at_their_env_steps_and_gaps_are_left_out() -> None:
    rows = [{"eval/x": 0.1}, {"env/total_steps": 10.0, "eval/x": None}, {"env/total_steps": 20.0, "eval/x": 0.3}]
    assert points_of("eval/x", rows) == [(0.0, 0.1), (20.0, 0.3)]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.yaml"):
        train.report(tmp_path)
