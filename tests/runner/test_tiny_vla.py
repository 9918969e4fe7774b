"""One vision-language-action model from demonstrations over supervised to reinforcement learning, as the shipped
experiments do it, only shorter."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import Run
from typer.testing import CliRunner

from embodyrl.cli import train
from embodyrl.cli.main import app
from embodyrl.config import load_config
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.mujoco.rendering import NoOpenGLError
from embodyrl.registry import SIMULATORS, SupportedModel

pytest.importorskip("pyarrow", reason="demonstrations need pyarrow: pip install 'embodyrl[data]'")

SHORT = ["env.num_envs=4", "env.workers=1", "eval.episodes=4", "tracking.sinks=[jsonl]", "tracking.report=false"]
DEMONSTRATIONS = ["run.iterations=3", "data.steps=12", "data.batch_size=16", "run.eval_every=0"]
TRIALS = [
    *("run.iterations=2", "run.eval_every=0", "rollout.episodes_per_slot=1", "rollout.group_size=4"),
    *("algorithm.reward=dense", "algorithm.filter.metric=total_reward", "algorithm.minibatches=2"),
]
"""One group of four; the simulator's own reward, because a policy this young never succeeds."""


@pytest.mark.slow
@pytest.mark.skipif(bool(SIMULATORS.entry("metaworld").missing()), reason="metaworld is not installed")
@pytest.mark.skipif(bool(SupportedModel.entry("openvla_oft").missing()), reason="openvla_oft is not installed")
def test_what_is_learned_from_demonstrations_goes_on_by_trial_and_error(tmp_path: Path) -> None:
    try:
        rendering.context(16, 16).free()
    except (NoOpenGLError, ImportError):
        pytest.skip("MuJoCo cannot render here")
    sft, grpo, data = tmp_path / "sft", tmp_path / "grpo", f"data.path={tmp_path / 'demonstrations'}"
    recording = ["collect", "tiny_oft_sft", data, *SHORT, "env.end_at_success=false", "--episodes", "4"]
    recorded = CliRunner().invoke(app, [*recording, "--pushes", "1.5", "--after-success", "3"])
    assert recorded.exit_code == 0, recorded.output
    assert train.run(load_config("tiny_oft_sft", [data, *SHORT, *DEMONSTRATIONS, f"run.dir={sft}"])) == 0
    losses = [row["train/loss"] for row in Run(sft).metrics()]
    assert losses[0] > losses[1] > losses[2] and losses[2] < losses[0] - 0.5

    start = f"model.checkpoint={sft}/checkpoints/last/policy"
    assert train.run(load_config("tiny_oft_grpo", [start, *SHORT, *TRIALS, f"run.dir={grpo}"])) == 0
    run = Run(grpo)
    assert run.summary["eval/sampled"] == 1.0
    for row in run.metrics():
        assert row["filter/groups_learned"] == 1.0 and row["train/grad_norm"] > 0
