"""What rollout workers play fills a replay as the ranks' own rollouts would, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from learners import Learner
from small_runs import Runs, assert_same_run

Find = Callable[[str], tuple[Learner, Runs]]


def workers(count: int) -> list[str]:
    return [f"placement.rollout.workers={count}", f"env.workers={count}"]


@pytest.mark.parametrize("name", ["sac", "pixels", "rlpd", "iql", "dagger", "steered"])
def test_a_replay_is_filled_by_workers_as_by_the_ranks_themselves(name: str, runs_of: Find) -> None:
    learner, runs = runs_of(name)
    run = runs(*workers(2))
    learner.shows(run)
    assert_same_run(runs(), run, learner.iterations)
