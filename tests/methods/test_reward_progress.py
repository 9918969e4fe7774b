"""A predictor of progress: its labels, how wrong it is about what was held out, and runs that it pays."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow", reason="needs the extra data")

sys.path.append(str(Path(__file__).parents[1] / "runner"))

from learners import FORESEEN, write_predictor
from small_runs import Runs

from embodyrl.config import ConfigError, load_config
from embodyrl.data.judgements import ProgressLabels
from embodyrl.data.layout import DatasetError, DatasetSpec, Episode
from embodyrl.data.reader import Dataset
from embodyrl.data.store import EpisodeStore
from embodyrl.data.writer import DatasetWriter
from embodyrl.envs import Observation
from embodyrl.methods.reward_progress.learner import Errors
from embodyrl.models.classifier import ProgressPredictor


def record(folder: Path, solved: list[list[int]], length: int = 6) -> EpisodeStore:
    """Write an episode for each list: the task is solved after these actions."""
    spec = DatasetSpec(action_names=("force",), state_dim=2, fps=10, outcome=True, ends=True)
    with DatasetWriter(folder, spec) as writer:
        for number, actions in enumerate(solved):
            moments = np.stack([np.full(length + 1, number), np.arange(length + 1)], 1).astype(np.float32)
            writer.add(
                Episode(
                    task="push",
                    proprio=moments[:-1],
                    last_proprio=moments[-1],
                    actions=np.zeros((length, 1), np.float32),
                    rewards=np.zeros(length, np.float32),
                    success=np.isin(np.arange(length), actions),
                )
            )
    return EpisodeStore(Dataset(folder), load_config("gym_pendulum", ["seed=3"]).config)


def test_progress_is_one_minus_the_share_of_the_longest_time_that_is_left(tmp_path: Path) -> None:
    labels = ProgressLabels(record(tmp_path / "data", [[3, 4, 5], [1], [], [5]]), 0.3)
    assert labels.horizon == 6
    far = labels.answers.reshape(4, 7)
    assert far[0] == pytest.approx([1 - 4 / 6, 1 - 3 / 6, 1 - 2 / 6, 1 - 1 / 6, 1, 1, 1])
    assert far[1, :3] == pytest.approx([1 - 2 / 6, 1 - 1 / 6, 1])
    assert far[3] == pytest.approx(np.arange(7) / 6)
    assert np.isneginf(far[1, 3:]).all() and np.isneginf(far[2]).all(), "no success follows"


def test_what_no_success_follows_is_not_learned_from(tmp_path: Path) -> None:
    labels = ProgressLabels(record(tmp_path / "data", [[3, 4, 5], [1], [], [5], [2], [4]]), 0.3)
    away = set(labels.episodes_held_out.tolist())
    for batch in labels.batches(0, 5):
        assert batch.actions.shape[1:] == (1, 1) and np.isfinite(batch.actions).all()
        assert not away & set(batch.observation.proprio[:, 0].astype(int).tolist())
        assert 2 not in batch.observation.proprio[:, 0]
    observations, answers = labels.held_out()
    seen = np.concatenate([each.proprio for each in observations])
    assert set(seen[:, 0].astype(int).tolist()) <= away and len(seen) == len(answers) and np.isfinite(answers).all()
    with pytest.raises(DatasetError, match="a success follows 0 observations"):
        ProgressLabels(record(tmp_path / "none", [[], [], []]), 0.3)


def test_errors_are_those_by_hand() -> None:
    found = Errors.of(np.array([0.1, 0.4, 0.3, 0.9], np.float32), np.array([0.0, 0.25, 0.5, 1.0], np.float32), 8)
    assert found.mean == pytest.approx((0.1 + 0.15 + 0.2 + 0.1) / 4)
    assert found.constant == pytest.approx((0.375 + 0.125 + 0.125 + 0.625) / 4)
    assert found.ordered == pytest.approx(5 / 6) and "pairs in order 0.83" in found.line()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a predictor that was learned from a pendulum that rises."""
    made = tmp_path_factory.mktemp("foreseen")
    write_predictor(made)
    return made


def test_the_held_out_error_is_printed_and_better_than_a_constant(folder: Path) -> None:
    said = (folder / "judge" / "run.log").read_text()
    assert "20 demonstrations, 16 of which succeed" in said and said.count("held out   error ") == 3
    facts = json.loads((folder / "judge" / "progress" / "progress.json").read_text())
    assert facts["held_out"]["mean"] < 0.5 * facts["held_out"]["constant"] and facts["held_out"]["ordered"] > 0.9
    predictor = ProgressPredictor.load(folder / "judge" / "progress", torch.device("cpu"))
    angles = np.array([3.0, 2.0, 1.0, 0.0])
    states = np.stack([np.cos(angles), np.sin(angles), np.zeros(4)], 1).astype(np.float32)
    found = predictor.progress(Observation(proprio=states, task_descriptions=[""] * 4))
    assert (np.diff(found) > 0.05).all() and (found >= 0).all() and (found <= 1).all()


@pytest.mark.parametrize("pays", ["gain", "level"])
def test_what_is_paid_is_what_it_predicts(folder: Path, pays: str) -> None:
    (folder / "my.yaml").write_text(FORESEEN.replace("FOLDER", str(folder)))
    found = Runs(folder, folder / "my.yaml")(f"algorithm.reward.pays={pays}", "run.iterations=4").replay()
    predictor = ProgressPredictor.load(folder / "judge" / "progress", torch.device("cpu"))
    states = found["proprio"].numpy()
    progress = predictor.progress(Observation(proprio=states, task_descriptions=[""] * len(states)))
    compared = 0
    for slot in range(4):
        here = np.flatnonzero(found["slot"].numpy() == slot)
        rows = here[np.argsort(found["number"].numpy()[here])]
        for now, then in pairwise(rows):
            # The moment after a decision, unless another episode has begun there.
            if found["decided"][now] and found["number"][then] == found["number"][now] + 1:
                wanted = progress[then] - (progress[now] if pays == "gain" else 0.0)
                assert found["progress"][now].sum().item() == pytest.approx(wanted, abs=1e-5)
                compared += 1
    assert compared > 100


def test_a_missing_predictor_and_demonstrations_beside_a_replay_are_refused(folder: Path, tmp_path: Path) -> None:
    text = FORESEEN.replace("FOLDER", str(folder))
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"algorithm.reward is 'progress', but algorithm.reward.path is null"):
        load_config(tmp_path / "my.yaml", ["algorithm.reward.path=null"])
    with pytest.raises(ConfigError, match=r"holds no predictor of progress \(no progress.json\)"):
        load_config(tmp_path / "my.yaml", [f"algorithm.reward.path={tmp_path}"])
    (tmp_path / "my.yaml").write_text(text.replace("algorithm: sac", "algorithm: rlpd"))
    with pytest.raises(ConfigError, match="takes decisions from demonstrations, too, which have no such reward"):
        load_config(tmp_path / "my.yaml", [f"data.path={folder / 'judged'}"])
