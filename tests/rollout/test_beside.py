"""Demonstrations in the minibatches of a replay: their share is exact, and nobody mistakes one for the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from known_numbers import make_collector

from embodyrl.algorithms.off_policy_sizes import MIB, replay_fields
from embodyrl.config import load_config
from embodyrl.data.layout import DatasetSpec, Episode
from embodyrl.data.reader import Dataset
from embodyrl.data.transitions import Transitions
from embodyrl.data.writer import DatasetWriter
from embodyrl.engine.soft import Minibatch
from embodyrl.rollout.replay import Beside, Replay


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Transitions:
    """Six decisions whose states are (1000, step): no rollout has such a start state."""
    folder = tmp_path_factory.mktemp("demonstrations") / "d"
    spec = DatasetSpec(action_names=("x", "y"), state_dim=2, fps=1, outcome=True)
    with DatasetWriter(folder, spec) as writer:
        writer.add(
            Episode(
                task="count up",
                proprio=np.stack([np.full(6, 1000), np.arange(6)], 1).astype(np.float32),
                actions=np.full((6, 2), 0.5, np.float32),
                rewards=np.arange(1, 7, dtype=np.float32),
                success=np.arange(6) == 5,
            )
        )
    config = load_config("experiment/push_rlpd", [f"data.path={folder}"], not_needed=[("data", "path")]).config
    return Transitions(Dataset(folder), config)


@pytest.fixture(scope="module")
def replays() -> dict[str, Replay]:
    """The same rollouts, seen by the only rank, and by each of two."""
    parts = {"whole": range(4), "first": range(2), "second": range(2, 4)}
    found = {
        name: Replay(
            400,
            slots=4,
            own=own,
            fields=replay_fields(proprio_dim=2, action_dim=2, chunk_size=1),
            start_after=8,
            seed=1,
            memory=100 * MIB,
            folder=Path(),
        )
        for name, own in parts.items()
    }
    with make_collector(num_envs=4, num_chunks=5) as collector:
        for _ in range(4):
            rollout = collector.collect()
            for replay in found.values():
                replay.add(rollout)
    return found


def drawn(replay: Replay, demonstrations: Transitions, share: float, size: int, count: int) -> Iterator[Minibatch]:
    replay._generator.manual_seed(7)
    replay._taken = count
    return replay.minibatches(count, size, Beside(demonstrations=demonstrations, share=share))


@pytest.mark.parametrize(
    ("share", "size", "counts"),
    [(0.5, 8, {4}), (0.5, 7, {3, 4}), (0.25, 6, {1, 2}), (0.1, 3, {0, 1}), (0.0, 5, {0})],
)
def test_the_share_of_demonstrations_is_exact(
    share: float, size: int, counts: set[int], replays: dict[str, Replay], demonstrations: Transitions
) -> None:
    found = [*drawn(replays["whole"], demonstrations, share, size, 40)]
    numbers = [int(each.demonstrated.sum()) for each in found]
    assert set(numbers) == counts and sum(numbers) == round(40 * size * share)
    for each in found:
        assert torch.equal(each.columns["proprio"][:, 0] == 1000, each.demonstrated)
        assert len(each.columns["steps"]) == size and sorted(each.places.tolist()) == [*range(size)]
        if each.demonstrated.any():
            assert torch.equal(each.columns["labelled"], each.demonstrated)
            assert (each.columns["labels"][each.demonstrated] == 0.5).all()


def test_the_share_goes_on_where_the_iteration_before_ended(
    replays: dict[str, Replay], demonstrations: Transitions
) -> None:
    """Minibatches of 3 with a share of a half have 1, 2, 1, 2, ... demonstrations, however they are asked for."""
    replay, beside = replays["whole"], Beside(demonstrations=demonstrations, share=0.5)
    numbers = []
    replay._taken = 0
    for count in (1, 1, 3, 1):
        replay._taken += count
        numbers += [int(each.demonstrated.sum()) for each in replay.minibatches(count, 3, beside)]
    assert numbers == [1, 2, 1, 2, 1, 2]


def test_a_buffer_that_is_smaller_than_its_share_is_drawn_from_repeatedly(
    replays: dict[str, Replay], demonstrations: Transitions
) -> None:
    assert len(demonstrations) == 6
    [one] = drawn(replays["whole"], demonstrations, 0.5, 200, 1)
    assert int(one.demonstrated.sum()) == 100
    steps = one.columns["proprio"][one.demonstrated][:, 1].unique()
    assert steps.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [8, 9])
def test_two_ranks_have_the_minibatches_of_one(
    size: int, replays: dict[str, Replay], demonstrations: Transitions
) -> None:
    parts = {name: [*drawn(replay, demonstrations, 0.5, size, 5)] for name, replay in replays.items()}
    for whole, first, second in zip(*parts.values(), strict=True):
        places = torch.cat([first.places, second.places])
        assert sorted(places.tolist()) == [*range(size)]
        assert abs(int(first.demonstrated.sum()) - int(second.demonstrated.sum())) <= 1, "dealt in turn"
        order = whole.places.argsort()
        for name, column in whole.columns.items():
            joined = torch.cat([first.columns[name], second.columns[name]])[places.argsort()]
            assert torch.equal(joined, column[order]), name
