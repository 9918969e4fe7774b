"""A simulator process dies during a rollout and is replaced: nothing is learned from what it was playing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from counter_simulator import COUNT
from known_numbers import make_collector

from embodyrl.algorithms.advantages import gae
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.episodes import evaluation_episodes
from embodyrl.runner.evaluation import evaluate

pytestmark = [pytest.mark.faults]


@pytest.fixture
def mortal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is there until the simulator has died."""
    path = tmp_path / "alive"
    path.touch()
    monkeypatch.setenv("MORTAL", str(path))
    return path


def episode_rows(batch: TrajectoryBatch, slot: int) -> list[tuple[int, int, bool]]:
    """(start state, episode, valid) of a slot's decisions."""
    columns = (batch["proprio"][:, slot, 0], batch["episode"][:, slot], batch["valid"][:, slot])
    return [(int(start), int(episode), bool(valid)) for start, episode, valid in zip(*columns, strict=True)]


@pytest.mark.parametrize("schedule", ["lockstep", "pipeline", "ready_batch"])
def test_a_lost_episode_is_invalid_and_the_next_one_is_learned_from(mortal: Path, schedule: str) -> None:
    settings = {"num_envs": 2, "workers": 2, "num_chunks": 12, "schedule": schedule}
    with make_collector(simulator="counter", **settings) as collector:
        plain = collector.collect()
    with make_collector(simulator="mortal", on_worker_death="restart", **settings) as collector:
        rollout = collector.collect()
        assert len(collector.manager.take_deaths()) == 1 and not mortal.exists()
    batch = rollout.batch
    invalid = ~batch["valid"]
    [slot] = torch.nonzero(invalid.any(0)).squeeze(1).tolist()  # one process served one slot
    other = 1 - slot
    for name in ("proprio", "rewards", "terminated", "truncated", "next_values", "valid", "episode"):
        assert torch.equal(batch[name][:, other], plain.batch[name][:, other]), name
    rows = torch.nonzero(invalid[:, slot]).squeeze(1).tolist()
    first, died = rows[0], rows[-1]
    assert died - first == 2 and rows == list(range(first, died + 1))  # it died over its third step
    assert batch["steps"][died, slot] == 0 and not batch["rewards"][died, slot].any()
    # What was played before, and the episodes that follow, are those of a run in which nobody dies.
    before = [row for row in episode_rows(plain.batch, slot) if row[1] < int(batch["episode"][died, slot])]
    assert episode_rows(batch, slot)[:first] == before
    number = int(batch["episode"][died, slot]) + 1
    following = [row for row in episode_rows(batch, slot) if row[1] == number]
    assert following and following[0] in episode_rows(plain.batch, slot) and all(valid for *_, valid in following)
    invalid_episodes = 1
    ended = int((batch["terminated"] | batch["truncated"])[:, slot].sum())
    assert len([each for each in rollout.finished if each.slot == slot]) == ended
    assert int(batch["episode"][-1, slot]) + 1 - invalid_episodes >= ended


def test_invalid_chunks_do_not_leak_into_the_advantages_of_others(mortal: Path) -> None:
    with make_collector(simulator="mortal", on_worker_death="restart", num_envs=1, num_chunks=12) as collector:
        batch = collector.collect().batch
    columns = {name: batch[name] for name in ("values", "next_values", "valid")}
    settings = {"discounts": torch.full(batch.size, 0.9), "gae_lambda": 0.8}
    rewards, ended = batch["rewards"].sum(2), batch["terminated"] | batch["truncated"]
    advantages, returns = gae(**columns, **settings, rewards=rewards, ended=ended)
    kept = batch["valid"][:, 0]
    assert not kept.all() and not advantages[~kept].any() and not returns[~kept].any()
    alone = {name: column[kept] for name, column in {**columns, "rewards": rewards, "ended": ended}.items()}
    expected, _ = gae(**alone, discounts=settings["discounts"][kept], gae_lambda=0.8)
    assert torch.equal(advantages[kept], expected)


def test_with_whole_episodes_the_slot_has_no_decision_at_all(mortal: Path) -> None:
    with make_collector(
        simulator="mortal", on_worker_death="restart", whole=True, num_envs=2, workers=2, num_chunks=5
    ) as collector:
        first, second = collector.collect(), collector.collect()
    lost = ~first.batch["valid"].any(0)
    assert int(lost.sum()) == 1 and len(first.finished) == 1
    assert second.batch["valid"].any(0).all() and len(second.finished) == 2


def test_an_evaluation_plays_a_lost_episode_again_and_finds_the_same(mortal: Path) -> None:
    episodes = evaluation_episodes(COUNT.sources, first_start_state=101, count=7, seed=1)
    found = []
    for simulator in ("counter", "mortal"):
        with make_collector(simulator=simulator, on_worker_death="restart", num_envs=2, workers=2) as collector:
            evaluation = evaluate(collector.manager, collector.engine, episodes)
        found.append((evaluation.episodes, evaluation.successes, evaluation.mean_return, evaluation.mean_length))
    assert not mortal.exists() and found[0] == found[1]
