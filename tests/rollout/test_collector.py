"""The collector, on a simulator and a policy whose every number is known, through real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

from counter_simulator import COUNT, COUNTING, TASKS, last_step
from known_numbers import LIMIT, make_collector, value

from embodyrl.rollout.collector import Rollout
from embodyrl.rollout.episodes import EpisodeSource, evaluation_episodes
from embodyrl.runner.evaluation import borrowed, evaluate


def check_row(rollout: Rollout, k: int, b: int, follower: Tensor) -> None:
    """One decision of one action, against what the simulator must have done. `follower`: the next observation."""
    batch = rollout.batch
    start, step = (int(entry) for entry in batch["proprio"][k, b])
    terminated = step + 1 == last_step(start)
    truncated = step + 1 == LIMIT and not terminated
    assert batch["rewards"][k, b].tolist() == [step + 1]
    assert batch["success"][k, b].tolist() == [terminated]
    assert (bool(batch["terminated"][k, b]), bool(batch["truncated"][k, b])) == (terminated, truncated)
    assert batch["values"][k, b] == value(batch["proprio"][k, b])
    assert torch.equal(batch["trace"]["sample"][k, b], batch["proprio"][k, b] * 2)
    if terminated:
        assert batch["next_values"][k, b] == 0
    else:
        assert batch["next_values"][k, b] == value(torch.tensor([float(start), step + 1.0]))
    if terminated or truncated:
        assert follower[1] == 0, "the slot must have been reset"
    else:
        assert follower.tolist() == [start, step + 1]


def test_continuous_rollouts_follow_on_from_each_other_and_bootstrap_where_they_must() -> None:
    with make_collector() as collector:
        rollouts = [collector.collect() for _ in range(4)]
        batches = collector.engine.policy.batches
    observations = torch.cat([rollout.batch["proprio"] for rollout in rollouts])
    kinds = set()
    for number, rollout in enumerate(rollouts):
        for k in range(4):
            for b in range(3):
                row = 4 * number + k
                if row + 1 < len(observations):
                    check_row(rollout, k, b, observations[row + 1, b])
                kinds.add((bool(rollout.batch["terminated"][k, b]), bool(rollout.batch["truncated"][k, b])))
        assert rollout.batch["valid"].all() and rollout.env_steps == 12
    assert kinds == {(False, False), (True, False), (False, True)}, "too easy: not every kind of end occurred"
    cut = [3 + int(rollout.batch["truncated"][:-1].sum()) for rollout in rollouts]
    assert max(cut) > 3, "too easy: the critic never had more to look at than there are slots"
    assert max(batches) == 3, "the critic must look at no more observations at once than the policy does"


def test_the_source_decides_which_episode_each_slot_plays() -> None:
    source = EpisodeSource(COUNTING.sources, group_size=1, seed=1)
    with make_collector() as collector:
        batch = collector.collect().batch
    for k in range(4):
        for b in range(3):
            episode = source.episode(b, int(batch["episode"][k, b]))
            assert batch["proprio"][k, b, 0] == episode.start_state == batch["start_state"][k, b]
            assert batch["seed"][k, b] == episode.seed
            assert batch.task_descriptions[int(batch["task_index"][k, b])] == TASKS[episode.task]
    assert len({source.episode(slot, number) for slot in range(3) for number in range(5)}) == 15


def test_finished_episodes_report_return_length_and_success() -> None:
    with make_collector(num_chunks=12) as collector:
        finished = collector.collect().finished
        starts = EpisodeSource(COUNTING.sources, group_size=1, seed=1)
    assert len(finished) > 4
    played = {slot: 0 for slot in range(3)}
    for episode in finished:
        start = starts.episode(episode.slot, played[episode.slot]).start_state
        played[episode.slot] += 1
        length = min(last_step(start), LIMIT)
        assert episode.length == length
        assert episode.total_reward == length * (length + 1) / 2
        assert episode.success == (last_step(start) <= LIMIT)


def test_a_chunk_stops_at_the_end_of_its_episode() -> None:
    with make_collector(chunk_size=3, num_chunks=6) as collector:
        rollout = collector.collect()
    batch = rollout.batch
    for k in range(6):
        for b in range(3):
            start, step = (int(entry) for entry in batch["proprio"][k, b])
            executed = min(3, min(last_step(start), LIMIT) - step)
            assert batch["steps"][k, b] == executed
            assert batch["rewards"][k, b].tolist() == [step + 1 + i if i < executed else 0 for i in range(3)]
    assert rollout.env_steps == int(batch["steps"].sum())


def test_whole_episodes_cost_nothing_after_their_end_and_groups_share_a_start() -> None:
    with make_collector(num_envs=6, group_size=3, num_chunks=9, whole=True) as collector:
        first, second = collector.collect(), collector.collect()
        decided = sum(collector.engine.policy.batches)
    for rollout in (first, second):
        batch = rollout.batch
        starts = batch["proprio"][0, :, 0]
        assert torch.equal(starts[:3], starts[:1].expand(3)) and torch.equal(starts[3:], starts[3:4].expand(3))
        for b in range(6):
            length = min(last_step(int(starts[b])), LIMIT)
            assert batch["valid"][:, b].tolist() == [k < length for k in range(len(batch["valid"]))]
            assert (batch["terminated"] | batch["truncated"])[:, b].sum() == 1
        assert rollout.env_steps == int(batch["valid"].sum()) and len(rollout.finished) == 6
    assert not torch.equal(first.batch["proprio"][0], second.batch["proprio"][0])
    truncated = int(first.batch["truncated"].sum() + second.batch["truncated"].sum())
    assert decided == first.env_steps + second.env_steps + truncated


def test_a_slot_that_is_done_begins_its_next_episode_at_once() -> None:
    """Three episodes in one rollout are those of three rollouts, and nobody waits for the longest of each."""
    options = {"whole": True, "num_envs": 4, "workers": 2, "num_chunks": LIMIT, "seed": 3}
    with make_collector(**options) as collector:
        single = [collector.collect() for _ in range(3)]
        calls = len(collector.engine.policy.batches)
    with make_collector(**options, episodes_per_slot=3) as collector:
        triple = collector.collect()
        fewer_calls = len(collector.engine.policy.batches)
        after = collector.collect().batch["episode"][0]
    parts = [rollout.batch.pad(triple.batch.size[0], "K") for rollout in single]
    for name in ("proprio", "actions", "rewards", "terminated", "truncated", "valid", "episode", "next_values"):
        expected = torch.cat([part[name] for part in parts], 1)
        assert torch.equal(triple.batch[name], expected), name
    assert triple.batch["group"][0].tolist() == list(range(12)) and after.tolist() == [3] * 4 + [4] * 4 + [5] * 4
    assert triple.env_steps == sum(rollout.env_steps for rollout in single)
    assert sorted(map(str, triple.finished)) == sorted(str(each) for rollout in single for each in rollout.finished)
    assert fewer_calls < calls


def test_evaluation_plays_each_episode_once_and_leaves_training_as_it_was() -> None:
    episodes = evaluation_episodes(COUNT.sources, first_start_state=100, count=8, seed=1)
    lengths = [min(last_step(100 + number), LIMIT) for number in range(8)]
    with make_collector() as collector:
        before = collector.collect()
        with borrowed(collector.manager, collector.clock, collector.in_progress):
            result = evaluate(collector.manager, collector.engine, episodes)
        after = collector.collect()
    with make_collector() as undisturbed:
        assert torch.equal(undisturbed.collect().batch["proprio"], before.batch["proprio"])
        assert torch.equal(undisturbed.collect().batch["proprio"], after.batch["proprio"])
    assert result.episodes == 8
    assert result.successes == sum(last_step(100 + number) <= LIMIT for number in range(8))
    assert result.mean_length == pytest.approx(np.mean(lengths))
    assert result.mean_return == pytest.approx(np.mean([length * (length + 1) / 2 for length in lengths]))
