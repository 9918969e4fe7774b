"""Episodes that do not come back from their saved states are lost: nothing is learned from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from counter_simulator import COUNT
from known_numbers import make_collector

from embodyrl.envs import EpisodeSpec
from embodyrl.envs.manager import EnvManager
from embodyrl.rollout.collector import Collector
from embodyrl.rollout.episodes import evaluation_episodes
from embodyrl.runner.evaluation import borrowed, evaluate

SETTINGS = {"num_envs": 4, "workers": 2, "num_chunks": 3}
STARTS = [11, 12, 13, 20]
"""Start states of the manager's tests; those of slots 0 and 2 are odd."""


def episodes(starts: list[int]) -> list[EpisodeSpec]:
    return [EpisodeSpec(task="count", start_state=start, seed=start) for start in starts]


def step(manager: EnvManager) -> tuple[list[bool], list[list[float]]]:
    """(lost, observations without what the dice showed) of one action in every slot; the next episodes are known."""
    result = manager.step(range(4), np.zeros((4, 1, 2), np.float32), episodes([30, 32, 34, 36]))
    assert result.observation.proprio is not None
    return result.lost.tolist(), np.floor(result.observation.proprio).tolist()


def test_set_state_names_the_slots_that_did_not_come_back_and_they_are_lost() -> None:
    with make_collector(simulator="dice", **SETTINGS) as collector:
        manager = collector.manager
        manager.reset(range(4), episodes(STARTS))
        step(manager)
        states = manager.get_state(range(4))
        assert manager.set_state([3, 1], [states[3], states[1]]) == []
        assert manager.set_state(range(4), states) == [0, 2]
        assert manager.take_mismatches() == [0, 2] and manager.take_mismatches() == []
        lost, seen = step(manager)
        assert lost == [True, False, True, False]
        assert seen == [[30, 0], [12, 2], [34, 0], [20, 2]]  # the next episodes have begun, the others went on
        assert step(manager)[0] == [False] * 4


def test_an_episode_that_is_over_has_nothing_to_lose() -> None:
    with make_collector(simulator="dice", **SETTINGS) as collector:
        manager = collector.manager
        manager.reset(range(4), episodes([7, 12, 14, 20]))  # that of slot 0 ends with its first step
        manager.step(range(4), np.zeros((4, 1, 2), np.float32))
        assert manager.set_state(range(4), manager.get_state(range(4))) == []


def lend(collector: Collector) -> None:
    """Evaluate, as a run does between iterations."""
    games = evaluation_episodes(COUNT.sources, first_start_state=101, count=6, seed=1)
    with borrowed(collector.manager, collector.clock, collector.in_progress):
        evaluate(collector.manager, collector.engine, games)


def save_and_restore(collector: Collector) -> None:
    """As a resume does."""
    manager, state = collector.manager, collector.state_dict()
    manager.set_state(range(4), manager.get_state(range(4)))
    collector.load_state_dict(state)


@pytest.mark.parametrize("between", [lend, Collector.offload, save_and_restore])
def test_what_did_not_come_back_is_invalid_and_the_rest_is_as_if_nothing_had_happened(
    between: Callable[[Collector], object],
) -> None:
    with make_collector(simulator="dice", **SETTINGS) as collector:
        collector.collect()
        plain = collector.collect().batch
    with make_collector(simulator="dice", **SETTINGS) as collector:
        collector.collect()
        between(collector)
        second = collector.collect()
        mismatches = collector.manager.take_mismatches()
    expected = [slot for slot in range(4) if plain["start_state"][0, slot] % 2 == 1]
    assert expected and len(expected) < 4 and mismatches == expected
    invalid = ~second.batch["valid"]
    for slot in range(4):
        if slot in expected:  # one decision was taken on what it showed before, and then the next episode began
            assert invalid[:, slot].tolist() == [True, False, False]
            assert not second.batch["steps"][0, slot] and not second.batch["rewards"][0, slot].any()
            assert second.batch["proprio"][1, slot, 1] < 1
            assert second.batch["episode"][1, slot] == second.batch["episode"][0, slot] + 1
            ended = (second.batch["terminated"] | second.batch["truncated"])[:, slot]
            assert len([each for each in second.finished if each.slot == slot]) == int(ended.sum())
        else:
            assert not invalid[:, slot].any()
            for name in ("rewards", "terminated", "truncated", "episode", "steps", "start_state"):
                assert second.batch[name][:, slot].equal(plain[name][:, slot]), name


def test_with_whole_episodes_nothing_is_in_progress_and_nothing_is_lost() -> None:
    with make_collector(simulator="dice", whole=True, **{**SETTINGS, "num_chunks": 5}) as collector:
        for between in (lend, Collector.offload):
            collector.collect()
            between(collector)
        assert collector.collect().batch["valid"].any(0).all() and not collector.manager.take_mismatches()
