"""Evaluation with sampled actions: repeatable, and without a trace in training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_runs import Run

from embodyrl.cli import train

WEIGHTS = "policy/model.safetensors"


def test_sampled_actions_repeat_whenever_they_are_drawn_and_leave_training_as_it_was(
    small_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = small_run("sampled", "run.iterations=2", "run.eval_every=1", "eval.sample=true")
    likeliest = small_run("likeliest", "run.iterations=2", "run.eval_every=0")
    assert sampled.digest(2, WEIGHTS) == likeliest.digest(2, WEIGHTS)
    found = sampled.summary
    assert found["evaluations"]["0"]["eval/return"] != found["evaluations"]["1"]["eval/return"] != found["eval/return"]
    assert (found["eval/sampled"], likeliest.summary["eval/sampled"]) == (1.0, 0.0)
    assert "<td>sampled</td>" in (sampled.path / "report.html").read_text()
    lines = []
    for overrides in (["eval.sample=true"], ["eval.sample=true", "rollout.schedule=ready_batch"], ["seed=2"], []):
        capsys.readouterr()
        assert train.evaluate((likeliest if overrides else sampled).path, overrides) == 0
        lines.append(capsys.readouterr().out.splitlines()[1].split("  (")[0])
    once, again, greedy, after_training = lines
    assert "5 episodes with sampled actions" in once and f"return {found['eval/return']:.2f}" in once
    assert once == again == after_training != greedy
