"""What is collected does not depend on who waits for whom, nor on what is kept beside it."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from slow import rest_slow

sys.path.append(str(Path(__file__).parent))

from counter_simulator import COUNT, shade
from far_away import far
from known_numbers import make_collector

from embodyrl.rollout.collector import Rollout
from embodyrl.rollout.episodes import evaluation_episodes
from embodyrl.runner.evaluation import borrowed, evaluate

DAWDLING = {"simulator": "dawdler", "num_envs": 4, "workers": 4, "chunk_size": 2}


def collect(count: int = 3, **options: object) -> list[Rollout]:
    with make_collector(**options) as collector:
        return [collector.collect() for _ in range(count)]


def assert_same(left: list[Rollout], right: list[Rollout]) -> None:
    for first, second in zip(left, right, strict=True):
        assert first.batch.columns() == second.batch.columns()
        for name in first.batch.columns():
            if name != "trace":
                assert torch.equal(first.batch[name], second.batch[name]), name
        assert torch.equal(first.batch["trace"]["sample"], second.batch["trace"]["sample"])
        assert (first.finished, first.env_steps) == (second.finished, second.env_steps)


@pytest.mark.parametrize(("whole", "episodes_per_slot"), rest_slow([(False, 1), (True, 3), (True, 1)], 2))
def test_all_schedules_play_the_same_episodes(whole: bool, episodes_per_slot: int) -> None:
    options = {**DAWDLING, "whole": whole, "episodes_per_slot": episodes_per_slot}
    lockstep = collect(**options, schedule="lockstep")
    assert any(rollout.finished for rollout in lockstep)
    assert_same(lockstep, collect(**options, schedule="pipeline"))
    for ready_slots in (1, 3, "auto"):
        assert_same(lockstep, collect(**options, schedule="ready_batch", ready_slots=ready_slots))


@pytest.mark.parametrize("schedule", ["lockstep", "pipeline", "ready_batch"])
@pytest.mark.parametrize("whole", [False, True], ids=["continuous", "whole"])
def test_simulators_of_another_machine_play_the_same(schedule: str, whole: bool) -> None:
    options = {"num_envs": 4, "workers": 2, "chunk_size": 2, "cameras": ("front",), "schedule": schedule}
    options |= {"whole": whole, "observe": "chunk_end" if whole else "every_step"}
    assert_same(collect(**options), collect(**options, simulators=far))


@pytest.mark.parametrize("ready_slots", [1, 4])
def test_ready_batch_waits_for_as_many_slots_as_it_was_told_to(ready_slots: int) -> None:
    options = {**DAWDLING, "schedule": "ready_batch", "ready_slots": ready_slots, "num_chunks": 12}
    with make_collector(**options) as collector:
        collector.collect()
        batches = collector.engine.policy.batches
    sums = list(itertools.accumulate(batches))
    decided = batches[: sums.index(4 * 12) + 1]  # the others are the critic's
    assert (min(decided) == 4) == (ready_slots == 4)


@pytest.mark.parametrize("schedule", ["lockstep", "pipeline", "ready_batch"])
def test_images_are_those_decided_on_whatever_happens_between_rollouts(schedule: str) -> None:
    episodes = evaluation_episodes(COUNT.sources, first_start_state=100, count=8, seed=1)
    with make_collector(**{**DAWDLING, "chunk_size": 1}, cameras=("front", "side"), schedule=schedule) as collector:
        rollouts = [collector.collect()]
        for _ in range(3):
            with borrowed(collector.manager, collector.clock, collector.in_progress):
                evaluate(collector.manager, collector.engine, episodes)
            rollouts.append(collector.collect())
    for rollout in rollouts:
        batch = rollout.batch
        assert batch["images"].shape == (4, 4, 2, 16, 16, 3)
        for k in range(4):
            for b in range(4):
                start, step = (int(entry) for entry in batch["proprio"][k, b])
                assert (batch["images"][k, b] == shade(start, step)).all()


def test_every_step_keeps_what_was_seen_in_between_and_changes_nothing_else() -> None:
    options = {"chunk_size": 3, "cameras": ("front",), "num_chunks": 6}
    (plain,), (kept,) = collect(1, **options), collect(1, **options, observe="every_step")
    extra = {"step_images", "step_proprio"}
    assert set(kept.batch.columns()) - set(plain.batch.columns()) == extra
    for name in set(plain.batch.columns()) - {"trace"}:
        assert torch.equal(plain.batch[name], kept.batch[name]), name
    cut_short = False
    for k in range(6):
        for b in range(3):
            start, step = (int(entry) for entry in kept.batch["proprio"][k, b])
            executed = int(kept.batch["steps"][k, b])
            cut_short |= executed < 3
            for i in range(3):
                seen = [start, step + 1 + i] if i < executed else [0, 0]
                assert kept.batch["step_proprio"][k, b, i].tolist() == seen
                pixel = shade(*seen) if i < executed else 0
                assert (kept.batch["step_images"][k, b, i] == pixel).all()
    assert cut_short, "too easy: no chunk stopped early"
