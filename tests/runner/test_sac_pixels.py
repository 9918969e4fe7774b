"""Runs that learn from a replay of images: killed and resumed, on one rank and two, from two frames, on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import Run, kill_after

from embodyrl.cli import train
from embodyrl.config import load_config
from embodyrl.registry import SupportedModel

pytestmark = pytest.mark.skipif(bool(SupportedModel.entry("cnn").missing()), reason="timm is not installed")

PIXELS = """
defaults: [model: cnn, algorithm: sac, _self_]
plugins: [counter_simulator]
env:
  name: counter
  tasks: [count]
  num_envs: 4
  workers: 2
  max_episode_steps: 5
  start_states: 50
  cameras: [top]
  image_size: [16, 16]
  frames: 2
model:
  encoder: drq
  channels: [4, 4]
  strides: [2, 2]
  head: squashed
  image_features: 8
  state_features: 4
  hidden_sizes: [16]
rollout: {num_chunks: 12, blocks: 2}
algorithm:
  off_policy:
    replay: {capacity: 1000, start_after: 90, memory_mib: 1}
    updates_per_step: 0.4
    actor_every: 2
    augment_pixels: 2
    batch_size: 32
    critics: {count: 3, hidden_sizes: [16]}
run: {name: pixels, iterations: 6, save_every: 2, eval_every: 0}
eval: {episodes: 4}
tracking: {sinks: [jsonl], report: false}
"""
"""Episodes (up to 5 steps) straddle rollouts (12); images of the replay (1.5 MiB) lie on the disk."""

WEIGHTS = "checkpoints/last/policy/model.safetensors"


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_run_from_images_goes_on_bit_for_bit_and_two_ranks_learn_what_one_does(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(PIXELS)
    shutil.copy(Path(__file__).parents[1] / "rollout" / "counter_simulator.py", tmp_path)

    def run(name: str, *overrides: str) -> Run:
        assert train.run(load_config(str(tmp_path / "my.yaml"), [f"run.dir={tmp_path / name}", *overrides])) == 0
        return Run(tmp_path / name)

    whole, two = run("whole"), run("two", "engine.parallel.world_size=2")
    killed = tmp_path / "killed"
    kill_after(
        killed / "checkpoints" / "000002", ["-m", "embodyrl", "run", str(tmp_path / "my.yaml"), f"run.dir={killed}"]
    )
    assert train.resume(killed, []) == 0
    again = Run(killed)
    assert again.metrics() == whole.metrics()
    wanted, found = load_file(whole.path / WEIGHTS), load_file(again.path / WEIGHTS)
    assert wanted["features.encoders.0.backbone.0.weight"].shape[1] == 6, "two frames"
    assert all(torch.equal(found[name], each) for name, each in wanted.items())
    for file in ("trainer/engine.safetensors", "trainer/engine.json"):
        assert again.digest(6, file) == whole.digest(6, file)
    for name, each in load_file(two.path / WEIGHTS).items():
        torch.testing.assert_close(each, wanted[name], atol=1e-4, rtol=1e-4)
    rows = whole.metrics()
    assert rows[-1]["train/updates"] == int(0.4 * 48 * 5) and rows[-1]["replay/decisions"] == 288
    for row, other in zip(rows, two.metrics(), strict=True):
        assert other == pytest.approx(row, rel=1e-3, abs=1e-4)
    # Each checkpoint adds what is new to those before, also the first one after the resume.
    folder = again.path / "checkpoints" / "000006" / "trainer" / "replay"
    sizes = [file.stat().st_size for file in sorted(folder.glob("*.safetensors"))]
    assert len(sizes) == 3 and max(sizes) < 1.3 * min(sizes)
    assert "in the run's folder" in (whole.path / "run.log").read_text()
