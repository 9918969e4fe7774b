"""Several simulators in a run: which of them plays an episode, and that each plays what it would play alone."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from counter_simulator import COUNTING
from known_numbers import LIMIT, KnownPolicy

from embodyrl.config.mix import MixConfig, MixEntry
from embodyrl.config.schema import EngineConfig, EnvConfig, RolloutConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs.manager import EnvManager, MixedManager, start_env_manager
from embodyrl.errors import UserError
from embodyrl.rollout.batch import leaves
from embodyrl.rollout.collector import Collector
from embodyrl.rollout.episodes import EpisodeSource, Rollout, by_source, evaluation_episodes
from embodyrl.runner.evaluation import borrowed, evaluate

ALONE = dataclasses.replace(COUNTING, max_episode_steps=LIMIT, num_envs=4, workers=1)
OTHER = dataclasses.replace(ALONE, tasks=["count"], start_states=7)


def mixed(*entries: tuple[str, float, EnvConfig], workers: int = 1, num_envs: int = 4) -> MixConfig:
    """A mix of these simulators."""
    mix = [MixEntry(name=name, share=share, simulator=env) for name, share, env in entries]
    tasks = [f"{name}/{task}" for name, _, env in entries for task in env.tasks]
    return MixConfig(name="mix", tasks=tasks, mix=mix, workers=workers, num_envs=num_envs, max_episode_steps=LIMIT)


TWO = (("often", 3.0, ALONE), ("seldom", 1.0, OTHER))


def managed(config: EnvConfig) -> EnvManager | MixedManager:
    plugin = {"plugins": ["counter_simulator"], "plugin_path": str(Path(__file__).parent)}
    return start_env_manager(config, chunk_size=1, **plugin)


def collected(config: EnvConfig, manager: EnvManager | MixedManager, schedule: str = "lockstep") -> Collector:
    engine = HybridEngine(KnownPolicy(1), config=EngineConfig(), iterations=1, seed=1)
    source = EpisodeSource(config.sources, group_size=1, seed=1)
    rollout = RolloutConfig(num_chunks=24, chunk_size=1, schedule=schedule)
    return Collector(manager, engine, source=source, config=rollout, critic=True)


def same(one: Sequence[Rollout], other: Sequence[Rollout], *, sources: bool = True) -> None:
    for left, right in zip(one, other, strict=True):
        assert left.batch.columns() == right.batch.columns()
        ours, others = leaves(left.batch), leaves(right.batch)
        assert [name for name in ours if not torch.equal(ours[name], others[name])] == []
        assert left.env_steps == right.env_steps
        kept = {} if sources else {"source": ""}
        assert [dataclasses.replace(each, **kept) for each in left.finished] == [
            dataclasses.replace(each, **kept) for each in right.finished
        ]


def test_a_mix_of_one_plays_what_it_would_play_alone() -> None:
    alone, one = ALONE, mixed(("only", 5.0, ALONE))
    with managed(alone) as plain, managed(one) as wrapped:
        assert isinstance(plain, EnvManager) and isinstance(wrapped, MixedManager)
        first, second = collected(alone, plain), collected(one, wrapped)
        same([first.collect() for _ in range(2)], [second.collect() for _ in range(2)], sources=False)


@pytest.mark.parametrize("schedule", ["lockstep", "pipeline"])
def test_slots_change_between_simulators_and_episodes_are_those_that_were_drawn(schedule: str) -> None:
    config = mixed(*TWO)
    source = EpisodeSource(config.sources, group_size=1, seed=1)
    with managed(config) as manager:
        collector = collected(config, manager, schedule)
        rollout = collector.collect()
        batch = rollout.batch
        starts = batch["start_state"], batch["episode"]
        descriptions = [collector.task_descriptions[index] for index in batch["task_index"].flatten().tolist()]
        for k in range(24):
            for b in range(4):
                episode = source.episode(b, int(starts[1][k, b]))
                assert starts[0][k, b] == episode.start_state == batch["proprio"][k, b, 0]
                assert descriptions[4 * k + b] == manager.spec.tasks[episode.task]
        played = [source.episode(each.slot, 0).source for each in rollout.finished]
        assert {each.source for each in rollout.finished} == {"often", "seldom"} and played
        moved = [source.episode(b, n).source != source.episode(b, n + 1).source for b in range(4) for n in range(4)]
        assert any(moved), "too easy: no slot went from one simulator to another"


def test_one_process_is_two() -> None:
    rollouts = []
    for workers in (1, 2):
        config = mixed(*TWO, workers=workers)
        with managed(config) as manager:
            collector = collected(config, manager)
            rollouts.append([collector.collect() for _ in range(2)])
    same(*rollouts)


def test_a_state_goes_on_in_another_mix_and_after_an_evaluation() -> None:
    config = mixed(*TWO)
    with managed(config) as manager, managed(config) as other:
        collector, later = collected(config, manager), collected(config, other)
        collector.collect()
        state, slots = collector.state_dict(), manager.get_state(range(4))
        expected = [collector.collect() for _ in range(2)]
        assert other.set_state(range(4), slots) == []
        later.load_state_dict(state)
        found = [later.collect()]
        episodes = evaluation_episodes(config.sources, first_start_state=100, count=9, seed=1)
        with borrowed(other, later.clock, later.in_progress):
            result = evaluate(other, later.engine, episodes)
        later.offload()
        same(expected, [*found, later.collect()])
    assert {name: len(each) for name, each in by_source(result.records).items()} == {"often": 6, "seldom": 3}
    metrics = result.metrics()
    assert metrics["eval/episodes/often"] == 6.0
    total = sum(metrics[f"eval/success_once/{name}"] * metrics[f"eval/episodes/{name}"] for name in ("often", "seldom"))
    assert total == pytest.approx(metrics["eval/success_once"] * 9)
    assert [line.split()[0] for line in [*result.lines()][1:]] == ["often", "seldom"]


def test_shares_are_those_of_episodes_and_a_group_stays_in_one_simulator() -> None:
    sources = mixed(*TWO).sources
    assert [each.share for each in sources] == [0.75, 0.25]
    single = EpisodeSource(sources, group_size=1, seed=3)
    counts = Counter(single.episode(slot, number).source for slot in range(20) for number in range(50))
    assert 0.70 < counts["often"] / 1000 < 0.80
    groups = EpisodeSource(sources, group_size=4, seed=3)
    second = EpisodeSource(sources, group_size=4, seed=3, first_slot=4)
    for number in range(20):
        assert len({groups.episode(slot, number) for slot in range(4)}) == 1
        assert groups.episode(4, number) == second.episode(0, number)


def test_each_simulator_draws_what_it_would_draw_alone() -> None:
    alone = EpisodeSource(ALONE.sources, group_size=1, seed=3)
    both = EpisodeSource(mixed(*TWO).sources, group_size=1, seed=3)
    for number in range(30):
        mine, own = both.episode(0, number), alone.episode(0, number)
        if mine.source == "often":
            assert dataclasses.replace(mine, task=mine.task.removeprefix("often/"), source="") == own


def test_simulators_that_differ_are_refused_at_the_start_with_both_names() -> None:
    choosing = dataclasses.replace(ALONE, name="chooser")
    with pytest.raises(UserError, match=r"often and choices cannot be mixed: actions is .*push.*A policy must"):
        managed(mixed(("often", 1.0, ALONE), ("choices", 1.0, choosing)))
