"""Dynamic sampling in whole runs: what becomes of a policy that never succeeds, or always does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slow import rest_slow
from small_runs import Runs, assert_same_run, copy_of, resumed

DAPO = ["algorithm=dapo", "rollout.episodes=whole", "env.max_episode_steps=20", "rollout.num_chunks=20"]
DAPO += ["rollout.group_size=2", "run.save_every=1", "algorithm.max_collections=5", "run.eval_every=0"]
STEPS = 4 * 20
"""Control steps of a collection."""
TWO_RANKS = ["engine.parallel.world_size=2"]


@pytest.mark.parametrize("ranks", rest_slow([[], TWO_RANKS]), ids=["one rank", "two ranks"])
def test_a_policy_that_never_succeeds_is_not_asked_again(small_runs: Runs, tmp_path: Path, ranks: list[str]) -> None:
    never = [*DAPO, *ranks, "env.success_return=0.0", "run.iterations=4"]
    run = small_runs(*never)
    rows = [row for row in run.metrics() if row["iteration"]]
    assert len(rows) == 4
    for row in rows:
        assert (row["filter/collections"], row["filter/groups_collected"], row["filter/groups_kept"]) == (1, 2, 0)
        assert (row["env/steps"], row["env/episodes"], row["env/success_once"]) == (STEPS, 4, 0.0)
        assert (row["filter/groups_learned"], row["filter/groups_waiting"], row["train/epochs"]) == (0, 0, 0)
    assert run.summary["env_steps"] == 4 * STEPS
    assert run.digest(1) == run.digest(4)
    log = run.log()
    assert log.count("warning: no episode succeeded, and algorithm.filter=zero_variance keeps no group") == 1
    assert log.index("no episode succeeded") < log.index("saved"), "said in the first iteration"
    assert "keeps no group of a collection" not in log
    if not ranks:
        assert_same_run(run, resumed(copy_of(run, tmp_path / "again", 2)), 4)


def test_a_policy_that_always_succeeds_is_asked_as_often_as_it_may(small_runs: Runs) -> None:
    run = small_runs(*DAPO, "env.success_return=-1.0e9", "run.iterations=1")
    (row,) = [row for row in run.metrics() if row["iteration"]]
    assert (row["filter/collections"], row["env/steps"], row["env/success_once"]) == (5, 5 * STEPS, 1.0)
    log = run.log()
    assert log.count("warning: algorithm.filter=zero_variance keeps no group of a collection") == 1
    assert "it collects up to 5 times per iteration" in log and "no episode succeeded" not in log


def test_a_policy_that_sometimes_succeeds_is_asked_again(small_runs: Runs) -> None:
    """Where half of the episodes succeed there is something to keep, and collecting goes on until it is enough."""
    longer = [*DAPO, "env.max_episode_steps=40", "rollout.num_chunks=40"]
    first = small_runs(*longer, "run.iterations=1", "env.success_return=0.0")
    middle = json.loads((first.path / "metrics.jsonl").read_text().splitlines()[-1])["env/return"]
    run = small_runs(*longer, "run.iterations=3", f"env.success_return={middle}")
    rows = [row for row in run.metrics() if row["iteration"]]
    assert any(row["filter/collections"] > 1 for row in rows) and any(row["train/epochs"] > 0 for row in rows)
    for row in rows:
        assert row["env/steps"] == 2 * STEPS * row["filter/collections"]
