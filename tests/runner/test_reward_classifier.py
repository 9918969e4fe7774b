"""A classifier of success: learned from demonstrations, then what runs are paid by."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from learners import PAID, Learner
from slow import only_slow
from small_runs import Runs

pytest.importorskip("pyarrow", reason="needs the extra data")

from embodyrl.cli import train
from embodyrl.config import ConfigError, load_config
from embodyrl.data.layout import DatasetSpec, Episode
from embodyrl.data.writer import DatasetWriter
from embodyrl.envs import Observation
from embodyrl.models.classifier import SuccessClassifier


@pytest.fixture
def judged(runs_of: Callable[[str], tuple[Learner, Runs]]) -> Runs:
    """Runs of SAC that a classifier pays, which tests share and only read."""
    return runs_of("paid")[1]


@pytest.fixture
def judge(judged: Runs) -> Path:
    """A run that has learned that a high pendulum is what is wanted."""
    return judged.folder / "judge"


def test_precision_and_recall_are_those_of_what_was_held_out(
    judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (judge / "run.log").read_text()
    assert "16 demonstrations to learn from" in said and "4 held out" in said
    assert said.count("held out   threshold 0.50   precision ") == 3
    facts = json.loads((judge / "classifier" / "classifier.json").read_text())
    scores = facts["held_out"]["0.5"]
    assert scores["precision"] > 0.85 and scores["recall"] > 0.85
    assert facts["seen"] == {"state_dim": 3, "cameras": [], "image_size": [0, 0], "frames": 1}
    rows = [json.loads(line) for line in (judge / "metrics.jsonl").read_text().splitlines()]
    assert [("eval/precision" in row) for row in rows] == [False, True, False, True, True]
    assert rows[-1]["eval/recall"] == pytest.approx(scores["recall"])
    assert train.resume(shutil.copytree(judge, tmp_path / "done"), []) == 0
    assert "is done: its classifier is in" in capsys.readouterr().out


def test_a_run_that_was_stopped_learns_again_and_gets_the_same(judge: Path, tmp_path: Path) -> None:
    path = shutil.copytree(judge, tmp_path / "run")
    shutil.rmtree(path / "classifier")
    assert train.resume(path, []) == 0
    files = [folder / "classifier" / "model.safetensors" for folder in (judge, path)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_is_high_is_solved(judge: Path) -> None:
    classifier = SuccessClassifier.load(judge / "classifier", torch.device("cpu"))
    states = np.array([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], np.float32)
    found = classifier.probabilities(Observation(proprio=states, task_descriptions=["", ""]))
    assert found[0] > 0.9 and found[1] < 0.1


def test_episodes_may_go_on_and_are_paid_once(judged: Runs) -> None:
    run = judged("algorithm.reward.ends_episodes=false", "run.save_every=6")
    found = run.replay()
    assert not found["terminated"].any()
    lengths = [row["env/episode_length"] for row in run.metrics() if "env/episode_length" in row]
    assert lengths and set(lengths) == {40.0}
    high, paid_for = [], []
    for slot in range(4):
        here = found["slot"] == slot
        order = found["number"][here].argsort()
        decided, judged, states = (found[name][here][order] for name in ("decided", "judged", "proprio"))
        # Forty decisions of the first episode, and the observation that followed the last of them.
        assert decided[:40].all() and not decided[40]
        paid_for.append(int(judged[:40].sum()))
        high.append(int((states[1:41, 0] > 0.6).sum()))
    assert max(paid_for) == 1
    assert any(each == 1 and above > 1 for each, above in zip(paid_for, high, strict=True)), (
        "too easy: none was seen twice"
    )


@pytest.mark.parametrize(
    ("schedule", "episodes"),
    [
        *(("lockstep", "whole"), ("pipeline", "continuous"), ("ready_batch", "whole")),
        *map(only_slow, (("lockstep", "continuous"), ("pipeline", "whole"), ("ready_batch", "continuous"))),
    ],
)
def test_ppo_is_paid_by_it_whatever_the_schedule(judge: Path, tmp_path: Path, schedule: str, episodes: str) -> None:
    text = PAID.replace("FOLDER", str(judge.parent)).replace("sac", "ppo").replace(", head: squashed", "")
    lines = ["  epochs: 1" if "off_policy" in line else line for line in text.splitlines()]
    (tmp_path / "ppo.yaml").write_text("\n".join(lines))
    paid = Runs(tmp_path, tmp_path / "ppo.yaml", ["run.iterations=3", "run.save_every=0"])
    words = [f"rollout.episodes={episodes}", f"rollout.schedule={schedule}", "rollout.blocks=auto"]
    if episodes == "whole":
        words += ["rollout.num_chunks=40"]
    rows = paid(*words).metrics()
    assert max(row["rollout/shaped_reward_per_step"] for row in rows) > 0
    for row in rows:
        if "env/judged_success" in row:
            paid_for = row["rollout/shaped_reward_per_step"] * row["env/steps"]
            assert paid_for == pytest.approx(row["env/judged_success"] * row["env/episodes"], abs=1e-3)
            assert row["env/judged_success"] <= 1.0


def test_another_task_or_other_states_are_refused(judge: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "defaults: [env: gym/cartpole, model: mlp, algorithm: ppo, _self_]\n"
        f"algorithm: {{reward: {{name: classifier, path: {judge}}}}}\n"
    )
    with pytest.raises(ConfigError, match=r"(?s)was learned from .*Pendulum") as caught:
        load_config(str(tmp_path / "my.yaml"))
    assert "my.yaml:2" in str(caught.value)


def test_what_cannot_be_a_classifier_is_refused(judge: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "defaults: [env: gym/pendulum, model: mlp, algorithm: reward_classifier, _self_]\n"
        f"data: {{path: {judge.parent / 'judged'}}}\n"
        "model: {head: squashed}\n"
        "engine: {parallel: {world_size: 2}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "my.yaml"))
    said = str(caught.value)
    assert "my.yaml:3:15: model.head = 'squashed' is a distribution of continuous actions" in said
    assert "my.yaml:4:33: engine.parallel.world_size is set, but one process learns a classifier" in said


def test_images_are_judged_too(tmp_path: Path) -> None:
    """Solved where the image is bright; the state says nothing."""
    rng = np.random.default_rng(1)
    spec = DatasetSpec(
        action_names=("torque",), state_dim=3, fps=20, cameras=("render",), image_size=(32, 32), outcome=True, ends=True
    )
    with DatasetWriter(tmp_path / "data", spec) as writer:
        for _ in range(8):
            bright = rng.random(13) < 0.4
            images = rng.integers(0, 60, (13, 1, 32, 32, 3)) + 190 * bright[:, None, None, None, None]
            states = rng.normal(size=(13, 3)).astype(np.float32)
            writer.add(
                Episode(
                    task="swing up",
                    proprio=states[:-1],
                    last_proprio=states[-1],
                    images=images[:-1].astype(np.uint8),
                    last_images=images[-1].astype(np.uint8),
                    actions=np.zeros((12, 1), np.float32),
                    rewards=np.zeros(12, np.float32),
                    success=bright[1:],
                )
            )
    (tmp_path / "learn.yaml").write_text(
        "defaults: [env: gym/pendulum_rgb, model: cnn, algorithm: reward_classifier, _self_]\n"
        "env: {image_size: [32, 32]}\n"
        "model: {encoder: drq, channels: [8, 8], strides: [3, 2], image_features: 16}\n"
        f"data: {{path: {tmp_path / 'data'}, steps: 20, batch_size: 32}}\n"
        "run: {iterations: 3, eval_every: 0}\n"
        "engine: {optimizer: {lr: 0.003}}\n"
        "tracking: {sinks: [jsonl], report: false}\n"
    )
    assert train.run(load_config(str(tmp_path / "learn.yaml"), [f"run.dir={tmp_path / 'run'}"])) == 0
    scores = json.loads((tmp_path / "run" / "classifier" / "classifier.json").read_text())["held_out"]["0.5"]
    assert scores["precision"] > 0.9 and scores["recall"] > 0.9
    classifier = SuccessClassifier.load(tmp_path / "run" / "classifier", torch.device("cpu"))
    images = np.stack([np.full((1, 32, 32, 3), level, np.uint8) for level in (220, 30)])
    seen = Observation(images=images, proprio=np.zeros((2, 3), np.float32), task_descriptions=["", ""])
    bright, dark = classifier.probabilities(seen)
    assert bright > 0.5 > dark
