"""Runs that learn from demonstrations and a replay: imitation first, cloning beside every evaluation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learners import Learner
from small_runs import Runs

from embodyrl.rollout.collector import Collector
from embodyrl.tracking.console import columns_for

NO_IMITATION = [
    *(f"algorithm.off_policy.imitation.{name}=0" for name in ("first_steps", "cloned_coef")),
    "data.batch_size=64",  # the default, because nothing reads it then
]


@pytest.fixture
def small(runs_of: Callable[[str], tuple[Learner, Runs]]) -> Callable[[str], Runs]:
    """Runs of an algorithm, which tests share and only read."""
    return lambda name: runs_of(name)[1]


def test_cloning_is_evaluated_first_and_shown_beside_every_evaluation(small: Callable[[str], Runs]) -> None:
    run = small("rlpd")("run.eval_every=0", "run.iterations=3")
    said = run.log()
    assert re.search(r"imitation: 60 steps on 120 chunks of 4 demonstrations, loss 0\.\d+", said)
    assert re.search(
        r"held out: a policy that has imitated the other demonstrations has an error of 0\.\d+ on 30 chunks of 1 of "
        r"them; their mean has 0\.\d+",
        said,
    )
    assert re.search(r"demonstrations: 120 chunks of 4 demonstrations, 0 of which end one", said)
    assert said.count("this is behaviour cloning alone, before any rollout") == 1
    assert said.count("of behaviour cloning alone: success 1.00 [0.57, 1.00]") == 1, "also without eval_every"
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["behaviour_cloning"] == summary["evaluations"]["0"]
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval/cloned_success"] for row in rows if "eval/return" in row] == [1.0, 1.0]
    first = next(row for row in rows if "train/updates" in row)
    assert first["train/imitation_loss"] > 0 and first["train/cloned_distance"] >= 0


def test_what_measures_the_imitation_error_is_forgotten(small: Callable[[str], Runs]) -> None:
    """It changes no weight, no moment of an optimiser, and no stream."""
    brief = ["run.eval_every=0", "run.iterations=3"]
    measured, not_measured = (
        small("rlpd")(*brief, *more) for more in ([], ["algorithm.off_policy.imitation.held_out=0"])
    )
    assert "held out:" in measured.log() and "held out:" not in not_measured.log()
    found = measured.weights()
    assert all(torch.equal(found[name], each) for name, each in not_measured.weights().items())
    assert measured.metrics() == not_measured.metrics()


def test_a_policy_that_has_imitated_stays_the_same_until_it_learns_again(small: Callable[[str], Runs]) -> None:
    """Rollouts went into the statistics that scale observations, and made another policy of it: in LIBERO, where places
    hardly vary in demonstrations, success fell from 0.70 to 0 without a step of the optimiser."""
    begun, later = (
        small("rlpd")("run.eval_every=0", "algorithm.off_policy.critics_first=9999", f"run.iterations={number}")
        for number in (1, 3)
    )
    assert later.metrics()[-1]["train/critic_loss"] > 0 and later.metrics()[-1]["train/clipped_features"] < 0.05
    found = later.weights()
    assert all(torch.equal(found[name], each) for name, each in begun.weights().items())


@pytest.mark.parametrize("name", ["rlpd", "iql", "dagger", "sac"])
def test_only_a_policy_that_learns_from_rollouts_alone_is_scaled_by_them(
    small: Callable[[str], Runs], name: str
) -> None:
    run = small(name)()
    (count,) = (each for key, each in run.weights().items() if key.endswith("normalizer.count"))
    collected = sum(row.get("env/steps", 0.0) for row in run.metrics())
    assert collected and (count == 120) == (name in ("rlpd", "iql"))


def test_reinforcement_leaves_the_statistics_of_a_policy_that_was_trained_on_demonstrations(
    small: Callable[[str], Runs],
) -> None:
    cloned = small("sft")()
    scaling = {name: each for name, each in cloned.weights().items() if ".normalizer." in name}
    assert scaling["model.normalizer.demonstrated"] == 1
    brief = ["run.iterations=1", "run.save_every=0", "run.eval_every=0"]
    start = f"model.checkpoint={cloned.path}/checkpoints/last/policy"
    improved, alone = small("ppo")(*brief, start).weights(), small("ppo")(*brief).weights()
    assert all(torch.equal(improved[name], each) for name, each in scaling.items())
    assert not torch.equal(improved["model.actor.0.weight"], cloned.weights()["model.actor.0.weight"])
    assert alone["model.normalizer.count"] == 96 and not alone["model.normalizer.demonstrated"]


def test_nothing_is_collected_before_the_offline_iterations_are_over(small: Callable[[str], Runs]) -> None:
    rows = [row for row in small("iql")().metrics() if "train/updates" in row or "env/steps" in row]
    assert ["env/steps" in row for row in rows] == [False, False, True, True, True, True]
    assert [row.get("train/updates") for row in rows[:2]] == [15.0, 30.0]
    columns = columns_for(rows[0].keys())
    assert [column.title for column in columns] == ["replay", "updates", "Q", "weight", "loss"]
    assert all(np.isfinite(row[column.key]) for column in columns for row in rows[:2])
    assert rows[-1]["train/updates"] == 30 + int(0.4 * 48 * 3), "as many as are owed once 90 decisions are there"


def test_only_a_policy_that_has_learned_nothing_begins_with_random_actions(
    small: Callable[[str], Runs], tmp_path: Path
) -> None:
    original, modes = Collector.collect, set[str]()

    def noted(self: Collector, zeros: Any = np.zeros, mode: str = "train") -> Any:
        modes.add(mode)
        return original(self, zeros, mode)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "collect", noted)
        at_once = "algorithm.off_policy.offline_iterations=0"
        for case, expected in (
            (("rlpd",), {"train"}),
            (("rlpd", *NO_IMITATION), {"random", "train"}),
            (("iql", at_once), {"random", "train"}),
        ):
            settings = ["run.iterations=3", "run.eval_every=0", "eval.episodes=1", *case[1:]]
            small(case[0]).fresh(tmp_path / f"{case[0]} {len(case)}", *settings)
            assert modes == expected
            modes.clear()
