"""Runs that learn from demonstrations and a replay: imitation first, cloning beside every evaluation, exact resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import Run, kill_after

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.data.layout import DatasetSpec, Episode
from embodyrl.data.writer import DatasetWriter
from embodyrl.rollout.collector import Collector
from embodyrl.tracking.console import columns_for

SMALL = """
defaults: [env: gym/pendulum, model: mlp, algorithm: {algorithm}, _self_]
env: {{num_envs: 4, workers: 2, max_episode_steps: 40}}
model: {{head: squashed, hidden_sizes: [16]}}
rollout: {{num_chunks: 12, blocks: 2}}
data: {{path: {data}, {steps}}}
algorithm:
  reward: dense
  off_policy: {{replay: {{capacity: 200, start_after: 90}}, updates_per_step: 0.4, batch_size: 32, {more}}}
run: {{name: small, iterations: 6, save_every: 3, eval_every: 3}}
eval: {{episodes: 5}}
tracking: {{sinks: [jsonl], report: false}}
"""
RLPD = "critics: {count: 3, hidden_sizes: [16]}, imitation: {first_steps: 60, coef: 1.0, cloned_coef: 0.5}"
IQL = "critics: {count: 2, hidden_sizes: [16]}, offline_iterations: 2"
NO_IMITATION = [
    *(f"algorithm.off_policy.imitation.{name}=0" for name in ("first_steps", "cloned_coef")),
    "data.batch_size=64",  # the default, because nothing reads it then
]
WEIGHTS = "checkpoints/last/policy/model.safetensors"


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Run]:
    """Train: small("rlpd", "name", "key=value", ...)."""
    rng = np.random.default_rng(0)
    spec = DatasetSpec(action_names=("torque",), state_dim=3, fps=20, outcome=True, ends=True)
    with DatasetWriter(tmp_path / "demonstrations", spec) as writer:
        for _ in range(4):
            state = rng.normal(size=(31, 3)).astype(np.float32)
            writer.add(
                Episode(
                    task="swing up",
                    proprio=state[:-1],
                    last_proprio=state[-1],
                    actions=np.clip(-state[:-1, 1:2], -2, 2),
                    rewards=-np.abs(state[:-1, 0]),
                    success=np.zeros(30, np.bool_),
                )
            )
    for name, more, steps in (("rlpd", RLPD, "batch_size: 16"), ("iql", IQL, "steps: 15")):
        written = SMALL.format(algorithm=name, data=tmp_path / "demonstrations", more=more, steps=steps)
        (tmp_path / f"{name}.yaml").write_text(written)
    # A policy that shows critics nothing imitates by its own loss.
    weighed = (tmp_path / "iql.yaml").read_text().replace("head: squashed", "head: gaussian")
    (tmp_path / "weighed.yaml").write_text(weighed)

    def run(algorithm: str, name: str, *overrides: str) -> Run:
        words = [f"run.dir={tmp_path / name}", *overrides]
        assert train.run(load_config(str(tmp_path / f"{algorithm}.yaml"), words)) == 0
        return Run(tmp_path / name)

    return run


@pytest.mark.faults
@pytest.mark.parametrize("algorithm", ["rlpd", "iql", "weighed"])
def test_a_run_that_is_killed_goes_on_bit_for_bit(algorithm: str, small: Callable[..., Run], tmp_path: Path) -> None:
    whole, killed = small(algorithm, "whole"), tmp_path / "killed"
    kill_after(
        killed / "checkpoints" / "000003",
        ["-m", "embodyrl", "run", str(tmp_path / f"{algorithm}.yaml"), f"run.dir={killed}"],
    )
    assert train.resume(killed, []) == 0
    assert Run(killed).metrics() == whole.metrics()
    wanted = load_file(whole.path / WEIGHTS)
    assert all(torch.equal(each, wanted[name]) for name, each in load_file(killed / WEIGHTS).items())


def test_cloning_is_evaluated_first_and_shown_beside_every_evaluation(small: Callable[..., Run]) -> None:
    run = small("rlpd", "shown", "run.eval_every=0")
    said = (run.path / "run.log").read_text()
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


def test_what_measures_the_imitation_error_is_forgotten(small: Callable[..., Run]) -> None:
    """It changes no weight, no moment of an optimiser, and no stream."""
    brief, none = ["run.iterations=3"], "algorithm.off_policy.imitation.held_out=0"
    measured, not_measured = small("rlpd", "measured", *brief), small("rlpd", "not-measured", *brief, none)
    assert "held out:" in (measured.path / "run.log").read_text()
    assert "held out:" not in (not_measured.path / "run.log").read_text()
    wanted = load_file(not_measured.path / WEIGHTS)
    assert all(torch.equal(each, wanted[name]) for name, each in load_file(measured.path / WEIGHTS).items())
    assert measured.metrics() == not_measured.metrics()


def test_nothing_is_collected_before_the_offline_iterations_are_over(small: Callable[..., Run]) -> None:
    rows = [row for row in small("iql", "offline").metrics() if "train/updates" in row or "env/steps" in row]
    assert ["env/steps" in row for row in rows] == [False, False, True, True, True, True]
    assert [row.get("train/updates") for row in rows[:2]] == [15.0, 30.0]
    assert [column.title for column in columns_for(rows[0])][-5:-1] == ["updates", "Q", "weight", "loss"]
    assert all(np.isfinite(row[column.key]) for column in columns_for(rows[0])[4:8] for row in rows[:2])
    assert rows[-1]["train/updates"] == 30 + int(0.4 * 48 * 3), "as many as are owed once 90 decisions are there"


@pytest.mark.parametrize(
    ("algorithm", "words", "expected"),
    [
        ("weighed", [], {"train"}),
        ("iql", [], {"train"}),
        ("iql", ["algorithm.off_policy.offline_iterations=0"], {"random", "train"}),
        ("rlpd", [], {"train"}),
        (
            "rlpd",
            NO_IMITATION,
            {"random", "train"},
        ),
    ],
)
def test_only_a_policy_that_has_learned_nothing_begins_with_random_actions(
    small: Callable[..., Run], algorithm: str, words: list[str], expected: set[str]
) -> None:
    again = [*words, "run.iterations=5", "run.save_every=5", "run.eval_every=0"]
    modes: set[str] = set()
    original = Collector.collect

    def noted(self: Collector, zeros: Any = np.zeros, mode: str = "train") -> Any:
        modes.add(mode)
        return original(self, zeros, mode)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "collect", noted)
        small(algorithm, "run", *again)
    assert modes == expected


@pytest.mark.parametrize("algorithm", ["rlpd", "iql", "weighed"])
def test_one_rank_and_two_learn_the_same(algorithm: str, small: Callable[..., Run]) -> None:
    one = small(algorithm, "one")
    two = small(algorithm, "two", "engine.parallel.world_size=2")
    wanted = load_file(one.path / WEIGHTS)
    for name, each in load_file(two.path / WEIGHTS).items():
        torch.testing.assert_close(each, wanted[name], atol=1e-4, rtol=1e-4)
