"""The experiments with published recipes: looked at anywhere, and run with a tiny checkpoint in the public layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from embodyrl.registry import SIMULATORS

SHARED = Path(__file__).parents[2].parent / "shared"
ASSETS = SHARED / "libero-assets" / "assets"
CHECKPOINT = SHARED / "reference" / "openvla_oft" / "discrete" / "checkpoint"
NAMES = [
    "libero_spatial_grpo_openvla_oft",
    "libero_10_grpo_openvla_oft",
    "maniskill_ppo_openvla",
    "maniskill_ppo_openvla_oft",
]
TINY = [
    f"model.checkpoint={CHECKPOINT}",
    "model.unnorm_key=bridge_orig",
    "env.num_envs=2",
    "env.image_size=[64,64]",
    "env.render_quality=fast",
    "env.max_episode_steps=16",
    "env.tasks=[libero_spatial/0]",
    "rollout.chunks=2",
    "rollout.group_size=2",
    "rollout.episodes_per_slot=1",
    "algorithm.minibatches=1",
    "algorithm.filter.accuracy_low=0",  # random weights never succeed, and shall learn all the same
    "algorithm.filter.accuracy_high=1",
    "algorithm.entropy_coef=0.001",
    "eval.episodes=2",
    "run.iterations=1",
    "run.eval_every=0",
    "run.dir=out",
    "tracking.sinks=[jsonl]",
]


def embodyrl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "EMBODYRL_LIBERO_ASSETS": str(ASSETS)}
    command = [sys.executable, "-m", "embodyrl", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def skip_without(simulator: str) -> None:
    if missing := SIMULATORS.entry(simulator).missing():
        pytest.skip(f"needs {missing[0].module}: {missing[0].install}")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_valid_without_weights_and_does_not_run_without_them(name: str, tmp_path: Path) -> None:
    skip_without(name.partition("_")[0])
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    valid = embodyrl(tmp_path, "validate", name, "--elsewhere")
    assert valid.returncode == 0, valid.stderr
    assert "model.checkpoint is left open" in valid.stdout
    refused = embodyrl(tmp_path, "run", name)
    assert refused.returncode == 2
    assert "model.checkpoint is left open (<weights>) - name the folder of the weights" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_grpo_in_libero_runs_end_to_end_with_a_tiny_checkpoint(tmp_path: Path) -> None:
    skip_without("libero")
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    if not (ASSETS.is_dir() and CHECKPOINT.is_dir()):
        pytest.skip("needs LIBERO's assets and a small checkpoint in ../shared")
    done = embodyrl(tmp_path, "run", NAMES[0], *TINY)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    learned = rows[-1]
    assert learned["train/passes"] == 1.0 and learned["train/grad_norm"] > 0.0
    assert learned["train/ratio"] == pytest.approx(1.0, abs=1e-3)  # it learns from what it has just decided itself
    assert learned["time/render"] > 0.0
    assert (tmp_path / "out" / "checkpoints" / "last" / "policy" / "config.json").is_file()
