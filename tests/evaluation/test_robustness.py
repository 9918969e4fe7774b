"""`embodyrl eval --robustness`: paired episodes without and with perturbations, what it writes, and how it goes on."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import pytest
import strangers
from typer.testing import CliRunner

import embodyrl
from embodyrl.cli.main import app
from embodyrl.config.schema import KINDS
from embodyrl.errors import UserError
from embodyrl.evaluation.results import Comparison, Pairs, Row, newcombe_interval
from embodyrl.evaluation.robustness import degradations, grid_of, robustness_text, worst
from embodyrl.runner.evaluation import EpisodeRecord
from embodyrl.runs.robustness import Robustness, read_robustness
from embodyrl.tracking.report.robustness import robustness_svg

CONFIG = """
plugins: [verified]
seed: 1
run: {iterations: 2, eval_every: 0}
env:
  {name: planes, tasks: [middle], num_envs: 2, workers: 1, max_episode_steps: 30, start_method: fork, cameras: [top],
   image_size: [16, 16], task_descriptions: {middle: push the point to the middle},
   perturb: {noise: [1, 3], words: 2, share: 0.5, ramp: 1}}
eval: {episodes: 6}
model: {name: small}
rollout: {num_chunks: 8}
algorithm: {name: ppo, minibatches: 2, epochs: 1}
tracking: {sinks: [jsonl]}
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two iterations, which trains on perturbed episodes."""
    folder = tmp_path_factory.mktemp("robustness")
    with strangers.copied(Path(__file__).parent, ("verified", "verified_model"), folder):
        (folder / "config.yaml").write_text(CONFIG)
        yield embodyrl.train(folder / "config.yaml", [f"run.dir={folder / 'run'}"]).path


@pytest.fixture(scope="module")
def screen(run_dir: Path) -> str:
    """What the command shows; it writes into the run's folder."""
    shown = CliRunner().invoke(app, ["eval", str(run_dir), "--robustness", "--levels", "5,2"])
    assert shown.exit_code == 0, shown.output
    return shown.output


def results(folder: Path) -> dict[str, Any]:
    """Read results.json."""
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def test_a_run_plays_perturbed_episodes_and_evaluates_plain_ones(run_dir: Path) -> None:
    assert embodyrl.verify(run_dir, episodes=6).exit_code == 0, "its evaluation is as it was, bit for bit"
    assert (
        "perturbed (noise 1 to 3, words 2 in a share of 0.5, growing over iterations 0 to 1)"
        in (run_dir / "run.log").read_text()
    )
    plain, noisy = (embodyrl.evaluate(run_dir, each) for each in ([], ["eval.perturb.noise=5"]))
    assert plain.mean_return != noisy.mean_return
    assert noisy.mean_return == embodyrl.evaluate(run_dir, ["eval.perturb={noise: 5}"]).mean_return
    assert [each.start_state for each in plain.records] == [each.start_state for each in noisy.records]


def test_all_kinds_that_are_possible_are_played_on_the_same_episodes(run_dir: Path, screen: str) -> None:
    found = results(run_dir / "robustness")
    names = [each["name"] for each in found["evaluations"]]
    assert names == ["none", "noise 2", "noise 5", "words 2", "words 5"] and found["complete"]
    played = [
        [(record["task"], record["start_state"], record["seed"]) for record in each["records"]]
        for each in found["evaluations"]
    ]
    assert all(each == played[0] and len(each) == 6 for each in played)
    returns = {each["name"]: [record["return"] for record in each["records"]] for each in found["evaluations"]}
    assert returns["none"] != returns["noise 5"]
    assert returns["none"] == returns["words 5"], "its model reads no words"
    rows = read_robustness(run_dir)
    assert [row.to_plain() for row in rows] == found["robustness"]
    assert [(row.kind, row.level) for row in rows] == [
        (None, 0),
        ("noise", 2),
        ("noise", 5),
        ("words", 2),
        ("words", 5),
    ]
    assert rows[-1].drop == 0.0 and rows[-1].lost == rows[-1].gained == 0
    assert f"none: success {rows[0].success:.2f}, return" in screen


def test_the_screen_shows_a_table_of_eighty_columns(run_dir: Path, screen: str) -> None:
    assert "  6 episodes of middle, without and with\n  noise, words at levels 2, 5\n" in screen
    assert "not possible here: camera, light, texture, layout, robot" in screen
    [first] = [line for line in screen.splitlines() if line.startswith("kind ")]
    lines = screen[screen.index(first) :].splitlines()[:6]
    assert [line.split()[0] for line in lines] == ["kind", "none", "noise", "5", "words", "5"]
    assert max(map(len, lines)) <= 80 and "-0.00" not in screen


def test_what_was_played_is_among_the_results(run_dir: Path, screen: str) -> None:
    played = [each["settings"][0]["eval"]["perturb"] for each in results(run_dir / "robustness")["evaluations"]]
    assert played == [None, {"noise": [2]}, {"noise": [5]}, {"words": [2]}, {"words": [5]}]


@pytest.fixture(scope="module")
def noisy_dir(run_dir: Path) -> Path:
    """A run whose evaluations are perturbed."""
    folder = run_dir.parent
    return embodyrl.train(
        folder / "config.yaml", [f"run.dir={folder / 'noisy'}", "run.iterations=1", "eval.perturb={noise: 5}"]
    ).path


def test_a_protocol_perturbs_nothing_unless_it_is_asked_to(
    run_dir: Path, noisy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.yaml").write_text(
        "{title: Short, simulator: planes, episodes_per_task: 4, aspects: {horizon: {says: short, set: "
        "{env.max_episode_steps: 20}}}}"
    )
    protocols = [str(tmp_path / "short.yaml"), "own"]
    found = embodyrl.compare(noisy_dir, protocols=protocols, progress=True)
    assert [row.settings[0]["eval"]["perturb"] is None for row in found.rows] == [True, False]
    printed = capsys.readouterr().out
    assert re.search(r"eval.perturb +.*noise.* +null\n", printed) and "  perturbed: noise 5\n" in printed
    asked = embodyrl.compare(noisy_dir, overrides=["eval.perturb={noise: 1}"], protocols=protocols[:1])
    assert asked.rows[0].settings[0]["eval"]["perturb"]["noise"] == [1]


@pytest.mark.parametrize("swapped", [False, True])
def test_both_policies_play_under_the_perturbations_of_the_first(
    run_dir: Path, noisy_dir: Path, swapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (noisy_dir, run_dir) if swapped else (run_dir, noisy_dir)
    found = embodyrl.compare(first, second, progress=True)
    ways = [row.settings[0]["eval"]["perturb"] for row in found.rows]
    assert ways[0] == ways[1] and (ways[0] is not None) == swapped
    printed = capsys.readouterr().out
    assert "as for the first policy: eval.perturb = " in printed and "still differ" not in printed
    found = embodyrl.compare(first, second, overrides=["eval.perturb.words=1"])
    ways = [row.settings[0]["eval"]["perturb"] for row in found.rows]
    assert ways[0] == ways[1] and ways[0]["words"] == [1] and bool(ways[0]["noise"]) == swapped


def test_the_report_has_a_section(run_dir: Path, screen: str) -> None:
    page = (run_dir / "report.html").read_text()
    assert "<h2>Robustness</h2>" in page and "Checkpoint 000002: the same 6 episodes" in page
    known = read_robustness(run_dir)[0].success is not None
    assert ('aria-label="success under perturbations"' in page) == known
    assert f"report: {run_dir / 'report.html'}" in screen


def test_it_goes_on_where_it_was_interrupted(run_dir: Path, screen: str, tmp_path: Path) -> None:
    folder, expected = tmp_path / "half", results(run_dir / "robustness")
    folder.mkdir()
    for name in ("evaluation.json", "episodes.jsonl"):
        shutil.copy(run_dir / "robustness" / name, folder)
    lines = (folder / "episodes.jsonl").read_text().splitlines()
    (folder / "episodes.jsonl").write_text("\n".join(lines[:14]) + "\n")
    shown = CliRunner().invoke(app, ["resume", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert "playing noise 5 (3 of 5): 2 of 6 episodes were played" in shown.output
    found = results(folder)
    assert found["robustness"] == expected["robustness"]
    for one, other in zip(found["evaluations"], expected["evaluations"], strict=True):
        assert one["records"] == other["records"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--levels", "1,6"], "--levels 1,6: '6' is no level, want numbers from 1 to 5, as in 1,3,5"),
        (
            ["--kinds", "camra"],
            "--kinds camra: there is no kind 'camra' - did you mean 'camera'? (kinds: camera, light",
        ),
        (
            ["--kinds", "camera", "--out", "new"],
            "'camera' is not possible with simulator 'planes', env.cameras = ['top'] and model",
        ),
        (["--compare", "other"], "--robustness is of one policy with its own settings: leave out --compare"),
        (["--protocol", "own"], "--robustness is of one policy with its own settings: leave out --protocol"),
        (
            [],
            "holds results, and they are never overwritten: name another folder with --out DIR, or continue with what",
        ),
        (
            ["eval.perturb={noise: 2}", "--out", "new"],
            "eval.perturb and --robustness: episodes without a perturbation are what the",
        ),
        (["env.perturb.noise=2"], "env.perturb.noise=2: this perturbs training episodes, and an evaluation plays none"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    run_dir: Path, screen: str, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["eval", str(run_dir), "--robustness", *words])
    assert not list(tmp_path.iterdir())
    assert message in str(found.exception) and found.exit_code == 1


def test_kinds_belong_to_robustness(run_dir: Path) -> None:
    found = CliRunner().invoke(app, ["eval", str(run_dir), "--kinds", "noise"])
    assert "--kinds says what --robustness plays: add --robustness, or leave it out" in str(found.exception)


def test_levels_and_kinds_are_lists() -> None:
    assert grid_of(None, None) == {"": [1, 3, 5]}
    assert grid_of("words, noise,words", "4,2,4") == {"words": [2, 4], "noise": [2, 4]}
    with pytest.raises(UserError, match="'' is no level"):
        grid_of(None, "1,")


# ---- by hand


def row(label: str, outcomes: str, returns: float = 1.0) -> Row:
    """An evaluation whose episodes succeed (1) or not (0), of which the n-th has the return n * `returns`."""
    records = tuple(
        EpisodeRecord(
            task="t",
            start_state=number,
            seed=number,
            success=text == "1",
            success_at_end=text == "1",
            total_reward=returns * number,
            length=5,
        )
        for number, text in enumerate(outcomes)
    )
    states = tuple(range(len(outcomes)))
    usual: dict[str, Any] = {"policy": "p", "protocol": None, "sampled": False, "seconds": 1.0, "settings": ()}
    return Row(label=label, records=records, initial_states=states, **usual)


FOUND = Comparison(
    rows=(
        row("none", "1111111100"),
        row("camera 1", "1111111000"),
        row("camera 5", "0010000000"),
        row("noise 3", "1011111110", 0.5),
    )
)


def test_the_drop_is_that_of_pairs() -> None:
    plain, slight, strong, noise = degradations(FOUND)
    assert (plain.kind, plain.level, plain.success, plain.drop) == (None, 0, 0.8, None)
    assert (slight.kind, slight.level, slight.lost, slight.gained) == ("camera", 1, 1, 0)
    assert slight.drop == pytest.approx(0.1) and strong.drop == pytest.approx(0.7) and strong.lost == 7
    low, high = newcombe_interval(Pairs(both=1, only_first=7, only_second=0, neither=2))
    assert (strong.drop_low, strong.drop_high) == (pytest.approx(-high), pytest.approx(-low))
    assert (noise.lost, noise.gained) == (1, 1) and noise.drop == 0.0 and str(noise.drop) == "0.0"


def test_the_worst_are_lost_to_the_lowest_level_of_their_kind() -> None:
    lost = worst(FOUND, 4)
    assert [(each.label, each.initial_state) for each in lost] == [("noise 3", 1), ("camera 1", 7)]
    assert lost[0].perturb == (("noise", 3),) and lost[0].decrease == 0.5
    assert len(worst(FOUND, 1)) == 1 and worst(Comparison(rows=FOUND.rows[:1]), 4) == []


def test_table_and_figure_show_every_evaluation() -> None:
    rows = degradations(FOUND)
    lines = robustness_text(rows).splitlines()
    assert len(lines) == 5 and max(map(len, lines)) <= 80
    assert lines[2].split()[:3] == ["camera", "1", "0.70"] and lines[3].split()[0] == "5"
    root = ElementTree.fromstring(robustness_svg(rows))
    texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("camera") == texts.count("noise") == 2 and "none 80 %" in texts
    curves = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    heights = [float(pair.split(",")[1]) for pair in curves[0].attrib["points"].split()]
    assert heights == sorted(heights) and len(heights) == 3, "less success is further down"


def test_names_of_many_curves_stay_inside_of_the_figure() -> None:
    labels = [f"{kind} {level}" for kind in KINDS for level in (1, 5)]
    rows = degradations(Comparison(rows=(row("none", "1100"), *(row(label, "0000") for label in labels))))
    root = ElementTree.fromstring(robustness_svg(rows))
    names = {kind: [] for kind in KINDS}
    for each in root.iter("{http://www.w3.org/2000/svg}text"):
        if each.text in names:
            names[each.text].append(float(each.attrib["y"]))
    heights = sorted(max(places) for places in names.values())
    assert heights[-1] < float(root.attrib["height"]), "none is cut off at the bottom"
    curves = sorted(places[1] for places in names.values())
    assert all(two - one >= 13 for one, two in pairwise(curves)), "none covers another"


def test_success_that_is_unknown_is_left_out_of_table_and_figure() -> None:
    unknown = Robustness(
        kind=None,
        level=0,
        episodes=3,
        success=None,
        success_low=None,
        success_high=None,
        drop=None,
        drop_low=None,
        drop_high=None,
        lost=0,
        gained=0,
        mean_return=2.0,
    )
    assert robustness_text([unknown]).splitlines()[1].split() == ["none", "-", "-", "2.00"]


def test_damaged_results_are_no_section(tmp_path: Path) -> None:
    (tmp_path / "robustness").mkdir()
    path = tmp_path / "robustness" / "results.json"
    for text in ("", "{}", '{"robustness": 3}', '{"robustness": [{"kind": 3}]}', '{"robustness": []}'):
        path.write_text(text)
        assert read_robustness(tmp_path) == []


def test_lost_episodes_are_recorded_beside_those_without(run_dir: Path, screen: str) -> None:
    lost = sum(each.lost for each in read_robustness(run_dir))
    video = run_dir / "robustness" / "worst.mp4"
    if not lost:
        assert "no video: no episode that is solved without perturbation fails with one" in screen
        return
    with av.open(str(video)) as file:
        assert file.streams.video[0].width == 512
