"""Observations of demonstrations with the answer to whether the task is solved there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs the extra data")

from embodyrl.config import load_config
from embodyrl.config.schema import Config
from embodyrl.data.judgements import Judgements
from embodyrl.data.layout import DatasetError, DatasetSpec, Episode
from embodyrl.data.reader import Dataset
from embodyrl.data.store import EpisodeStore
from embodyrl.data.writer import DatasetWriter


def record(folder: Path, *, solved: list[int], ends: bool = True, length: int = 6) -> Dataset:
    """Write an episode for each number: the task is solved from that action on; `length`: never."""
    spec = DatasetSpec(action_names=("force",), state_dim=2, fps=10, outcome=True, ends=ends)
    with DatasetWriter(folder, spec) as writer:
        for number, first in enumerate(solved):
            moments = np.stack([np.full(length + 1, number), np.arange(length + 1)], 1).astype(np.float32)
            writer.add(
                Episode(
                    task="push",
                    proprio=moments[:-1],
                    last_proprio=moments[-1] if ends else None,
                    actions=np.zeros((length, 1), np.float32),
                    rewards=np.zeros(length, np.float32),
                    success=np.arange(length) >= first,
                )
            )
    return Dataset(folder)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config("gym_pendulum", ["seed=3"]).config


def test_an_observation_is_solved_after_the_action_that_solved_it(tmp_path: Path, config: Config) -> None:
    shown = Judgements(EpisodeStore(record(tmp_path / "whole", solved=[2, 6, 4, 1]), config), 0.5)
    assert shown.answers[:7].tolist() == [False, False, False, True, True, True, True], "the first one never is"
    assert shown.answers[7:14].sum() == 0 and len(shown.answers) == 4 * 7
    cut = Judgements(EpisodeStore(record(tmp_path / "cut", solved=[2, 3, 4, 1], ends=False), config), 0.5)
    assert len(cut.answers) == 4 * 6, "without a last observation the last answer is nobody's"
    assert cut.answers[:6].tolist() == [False, False, False, True, True, True]


def test_half_of_a_minibatch_is_solved_and_nothing_of_it_is_held_out(tmp_path: Path, config: Config) -> None:
    shown = Judgements(EpisodeStore(record(tmp_path / "data", solved=[2, 5, 4, 1, 3, 0]), config), 0.34)
    assert len(shown.episodes_held_out) == 2
    away = set(shown.episodes_held_out.tolist())
    batches = list(shown.batches(0, 20))
    again = list(shown.batches(7, 1))
    assert np.array_equal(batches[7].observation.proprio, again[0].observation.proprio), "by their number alone"
    for batch in batches:
        episodes, moments = batch.observation.proprio.T.astype(int)
        assert batch.actions.sum() == len(batch.actions) // 2
        assert not away & set(episodes.tolist())
        first = np.array([2, 5, 4, 1, 3, 0])[episodes]
        assert np.array_equal(batch.actions[:, 0, 0] > 0, moments > first)
    observations, answers = shown.held_out()
    states = np.concatenate([each.proprio for each in observations])
    assert set(states[:, 0].astype(int).tolist()) == away and len(states) == len(answers) == 14


def test_what_cannot_be_learned_from_is_said(tmp_path: Path, config: Config) -> None:
    with pytest.raises(DatasetError, match="has 1 episode: some are needed to learn from"):
        Judgements(EpisodeStore(record(tmp_path / "one", solved=[2]), config), 0.2)
    with pytest.raises(DatasetError, match=r"too few observations are solved: 0, .* --keep all --pushes 4"):
        Judgements(EpisodeStore(record(tmp_path / "none", solved=[6, 6, 6]), config), 0.2)
