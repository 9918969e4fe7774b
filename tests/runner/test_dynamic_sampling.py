"""Dynamic sampling in whole runs: what becomes of a policy that never succeeds, or always does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from small_runs import Run

from embodyrl.cli import train

DAPO = ["algorithm=dapo", "rollout.episodes=whole", "rollout.num_chunks=40", "rollout.group_size=2", "run.save_every=1"]
DAPO += ["algorithm.max_collections=5", "run.eval_every=0"]
STEPS = 4 * 40
"""Control steps of a collection."""
TWO_RANKS = ["engine.parallel.world_size=2"]


@pytest.mark.parametrize("ranks", [[], TWO_RANKS], ids=["one rank", "two ranks"])
def test_a_policy_that_never_succeeds_is_not_asked_again(
    small_run: Callable[..., Run], capsys: pytest.CaptureFixture[str], ranks: list[str]
) -> None:
    never = [*DAPO, *ranks, "env.success_return=0.0", "run.iterations=4"]
    run = small_run("never", *never)
    rows = [row for row in run.metrics() if row["iteration"]]
    assert len(rows) == 4
    for row in rows:
        assert (row["filter/collections"], row["filter/groups_collected"], row["filter/groups_kept"]) == (1, 2, 0)
        assert (row["env/steps"], row["env/episodes"], row["env/success_once"]) == (STEPS, 4, 0.0)
        assert (row["filter/groups_learned"], row["filter/groups_waiting"], row["train/epochs"]) == (0, 0, 0)
    assert run.summary["env_steps"] == 4 * STEPS
    assert run.digest(1, "policy/model.safetensors") == run.digest(4, "policy/model.safetensors")
    log = (run.path / "run.log").read_text()
    assert log.count("warning: no episode succeeded, and algorithm.filter=zero_variance keeps no group") == 1
    assert log.index("no episode succeeded") < log.index("saved"), "said in the first iteration"
    assert "keeps no group of a collection" not in log
    if not ranks:
        short = small_run("short", *never, "run.iterations=2")
        assert train.resume(short.path, ["run.iterations=4"]) == 0
        assert without_evaluation(Run(short.path)) == without_evaluation(run)


def without_evaluation(run: Run) -> list[dict[str, Any]]:
    """The rows of a run, but for its evaluation after the last iteration."""
    return [{key: value for key, value in row.items() if "eval" not in key} for row in run.metrics()]


def test_a_policy_that_always_succeeds_is_asked_as_often_as_it_may(small_run: Callable[..., Run]) -> None:
    run = small_run("always", *DAPO, "env.success_return=-1.0e9", "run.iterations=1")
    (row,) = [row for row in run.metrics() if row["iteration"]]
    assert (row["filter/collections"], row["env/steps"], row["env/success_once"]) == (5, 5 * STEPS, 1.0)
    log = (run.path / "run.log").read_text()
    assert log.count("warning: algorithm.filter=zero_variance keeps no group of a collection") == 1
    assert "it collects up to 5 times per iteration" in log and "no episode succeeded" not in log


def test_a_policy_that_sometimes_succeeds_is_asked_again(small_run: Callable[..., Run]) -> None:
    """Where half of the episodes succeed there is something to keep, and collecting goes on until it is enough."""
    first = small_run("probe", *DAPO, "run.iterations=1", "env.success_return=0.0")
    middle = json.loads((first.path / "metrics.jsonl").read_text().splitlines()[-1])["env/return"]
    run = small_run("sometimes", *DAPO, "run.iterations=3", f"env.success_return={middle}")
    rows = [row for row in run.metrics() if row["iteration"]]
    assert any(row["filter/collections"] > 1 for row in rows) and any(row["train/epochs"] > 0 for row in rows)
    for row in rows:
        assert row["env/steps"] == STEPS * row["filter/collections"]
