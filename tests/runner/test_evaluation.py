"""Evaluation with sampled actions: repeatable, and without a trace in training."""

from __future__ import annotations

import json

import pytest
from small_runs import Runs, evaluation_in

from embodyrl.cli import train


def test_sampled_actions_repeat_whenever_they_are_drawn_and_leave_training_as_it_was(
    small_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = small_runs("run.iterations=2", "run.eval_every=1", "eval.sample=true", "tracking.report=true")
    likeliest = small_runs("run.iterations=2", "run.eval_every=0")
    assert sampled.digest(2) == likeliest.digest(2)
    found = sampled.summary
    assert found["evaluations"]["0"]["eval/return"] != found["evaluations"]["1"]["eval/return"] != found["eval/return"]
    assert (found["eval/sampled"], likeliest.summary["eval/sampled"]) == (1.0, 0.0)
    kept = [json.loads(line) for line in (sampled.path / "evaluations" / "000001.jsonl").read_text().splitlines()]
    assert len({episode["start_state"] for episode in kept}) == found["evaluations"]["1"]["eval/episodes"] == 5
    returns = [episode["total_reward"] for episode in kept]
    assert sum(returns) / 5 == pytest.approx(found["evaluations"]["1"]["eval/return"])
    assert '<td class="text">sampled</td>' in (sampled.path / "report.html").read_text()
    lines = []
    for overrides in (["eval.sample=true"], ["eval.sample=true", "rollout.schedule=ready_batch"], ["seed=2"], []):
        capsys.readouterr()
        assert train.evaluate((likeliest if overrides else sampled).path, overrides) == 0
        lines.append(evaluation_in(capsys.readouterr().out))
    once, again, greedy, after_training = lines
    assert "5 episodes with sampled actions" in once and f"return {found['eval/return']:.2f}" in once
    assert once == again == after_training != greedy
