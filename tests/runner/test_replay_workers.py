"""What rollout workers play fills a replay as the ranks' own rollouts would, also ahead of learning, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from learners import TWO_RANKS, Learner
from slow import rest_slow
from small_runs import Runs, assert_same_run, kill_in, resumed
from test_async import lagging, learned, reference

pytestmark = [pytest.mark.usefixtures("own_experts")]

Find = Callable[[str], tuple[Learner, Runs]]

TD3 = ["algorithm=td3"]
SELDOM = ["algorithm.off_policy.updates_per_step=0.015"]
"""Of six iterations the third, fourth and sixth make a step."""
AHEAD = [
    *(("sac", 2, 2, []), ("sac", 1, 2, TD3), ("sac", 0, 1, []), ("iql", 1, 2, []), ("rlpd", 1, 1, [])),
    *(("dagger", 1, 2, []), ("pixels", 2, 1, []), ("steered", 1, 2, [])),
]
"""A learner, its staleness, the number of workers, and more settings."""
SHORT = ["run.iterations=6", "run.save_every=2", "run.eval_every=2"]


def workers(count: int) -> list[str]:
    return [f"placement.rollout.workers={count}", "env.workers=2"]


@pytest.mark.parametrize(
    "name", rest_slow(["pixels", "dagger", "qc", "sac", "rlpd", "iql", "steered", "told", "paid"], 3)
)
def test_workers_fill_a_replay_as_the_ranks_themselves_do(name: str, runs_of: Find) -> None:
    learner, runs = runs_of(name)
    run = runs(*workers(2))
    learner.shows(run)
    assert_same_run(runs(), run, learner.iterations)


def test_workers_act_by_statistics_that_changed_without_an_update(runs_of: Find) -> None:
    _, runs = runs_of("sac")
    run, own = runs(*workers(1), *SELDOM), runs(*SELDOM)
    learning = ["train/updates" in row for row in own.metrics() if "env/steps" in row]
    assert learning == [False, False, True, True, False, True]
    assert_same_run(own, run, 6)


@pytest.mark.parametrize("name", rest_slow(["pixels", "sac"]))
def test_ranks_keep_the_decisions_of_their_shares(name: str, runs_of: Find) -> None:
    learner, runs = runs_of(name)
    apart = runs(*TWO_RANKS, *workers(2))
    learner.shows(apart)
    assert learned(apart) == learned(runs(*TWO_RANKS))


@pytest.mark.parametrize(
    ("name", "staleness", "count", "more"),
    rest_slow(AHEAD, 2),
)
def test_a_run_ahead_of_learning_is_that_of_one_process_that_is(
    name: str, staleness: int, count: int, more: list[str], runs_of: Find, tmp_path: Path
) -> None:
    _, runs = runs_of(name)
    run = runs(*SHORT, *more, *lagging(staleness, count), "env.workers=2")
    assert learned(run) == reference(staleness, runs, tmp_path / "reference", *more)
    assert max(row.get("async/lag_max", 0.0) for row in run.metrics()) == float(staleness)


@pytest.mark.faults
def test_a_run_that_was_killed_goes_on_with_what_waits_for_the_replay(runs_of: Find, tmp_path: Path) -> None:
    (_, runs), path = runs_of("sac"), tmp_path / "killed"
    ahead = [*SHORT, *lagging(2, 2), "env.workers=2"]
    kill_in(5, path, runs.words(path, *ahead))
    saved = path / "checkpoints" / "000004" / "trainer"
    assert {len(list(saved.glob(f"{each}_*.safetensors"))) for each in ("waiting", "following")} == {2}
    whole, again = runs(*ahead), resumed(path, "placement.rollout.workers=1")
    assert learned(again) == learned(whole) and again.contents(6) == whole.contents(6)
    found, wanted = again.replay(), whole.replay()
    assert all(torch.equal(found[name], moments) for name, moments in wanted.items()) and wanted
