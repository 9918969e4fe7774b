"""`embodyrl run` with vision-language-action models, on images of a real simulator."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import programs
import pytest
import torch
from safetensors.torch import load_file
from slow import rest_slow

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
pytest.importorskip("pygame", reason="needs gymnasium[classic-control]")

COMMON = """\
run: {iterations: 2, eval_every: 0, dir: out}
env: {num_envs: 2, workers: 1, max_episode_steps: 8, image_size: [48, 48]}
eval: {episodes: 2}
tracking: {sinks: [jsonl], report: false}
engine: {optimizer: {lr: 1.0e-12}}
"""
GRPO = """\
defaults: [env: gym/pendulum_rgb, model: openvla_oft, algorithm: grpo, _self_]
rollout: {num_chunks: 4, chunk_size: 2, episodes: whole, group_size: 2}
algorithm: {minibatches: 2, reward: dense}
"""
PPO = """\
defaults: [env: gym/pendulum_rgb, model: openvla, algorithm: ppo, _self_]
rollout: {num_chunks: 4}
algorithm: {minibatches: 2}
"""
PI0 = """\
defaults: [env: gym/pendulum_rgb, model: pi0, algorithm: grpo, _self_]
model: {denoising_steps: 3, noise_level_end: 0.1, scratch: {layers: 2}}
rollout: {num_chunks: 4, chunk_size: 2, episodes: whole, group_size: 2}
algorithm: {minibatches: 2, reward: dense}
"""
PI05 = """\
defaults: [env: gym/pendulum_rgb, model: pi05, algorithm: ppo, _self_]
model: {denoising_steps: 2, noise_method: flow_noise, joint_logprob: true, scratch: {layers: 2}}
rollout: {num_chunks: 4, chunk_size: 2}
algorithm: {minibatches: 2}
"""
PI0_FAST = """\
defaults: [env: gym/pendulum_rgb, model: pi0_fast, algorithm: grpo, _self_]
model: {scratch: {layers: 2}}
rollout: {num_chunks: 4, chunk_size: 2, episodes: whole, group_size: 2}
algorithm: {minibatches: 2, reward: dense, logprob_level: token}
"""
PI0_FAST_PPO = """\
defaults: [env: gym/pendulum_rgb, model: pi0_fast, algorithm: ppo, _self_]
model: {decoding: all, temperature: 0.7, scratch: {layers: 2}}
rollout: {num_chunks: 4, chunk_size: 2}
algorithm: {minibatches: 2}
"""
GR00T = """\
defaults: [env: gym/pendulum_rgb, model: gr00t, algorithm: ppo, _self_]
model: {denoising_steps: 3, noise_method: flow_cps, scratch: {layers: 1, action_layers: 2, action_horizon: 4}}
rollout: {num_chunks: 4, chunk_size: 2}
algorithm: {minibatches: 2}
"""
GR00T_N17 = """\
defaults: [env: gym/pendulum_rgb, model: gr00t_n17, algorithm: ppo, _self_]
model: {denoising_steps: 3, noise_method: flow_cps, scratch: {layers: 1, action_layers: 3, action_horizon: 4}}
rollout: {num_chunks: 4, chunk_size: 2}
algorithm: {minibatches: 2}
"""
SMOLVLA = """\
defaults: [env: gym/pendulum_rgb, model: smolvla, algorithm: ppo, _self_]
model: {denoising_steps: 3, frozen: nothing, scratch: {layers: 2, vision_layers: 1}}
rollout: {num_chunks: 4, chunk_size: 2, blocks: 2}
algorithm: {minibatches: 2}
"""
RUNS = {
    "openvla_oft-grpo": (GRPO, "unnorm_key", "simulator"),
    "openvla-ppo": (PPO, "unnorm_key", "simulator"),
    "pi0-grpo": (PI0, "unnorm_key", "openpi"),
    "pi05-ppo": (PI05, "unnorm_key", "openpi"),
    "pi0_fast-grpo": (PI0_FAST, "unnorm_key", "openpi"),
    "pi0_fast-ppo": (PI0_FAST_PPO, "unnorm_key", "openpi"),
    "gr00t-ppo": (GR00T, "embodiment_tag", "simulator"),
    "gr00t_n17-ppo": (GR00T_N17, "embodiment_tag", "simulator"),
}
"""What to run, and the setting that chooses among the statistics of its checkpoint, with what there is."""


def embodyrl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "embodyrl", *arguments], preload=programs.VLA, cwd=folder)


@pytest.mark.parametrize("name", rest_slow(RUNS))
def test_a_run_from_the_command_line(tmp_path: Path, name: str) -> None:
    """With hardly any learning rate the policy that learns is the one that acted: their log-probs must agree."""
    text, option, known = RUNS[name]
    (tmp_path / "my.yaml").write_text(text + COMMON)
    done = embodyrl(tmp_path, "run", "my.yaml")
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    learned = [row for row in metrics if "train/approx_kl" in row]
    assert len(learned) == 2
    assert all(abs(row["train/approx_kl"]) < 1e-6 and row["train/grad_norm"] > 0 for row in learned)
    saved = tmp_path / "out" / "checkpoints" / "last" / "policy"
    again = embodyrl(tmp_path, "validate", "my.yaml", f"model.checkpoint={saved}", f"model.{option}=elsewhere")
    assert again.returncode == 2
    assert f"no statistics of {option} = 'elsewhere' (known: {known})" in again.stderr


@pytest.mark.slow
def test_a_frozen_model_learns_from_what_traces_keep_of_images(tmp_path: Path) -> None:
    """On one rank, on two, after it was stopped half way, and in 16 bits."""
    (tmp_path / "my.yaml").write_text(SMOLVLA + COMMON)
    done = embodyrl(tmp_path, "run", "my.yaml", "run.iterations=1")
    assert done.returncode == 0, done.stderr
    saved = tmp_path / "out" / "checkpoints" / "last" / "policy"
    words = [f"model.checkpoint={saved}", "model.frozen=language", "engine.optimizer.lr=1e-3", "run.save_every=1"]
    words += ["engine.optimizer.schedule=constant", "run.iterations=3", "env.workers=2"]
    done = embodyrl(tmp_path, "run", "my.yaml", *words, "run.dir=rough", "engine.precision=bfloat16")
    assert done.returncode == 0, done.stderr
    weights = {}
    for name, more in {"one": [], "two": ["engine.parallel.world_size=2"], "half": ["run.iterations=2"]}.items():
        done = embodyrl(tmp_path, "run", "my.yaml", *words, f"run.dir={name}", *more)
        assert done.returncode == 0, done.stderr
        if name == "half":
            done = embodyrl(tmp_path, "resume", name, "run.iterations=3")
            assert done.returncode == 0, done.stderr
        weights[name] = load_file(tmp_path / name / "checkpoints" / "last" / "policy" / "model.safetensors")
    before = load_file(saved / "model.safetensors")
    learned = {name for name, tensor in weights["one"].items() if not torch.equal(tensor, before[name])}
    assert any("state_proj" in name for name in learned) and not any(".vlm." in name for name in learned)
    for name, tensor in weights["one"].items():
        assert torch.equal(tensor, weights["half"][name]), name
        torch.testing.assert_close(tensor, weights["two"][name], atol=2e-5, rtol=0, msg=name)
