"""Evaluations that are compared: protocols and policies on the same episodes, in real simulators."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import programs
import pytest
from slow import rest_slow

import embodyrl
from embodyrl.cli import train
from embodyrl.cli.arguments import CommandLineError
from embodyrl.config import ConfigError, load_config
from embodyrl.errors import UserError
from embodyrl.evaluation import study
from embodyrl.evaluation.protocols import ProtocolError
from embodyrl.evaluation.results import Pairs

SMALL = [
    "env.num_envs=4",
    "env.workers=1",
    "env.max_episode_steps=60",
    "env.success_return=30",
    "rollout.num_chunks=64",
    "model.hidden_sizes=[16]",
    "run.iterations=6",
    "run.eval_every=0",
    "run.save_every=1",
    "tracking.sinks=[jsonl]",
    "tracking.report=false",
]
"""CartPole: solved by balancing for 30 steps. A policy learns that halfway in six iterations."""
SHORT = """
title: Short episodes
simulator: gymnasium
models: [cnn]
episodes_per_task: 12
aspects:
  horizon: {says: 20 steps, set: {env.max_episode_steps: 20}, differs: nothing}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint for each iteration."""
    path = tmp_path_factory.mktemp("study") / "run"
    assert train.run(load_config("experiment/gym_cartpole", [*SMALL, f"run.dir={path}"])) == 0
    return path


@pytest.fixture
def short(tmp_path: Path) -> str:
    """A protocol with episodes that are too short for success."""
    path = tmp_path / "short.yaml"
    path.write_text(SHORT)
    return str(path)


def results(folder: Path) -> dict[str, Any]:
    """Read results.json."""
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def test_one_policy_under_two_protocols_plays_the_same_initial_states(
    run: Path, short: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = dict(protocols=["own", short], out=out)
    assert train.evaluate(str(run), ["env.num_envs=2", "eval.episodes=8"], **asked) == 0
    printed = capsys.readouterr().out
    assert "short.yaml" in printed and re.search(r"env.max_episode_steps +60 +20\n", printed)
    assert "published for cnn, this policy is mlp" in printed and "not the same, horizon: nothing" in printed
    assert "your own instead of the protocol's: eval.episodes" in printed
    found = results(out)
    own, other = found["evaluations"]
    assert found["complete"] and (own["episodes"], other["episodes"]) == (8, 8)
    assert [each["initial_state"] for each in own["records"]] == [each["initial_state"] for each in other["records"]]
    assert max(each["length"] for each in other["records"]) == 20 and other["successes"] == 0
    assert own["successes"] == sum(each["success"] for each in own["records"]) > 0
    [difference] = found["differences"]
    pairs = Pairs(both=0, only_first=own["successes"], only_second=0, neither=8 - own["successes"])
    assert (difference["pairs"], difference["only_first"]) == (8, own["successes"])
    assert (difference["low"], difference["high"]) == pairs.interval and difference["p_value"] == pairs.p_value
    # The episodes are those of a plain evaluation with the same settings.
    alone = embodyrl.evaluate(run, ["env.num_envs=2", "env.max_episode_steps=20"], episodes=8)
    assert [each.length for each in alone.records] == [each["length"] for each in other["records"]]


def test_two_policies_play_the_same_episodes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run / "checkpoints" / "000001", run / "checkpoints" / "000006"
    video = tmp_path / "side by side.mp4"
    asked = dict(other=str(second), video=video, out=tmp_path / "out")
    assert train.evaluate(str(first), ["eval.episodes=12"], **asked) == 0
    printed = capsys.readouterr().out
    found = results(tmp_path / "out")
    [difference] = found["differences"]
    assert (difference["first"], difference["second"]) == ("000001", "000006")
    one, other = ([each["success"] for each in row["records"]] for row in found["evaluations"])
    cells = [(True, True), (True, False), (False, True), (False, False)]
    counted = [list(zip(one, other, strict=True)).count(cell) for cell in cells]
    assert [difference[name] for name in ("both", "only_first", "only_second", "neither")] == counted
    assert counted[1] + counted[2] > 0, "a comparison without a difference shows nothing"
    assert f"recorded {min(4, counted[1] + counted[2])} of the episodes that differ" in printed
    with av.open(str(video)) as film:
        frame = next(film.decode(film.streams.video[0]))
    assert frame.width == 2 * 256, "two policies side by side"
    for row, place in zip(found["evaluations"], (first, second), strict=True):
        alone = embodyrl.evaluate(place, episodes=12)
        assert [each.total_reward for each in alone.records] == [each["return"] for each in row["records"]]


def test_two_policies_under_two_protocols_have_a_table_for_each(
    run: Path, short: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run / "checkpoints" / "000001", run / "checkpoints" / "000006"
    asked = dict(protocols=["own", short], other=str(second), out=tmp_path / "out")
    assert train.evaluate(str(first), ["eval.episodes=12"], **asked) == 0
    printed = capsys.readouterr().out
    found = results(tmp_path / "out")
    rows = found["evaluations"]
    assert [row["name"] for row in rows] == ["000001", "000006"] * 2
    assert [row["protocol"] and row["protocol"]["name"] for row in rows] == [None, None, short, short]
    alone, of_short = found["differences"]
    assert (alone["protocol"], of_short["protocol"]) == ("own", "short")
    # The difference is that within each protocol: episodes of 20 steps are never solved.
    successes = [row["successes"] for row in rows]
    assert alone["only_second"] - alone["only_first"] == successes[1] - successes[0] != 0
    assert (of_short["neither"], of_short["difference"]) == (12, 0.0)
    tables = re.findall(
        r"^(own|short)\n\n +episodes .*\n000001 .*\n000006 .*\n\nagainst 000001 .*\n000006 ", printed, re.M
    )
    assert tables == ["own", "short"] and "playing 000006, short (4 of 4)" in printed
    assert "short: no episode differs" in printed and "own: only solved by" in printed


@pytest.mark.slow
def test_a_second_policy_gets_the_episodes_of_the_first(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shorter = [*SMALL, "run.iterations=1", "env.max_episode_steps=50", "eval.first_start_state=20000", "seed=3"]
    assert train.run(load_config("experiment/gym_cartpole", [*shorter, f"run.dir={other}"])) == 0
    found = embodyrl.compare(run, other, episodes=3)
    assert found.pairs(found.rows[1]).count == 3
    (settings,) = found.rows[1].settings
    assert (settings["env"]["max_episode_steps"], settings["eval"]["first_start_state"]) == (60, 10000)


def test_equal_settings_are_played_once(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "same.yaml"
    path.write_text(SHORT.replace("20}", "60}"))
    begun: list[study.Part] = []
    opened = study.acting

    def counted(part: study.Part, *more: Any) -> Any:
        begun.append(part)
        return opened(part, *more)

    monkeypatch.setattr(study, "acting", counted)
    found = embodyrl.compare(run, protocols=["own", str(path)], episodes=4, progress=True)
    assert len(begun) == 1 and "the same settings as own" in capsys.readouterr().out
    assert found.rows[0].records == found.rows[1].records


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the evaluation once so many episodes have ended."""
    heard: list[int] = []
    original = study.EvaluationRun._hear

    def stopping(self: study.EvaluationRun, part: int, index: int, record: Any) -> None:
        original(self, part, index, record)
        heard.append(index)
        if len(heard) == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(study.EvaluationRun, "_hear", stopping)


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    """results.json without what every evaluation has of its own."""
    return found | {"evaluations": [each | {"seconds": 0} for each in found["evaluations"]]}


@pytest.mark.parametrize("sample", rest_slow([True, False]), ids=["sampled", "most likely"])
def test_an_interrupted_evaluation_goes_on_and_equals_one_that_was_not(
    run: Path,
    short: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    sample: bool,
) -> None:
    asked: dict[str, Any] = {"protocols": [short, "own"], "episodes": 8, "sample": sample, "progress": True}
    embodyrl.compare(run, **asked, out=tmp_path / "whole")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(11, patch)
        with pytest.raises(KeyboardInterrupt):
            embodyrl.compare(run, **asked, out=out)
    printed = capsys.readouterr().out
    assert "own (interrupted)" in printed and f"next: embodyrl resume {shlex.quote(str(out))}" in printed
    found = results(out)
    assert not found["complete"] and [each["episodes"] for each in found["evaluations"]] == [8, 3]
    (out / "results.json").unlink()  # as after a kill
    with (out / "episodes.jsonl").open("a") as file:
        file.write('{"evaluation": 1, "part": 0, "num')
    assert train.resume(out, []) == 0
    assert without_times(results(out)) == without_times(results(tmp_path / "whole"))
    numbers = [(row["evaluation"], row["number"]) for row in lines_that_are_whole(out)]
    # Streams of drawn actions run through all episodes, so these are all played again.
    assert len(numbers) == 16 + (3 if sample else 0) and len(set(numbers)) == 16
    printed = capsys.readouterr().out
    assert "(1 of 2): 8 of 8 episodes were played" in printed
    assert ("(2 of 2): 3 of 8 episodes were played" in printed) is not sample
    monkeypatch.setattr(study, "acting", lambda *_: pytest.fail("simulators were started"))
    again = embodyrl.compare(run, **asked, out=out, resume=True)
    assert [len(row.records) for row in again.rows] == [8, 8]


def lines_that_are_whole(folder: Path) -> list[dict[str, Any]]:
    """Read episodes.jsonl without what a kill has cut short."""
    found = (folder / "episodes.jsonl").read_text().splitlines()
    return [json.loads(line) for line in found if line.endswith("}")]


def test_a_killed_evaluation_goes_on(run: Path, tmp_path: Path) -> None:
    out, checkpoint = tmp_path / "out", run / "checkpoints" / "000006"
    words = ["-m", "embodyrl", "eval", checkpoint, "eval.episodes=30", "env.num_envs=1", "--out", out]
    with programs.Program(words, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as eval_:
        end = time.monotonic() + 240
        while not (out / "episodes.jsonl").is_file() or len(lines_that_are_whole(out)) < 3:
            assert eval_.poll() is None and time.monotonic() < end
            time.sleep(0.005)
        eval_.send_signal(signal.SIGSTOP)  # it must not be done before the other one asks for the folder
        refused = programs.run(["-m", "embodyrl", "resume", out])
        eval_.kill()
    assert refused.returncode == 2 and "in use by another process" in refused.stderr
    played = len(lines_that_are_whole(out))
    assert played < 30 and not (out / "results.json").exists()
    done = programs.run(["-m", "embodyrl", "resume", out])
    assert done.returncode == 0 and f"{played} of 30 episodes were played" in done.stdout, done.stderr
    found = results(out)
    assert found["complete"] and len(lines_that_are_whole(out)) == 30
    alone = embodyrl.evaluate(checkpoint, episodes=30)
    assert [each.total_reward for each in alone.records] == [
        each["return"] for each in found["evaluations"][0]["records"]
    ]


def test_an_evaluation_goes_on_only_as_it_began(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, first = tmp_path / "out", run / "checkpoints" / "000001"
    embodyrl.compare(first, episodes=2, out=out)
    monkeypatch.setattr(study, "acting", lambda *_: pytest.fail("simulators were started"))
    asked = out / "evaluation.json"

    def refused(expected: str, path: Path = first, overrides: Sequence[str] = (), **options: Any) -> None:
        with pytest.raises(UserError, match=re.escape(expected)):
            embodyrl.compare(path, None, overrides, **{"resume": True, "episodes": 2, "out": out} | options)

    refused(f"{out} holds results, and they are never overwritten: name another folder with --out DIR", resume=False)
    refused(f"{asked} is of another evaluation, so its episodes cannot be kept: evaluations[0].weights", run)
    refused("evaluations[0].parts[0].eval.episodes: 2 there, 3 now", episodes=3)
    refused("evaluations[0].parts[0].env.max_episode_steps: 60 there, 50 now", overrides=["env.max_episode_steps=50"])
    refused("name it with out=", out=None)
    embodyrl.compare(first, None, ["env.num_envs=2"], episodes=2, out=out, resume=True)
    with pytest.raises(
        CommandLineError, match=re.escape(f"{out} is an evaluation, which continues as it began: leave")
    ):
        train.resume(out, ["run.iterations=3"])
    found = json.loads(asked.read_text())
    asked.write_text(json.dumps(found | {"versions": found["versions"] | {"numpy": "1.0"}}))
    refused("versions.numpy: 1.0 there, ")
    asked.write_text(json.dumps(found | {"command": found["command"] | {"policy": "elsewhere", "directory": "/there"}}))
    with pytest.raises(CommandLineError, match=re.escape("names elsewhere from /there")):
        train.resume(out, [])
    asked.write_text("{")
    refused("evaluation.json is damaged (JSONDecodeError")


def wrong_ways(run: Path, short: str, tmp_path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "results.json").write_text("{}")
    (tmp_path / "chunks.yaml").write_text(SHORT.replace("env.max_episode_steps: 20", "eval.actions: 8"))
    (tmp_path / "typo.yaml").write_text(SHORT.replace("env.max_episode_steps", "env.max_episode_step"))
    yield {"protocols": ["openpi"]}, "protocol 'openpi' is for libero, but this checkpoint plays gymnasium"
    yield {"protocols": [short, short]}, "is named twice"
    two = {"protocols": ["own", short], "other": run, "video": tmp_path / "x.mp4"}
    yield two, "a video shows two policies under one protocol"
    yield {"protocols": [short], "video": tmp_path / "x.mp4"}, "a video of protocols shows nothing new"
    yield {"other": run, "sample": True, "video": tmp_path / "x.mp4"}, "they would end otherwise"
    yield {"out": tmp_path / "old"}, "results are never overwritten"
    yield {"protocols": [str(tmp_path / "chunks.yaml")]}, "(this checkpoint cannot follow it): eval.actions = 8"
    yield {"protocols": [str(tmp_path / "typo.yaml")]}, "did you mean 'env.max_episode_steps'"


def test_what_cannot_be_played_is_refused_before_anything_starts(
    run: Path, short: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "acting", lambda *_: pytest.fail("simulators were started"))
    for arguments, expected in wrong_ways(run, short, tmp_path):
        with pytest.raises(UserError, match=re.escape(expected)) as caught:
            embodyrl.compare(run, **arguments)
        assert isinstance(caught.value, ProtocolError | ConfigError) and caught.value.exit_code == 2


@pytest.mark.skipif(importlib.util.find_spec("metaworld") is None, reason="MetaWorld is not installed")
def test_settling_in_metaworld_is_steps_of_zeros_that_do_not_count() -> None:
    import numpy as np

    from embodyrl.envs import EpisodeSpec
    from embodyrl.envs.metaworld.simulator import MetaWorld
    from embodyrl.envs.options import MetaWorldConfig

    def simulator(settle_steps: int) -> MetaWorld:
        return MetaWorld(MetaWorldConfig(name="metaworld", tasks=["push-v3"], settle_steps=settle_steps), 1)

    episode = EpisodeSpec(task="push-v3", start_state=4, seed=0)
    settled, plain = simulator(3), simulator(0)
    first = settled.reset([0], [episode])
    plain.reset([0], [episode])
    rested = plain.step_chunk([0], np.zeros((1, 3, 4), np.float32))
    assert first.proprio is not None and rested.observation.proprio is not None
    assert np.array_equal(first.proprio, rested.observation.proprio)
    settled.close()
    plain.close()
