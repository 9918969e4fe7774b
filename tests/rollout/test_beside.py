"""Demonstrations in the minibatches of a replay: their share is exact, and nobody mistakes one for the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from known_numbers import make_collector

from embodyrl.config import load_config
from embodyrl.data.layout import DatasetSpec, Episode
from embodyrl.data.store import EpisodeStore
from embodyrl.data.transitions import Transitions
from embodyrl.data.writer import DatasetWriter
from embodyrl.engine.parallel import SINGLE_PROCESS
from embodyrl.rollout.interventions import Source
from embodyrl.rollout.replay import DemonstrationSampler, Minibatch, Replay, ReplayState
from embodyrl.rollout.replay_fields import MIB, replay_fields


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
    return Transitions(EpisodeStore.open(config))


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


def taught_replays(count: int, capacity: int = 400, parts: dict[str, range] | None = None) -> dict[str, Replay]:
    """Replays of rollouts in which an expert executed every decision whose reward is an even number."""
    found = {
        name: Replay(
            capacity,
            slots=4,
            own=own,
            fields=replay_fields(proprio_dim=2, action_dim=2, chunk_size=1, corrected=True),
            start_after=8,
            seed=1,
            memory=100 * MIB,
            folder=Path(),
        )
        for name, own in (parts or {"whole": range(4)}).items()
    }
    with make_collector(num_envs=4, num_chunks=5) as collector:
        for _ in range(count):
            rollout = collector.collect()
            expert = rollout.batch["rewards"][..., 0] % 2 == 0
            rollout.batch["source"] = torch.where(expert, int(Source.expert), int(Source.policy)).byte()
            rollout.batch["labels"], rollout.batch["labelled"] = rollout.batch["actions"], expert
            for replay in found.values():
                replay.add(rollout)
    return found


def drawn(replay: Replay, demonstrations: Transitions, share: float, size: int, count: int) -> Iterator[Minibatch]:
    replay._generator.manual_seed(7)
    replay._taken = count
    return replay.minibatches(count, size, DemonstrationSampler(demonstrations=demonstrations, share=share))


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
    replay, beside = replays["whole"], DemonstrationSampler(demonstrations=demonstrations, share=0.5)
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


# ---- interventions join the demonstrations


def shares(replay: Replay, demonstrations: Transitions, size: int, count: int, joins: bool = True) -> list[Minibatch]:
    replay._generator.manual_seed(7)
    replay._taken = count
    beside = DemonstrationSampler(demonstrations=demonstrations, share=0.5, interventions_join=joins)
    return [*replay.minibatches(count, size, beside)]


def test_interventions_join_the_demonstrations_share(demonstrations: Transitions) -> None:
    [replay] = taught_replays(4).values()
    count = int(replay.metrics()["replay/interventions"])
    assert 0 < count < len(replay)
    found = shares(replay, demonstrations, 100, 300)
    assert all(int(each.demonstrated.sum()) == 50 for each in found), "they are part of the share, not beside it"
    recorded = np.concatenate([(each.columns["proprio"][each.demonstrated][:, 0] == 1000).numpy() for each in found])
    assert recorded.mean() == pytest.approx(6 / (6 + count), rel=0.1), "each is as likely as a recorded one"
    for each in found:
        theirs = each.demonstrated & (each.columns["proprio"][:, 0] != 1000)
        assert (each.columns["rewards"][theirs, 0] % 2 == 0).all() and each.columns["labelled"][theirs].all()
        assert torch.equal(each.columns["labels"][theirs], each.columns["actions"][theirs])
    others = torch.cat([each.columns["rewards"][~each.demonstrated, 0] % 2 for each in found])
    assert 0 < others.mean() < 1, "all decisions are drawn online, theirs among them"
    apart = shares(replay, demonstrations, 100, 5, joins=False)
    assert all((each.columns["proprio"][each.demonstrated][:, 0] == 1000).all() for each in apart)


def test_an_intervention_that_made_room_is_no_demonstration_any_more(demonstrations: Transitions) -> None:
    few, many = (taught_replays(count, capacity=48)["whole"] for count in (2, 9))
    assert few.metrics()["replay/interventions"] < len(many) == many.metrics()["replay/decisions"]
    [minibatch] = shares(many, demonstrations, 1000, 1)
    pool = {tuple(row) for row in many.seen("proprio").tolist()}  # type: ignore[union-attr]
    theirs = minibatch.columns["proprio"][minibatch.demonstrated]
    assert {tuple(row) for row in theirs.tolist() if row[0] != 1000} <= pool


def test_two_ranks_have_the_interventions_of_one(demonstrations: Transitions) -> None:
    replays = taught_replays(4, parts={"whole": range(4), "first": range(2), "second": range(2, 4)})
    parts = [shares(replay, demonstrations, 9, 6) for replay in replays.values()]
    for whole, first, second in zip(*parts, strict=True):
        places, order = torch.cat([first.places, second.places]), whole.places.argsort()
        assert sorted(places.tolist()) == [*range(9)]
        for name, column in whole.columns.items():
            joined = torch.cat([first.columns[name], second.columns[name]])[places.argsort()]
            assert torch.equal(joined, column[order]), name


def test_a_resumed_replay_still_knows_whose_decisions_they_were(demonstrations: Transitions, tmp_path: Path) -> None:
    [replay], [again] = taught_replays(4).values(), taught_replays(0).values()
    state = replay.state(SINGLE_PROCESS, whole=True)
    assert state is not None
    state.save(tmp_path, None)
    again.restore(ReplayState.load(tmp_path), tmp_path)
    assert replay.metrics() == again.metrics() and replay.metrics()["replay/interventions"] > 0
    for one, other in zip(*(shares(each, demonstrations, 40, 3) for each in (replay, again)), strict=True):
        alive = ~one.columns["terminated"]
        for name, column in one.columns.items():
            rows = alive if name == "next_proprio" else torch.ones_like(alive)
            assert torch.equal(column[rows], other.columns[name][rows]), name
