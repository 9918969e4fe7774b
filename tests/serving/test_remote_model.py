"""`model: remote`, a policy that a server holds, in evaluations and recordings."""

from __future__ import annotations

import json
import re
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets: pip install 'embodyrl[serve]'")
pytest.importorskip("msgpack", reason="needs msgpack: pip install 'embodyrl[serve]'")

import embodyrl
from embodyrl.cli.main import app
from embodyrl.config import ConfigError
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.errors import explain
from embodyrl.models import PolicyError, PolicyObservation, build_policy
from embodyrl.models.remote.options import RemoteConfig
from embodyrl.servers import TOKEN
from embodyrl.serving import server as serving
from tests.serving.stand_in import stand_in

Start = Callable[..., embodyrl.PolicyServer]
CONFIG = "gym_pendulum"
SHORT = ["env.num_envs=2", "env.workers=1", "env.max_episode_steps=30", "eval.episodes=6"]
"""Six episodes of ten decisions, two at a time."""
CHUNK = "rollout.chunk_size=3"


def command(*words: str) -> int:
    """Return the exit code of a command."""
    try:
        app(list(words))
    except (embodyrl.UserError, embodyrl.RunError) as error:
        return explain(error)
    except SystemExit as ended:
        return int(ended.code or 0)
    raise AssertionError("a command ends with an exit code")


def test_it_plays_the_episodes_as_the_policy_does_here(server: Start, run: Path, tmp_path: Path) -> None:
    """Two evaluations, 3 s: local and through a server, on the same episodes."""
    there = server()
    alone = [*SHORT, "env.num_envs=1"]  # a batch of several rows is rounded otherwise
    found = embodyrl.compare(run, there.url, alone, out=tmp_path / "out")
    assert found.rows[0].records == found.rows[1].records and len(found.rows[1].records) == 6
    assert there.figures.requests == 60
    pairs = found.pairs(found.rows[1])
    assert (pairs.difference, pairs.only_first, pairs.only_second) == (0.0, 0, 0)
    first, second = json.loads((tmp_path / "out" / "results.json").read_text())["evaluations"]
    assert second["policy"] == there.url and first["records"] == second["records"]
    assert second["settings"][0]["model"] | {"name": "remote", "url": there.url} == second["settings"][0]["model"]
    assert there.clients == 0, "connections are closed with the evaluation"


def test_an_evaluation_goes_on_after_its_server_was_gone(
    server: Start,
    run: Path,
    policy: embodyrl.LoadedPolicy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three evaluations of a few decisions, 4 s."""
    monkeypatch.setenv(TOKEN, "swordfish")
    monkeypatch.setattr(serving, "FINISH_S", 0.0)  # it goes in the middle of a request
    whole, asked = policy.decide, [0]

    def decide(observation: embodyrl.Observation, **options: Any) -> Any:
        asked[0] += 1
        if asked[0] == 25:  # in the second pair of episodes
            threading.Thread(target=first.close).start()
            time.sleep(0.3)
        return whole(observation, **options)

    monkeypatch.setattr(policy, "decide", decide)
    first = server(token="swordfish", max_batch=1)
    out = tmp_path / "out"
    settings = [CHUNK, "model.deadline_s=1.5", *SHORT]
    assert command("eval", first.url, "--config", CONFIG, *settings, "--out", str(out)) == 1
    told = capsys.readouterr()
    assert f"nobody answers at {first.url} within 1.5 s" in told.err and f"resume {shlex.quote(str(out))}" in told.out
    kept = (out / "episodes.jsonl").read_text().splitlines()
    assert 2 <= len(kept) < 6
    second = server(token="swordfish", port=first.port, max_batch=1)
    assert command("resume", str(out)) == 0
    assert second.figures.requests < 60, "episodes that had ended are not played again"
    assert "swordfish" not in "".join(path.read_text() for path in out.rglob("*") if path.is_file())
    found = json.loads((out / "results.json").read_text())["evaluations"][0]
    local = embodyrl.evaluate(run, [*SHORT, "env.num_envs=1"])
    played = [(each["start_state"], each["return"], each["length"]) for each in found["records"]]
    assert played == [(each.start_state, each.total_reward, each.length) for each in local.records]


def libero(message: dict[str, Any]) -> Any:
    """Answer as openpi's server for LIBERO: of its own keys, or with an error."""
    if sorted(message) != ["observation/image", "observation/state", "prompt"]:
        return f"KeyError: {sorted(message)}"
    assert message["observation/image"].shape == (64, 64, 3) and message["observation/image"].dtype == np.uint8
    return {"actions": np.full((10, 1), message["observation/state"][0], np.float64), "server_timing": {}}


def test_a_server_of_openpi_that_says_nothing_of_itself_plays(tmp_path: Path) -> None:
    """An evaluation with images and a recording, 4 s."""
    config = {"defaults": [{"env": "gym/pendulum_rgb"}, {"model": "cnn"}, {"algorithm": "ppo"}, "_self_"]}
    with stand_in(libero) as url:
        found = embodyrl.evaluate(url, SHORT, config=config, episodes=2)
        assert found.episodes == 2 and found.mean_length == 30


def test_it_can_be_recorded(server: Start, tmp_path: Path) -> None:
    """A recording of two episodes, 1 s."""
    there, out = server(), tmp_path / "recorded"
    recording = ["collect", CONFIG, "--policy", there.url, "--episodes", "2", "--keep", "all", "--out", str(out)]
    assert command(*recording, CHUNK, *SHORT[:3]) == 0
    info = json.loads((out / "meta" / "info.json").read_text())
    assert (info["total_episodes"], info["total_frames"], there.figures.requests) == (2, 60, 20)


ARM = ActionField(name="arm", meaning="native", unit="1", low=(-1.0,) * 7, high=(1.0,) * 7)


def spec(*cameras: str) -> SimulatorSpec:
    """A simulator of seven numbers of an action, eight of the state, and cameras of 4 x 4 pixels."""
    return SimulatorSpec(
        tasks={"lift": "lift the cup"},
        actions=(ARM,),
        cameras=cameras,
        image_size=(4, 4),
        proprio_dim=8,
        control_frequency=20.0,
        max_episode_steps=100,
    )


def seen(cameras: int, *texts: str) -> PolicyObservation:
    """An observation of so many cameras, a row for each task description."""
    images = np.arange(len(texts) * cameras * 48, dtype=np.uint8).reshape(len(texts), cameras, 4, 4, 3)
    proprio = np.ones((len(texts), 8), np.float32)
    return PolicyObservation.of(embodyrl.Observation(images=images, proprio=proprio, task_descriptions=[*texts]))


def test_images_go_by_their_names_and_words_as_they_are() -> None:
    asked: list[dict[str, Any]] = []

    def answer(message: dict[str, Any]) -> Any:
        asked.append(message)
        return {"actions": np.ones((5, 7))}

    told = {"cameras": ["wrist", "front"], "keys": {"wrist": ["w"], "front": ["f"], "prompt": ["p"]}}
    with stand_in(answer, told) as url:
        config = RemoteConfig(name="remote", url=url, keys={"side": "s", "state": "q"})
        policy = build_policy(config, spec("front", "top", "side", "wrist"), chunk_size=3, seed=0)
        words = ["", "pick up the caf\u00e9 cup", *map(str, range(18))]
        observation = seen(4, *words)
        decision = policy.act(policy.preprocess(observation), "eval")
        assert decision.actions.shape == (20, 3, 7) and decision.logprobs.shape == (20, 0) and decision.values is None
        with pytest.raises(PolicyError, match="none can be drawn here"):
            policy.act(policy.preprocess(observation), "train")
        policy.close()
    assert sorted(message["p"] for message in asked) == sorted(words)
    row = next(message for message in asked if message["p"] == words[1])
    assert observation.images is not None and sorted(row) == ["f", "p", "q", "s", "w"]
    for key, camera in (("f", 0), ("s", 2), ("w", 3)):
        assert np.array_equal(row[key], observation.images[1, camera])


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"chunk_size": 2}, "it decides 2 actions at a time, and rollout.chunk_size is 3: set that to 2 or less"),
        ({"action_dim": 6}, "its actions have 6 numbers, and those of the simulator 7"),
        ({"state_dim": 39}, "it reads a state of 39 numbers, and the simulator's has 8"),
        ({"cameras": ["front"], "image_size": [224, 224]}, "env.image_size is [4, 4]: set that to [224, 224]"),
        ({"cameras": ["top"]}, "sees the camera 'top', and there is none of this name ('front')"),
        ({"chunk_size": "x", "state_dim": True, "image_size": 7, "cameras": 3, "action_dim": None}, None),
        ({}, None),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_played(told: dict[str, Any], message: str | None) -> None:
    """Of a server that says nothing, with its first answer."""
    with stand_in(lambda _: {"actions": np.ones((2, 6))}, told) as url:
        config = RemoteConfig(name="remote", url=url)
        if message is not None:
            with pytest.raises(PolicyError, match=re.escape(message)):
                build_policy(config, spec("front"), chunk_size=3, seed=0)
            return
        policy = build_policy(config, spec("front"), chunk_size=3, seed=0)
        with pytest.raises(PolicyError, match=r"decides 2 actions at a time.*; its actions have 6 numbers"):
            policy.act(policy.preprocess(seen(1, "lift")), "eval")


def test_another_policy_in_the_place_of_a_lost_one_is_not_asked() -> None:
    told: list[dict[str, Any]] = [{"model": "pi0"}]
    with stand_in(lambda _: b"\xc1", told[0]) as url:
        remote = embodyrl.RemotePolicy(url, deadline_s=5.0)
        with pytest.raises(embodyrl.RunError, match="cannot be read"):
            remote.act(embodyrl.Observation(proprio=np.ones((1, 3), np.float32), task_descriptions=["x"]))
        told[0]["model"] = "pi05"
        with pytest.raises(embodyrl.RunError, match=r"another policy answers at .* than before"):
            remote.act(embodyrl.Observation(proprio=np.ones((1, 3), np.float32), task_descriptions=["x"]))


def test_what_cannot_be_is_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = "ws://127.0.0.1:1"
    with pytest.raises(ConfigError, match="model 'remote' cannot be trained: its weights are those of a server"):
        embodyrl.train(CONFIG, ["model.name=remote", f"model.url={url}", f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(embodyrl.UserError, match="in which simulator it acts: add --config EXPERIMENT"):
        embodyrl.evaluate(url)
    with pytest.raises(ConfigError, match="may hold no password: use the variable EMBODYRL_TOKEN"):
        embodyrl.evaluate("ws://me:secret@127.0.0.1:1", config=CONFIG)
    for words, message in (
        (["eval", url, "--config", CONFIG, "--sample"], "the server chooses its actions"),
        (["eval", url, "--config", CONFIG, "model.keys.topview=x"], "'topview', which is no camera of env.cameras"),
        (["collect", CONFIG, "--policy", url, "--episodes", "1", "--out", "x", "--sample"], "leave it out"),
    ):
        assert command(*words) in (1, 2)
        assert message in capsys.readouterr().err
