"""The experiments with published recipes: looked at anywhere, and run with a tiny checkpoint in the public layout."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import libero_files
import programs
import pytest
from slow import rest_slow

from embodyrl.config import ConfigUse, list_experiments, load_config
from embodyrl.config.rules import public_checkpoints
from embodyrl.config.schema import LEFT_OPEN
from embodyrl.registry import SIMULATORS, SupportedModel

REPOSITORY = Path(__file__).parents[2]
SHARED = REPOSITORY.parent / "shared"
CHECKPOINT = SHARED / "reference" / "openvla_oft" / "discrete" / "checkpoint"
NAMES = [
    "libero_spatial_grpo_openvla_oft",
    "libero_10_grpo_openvla_oft",
    "maniskill_ppo_openvla",
    "maniskill_ppo_openvla_oft",
    "libero_spatial_ppo_pi0",
    "libero_10_ppo_pi05",
    "libero_spatial_ppo_gr00t",
    "libero_spatial_ppo_gr00t_n17",
    "metaworld_ppo_pi0",
    "libero_spatial_grpo_smolvla",
    "libero_spatial_grpo_pi0_fast",
]
SMALL = [
    "env.num_envs=2",
    "env.image_size=[64,64]",
    "rollout.episodes_per_slot=1",
    "algorithm.minibatches=1",
    "eval.episodes=2",
    "run.iterations=1",
    "run.eval_every=0",
    "run.dir=out",
    "tracking.sinks=[jsonl]",
    "tracking.report=false",
]
TINY = [
    *SMALL,
    f"model.checkpoint={CHECKPOINT}",
    "model.unnorm_key=bridge_orig",
    "env.render_quality=fast",
    "env.max_episode_steps=16",
    "env.tasks=[libero_spatial/0]",
    "rollout.num_chunks=2",
    "rollout.group_size=2",
    "algorithm.filter.accuracy_low=0",  # random weights never succeed, and shall learn all the same
    "algorithm.filter.accuracy_high=1",
    "algorithm.entropy_coef=0.001",
]
FLOW = {
    "libero_spatial_ppo_pi0": ["env.tasks=[libero_spatial/0]", "env.render_quality=fast", "model.prompt_length=40"],
    "libero_spatial_ppo_gr00t": ["env.tasks=[libero_spatial/0]", "env.render_quality=fast"],
    "metaworld_ppo_pi0": ["env.tasks=[reach-v3]"],
}
"""Experiments with flow-matching models, and what makes them small besides."""


ALL_FLOW: dict[str, Any] = {
    "algorithm.gamma": 0.99,
    "algorithm.advantage.gae_lambda": 0.95,
    "algorithm.epochs": 4,
    "algorithm.loss.clip_low": 0.2,
    "algorithm.loss.clip_high": 0.2,
    "algorithm.loss.dual_clip": None,
    "algorithm.value_clip": 0.2,
    "algorithm.value_huber": 10.0,
    "algorithm.value_coef": 1.0,
    "algorithm.entropy_coef": 0.0,
    "algorithm.logprob_level": "chunk",
    "engine.micro_batch_size": 128,
    "engine.optimizer.critic_lr": 1e-4,
    "engine.optimizer.betas": [0.9, 0.95],
    "engine.optimizer.eps": 1e-8,
    "engine.optimizer.weight_decay": 0.01,
    "engine.optimizer.max_grad_norm": 1.0,
    "model.noise_method": "flow_sde",
    "model.noise_level": 0.5,
    "model.detach_critic": True,
    "env.num_envs": 64,
    "rollout.episodes_per_slot": 8,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "libero_spatial_ppo_pi0": {
        "engine.optimizer.lr": 5e-6,
        "model.denoising_steps": 4,
        "model.value_sizes": [512, 256, 128],
        "rollout.chunk_size": 5,
        "env.max_episode_steps": 240,
    },
    "libero_10_ppo_pi05": {
        "engine.optimizer.lr": 5e-6,
        "engine.optimizer.schedule": "cosine",
        "engine.optimizer.lr_floor": 0.1,
        "model.denoising_steps": 5,
        "model.value_sizes": [1024, 512, 256],
        "rollout.chunk_size": 10,
        "env.max_episode_steps": 480,
    },
    "metaworld_ppo_pi0": {
        "engine.optimizer.lr": 1e-5,
        "model.denoising_steps": 5,
        "rollout.chunk_size": 5,
        "env.max_episode_steps": 100,
        "env.cameras": ["corner4"],
    },
    "libero_spatial_ppo_gr00t": {
        "engine.optimizer.lr": 5e-6,
        "model.denoising_steps": 4,
        "rollout.chunk_size": 5,
        "env.max_episode_steps": 240,
        "model.prompt_length": 570,
    },
}
"""What RLinf's files say at commit a3816b596 (examples/embodiment/config), and what its code makes of them: it clips
twice (clip_ratio_c) for GR00T N1.6 and N1.7 alone."""
DECISIONS_OF_A_STEP = {"libero_spatial_ppo_gr00t": 1024}
"""Of the global batch; 2048 for the others."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_are_the_published_ones(name: str) -> None:
    skip_without(name.partition("_")[0])
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    config = load_config(name, use=ConfigUse.elsewhere).config
    found = {path: functools.reduce(getattr, path.split("."), config) for path in ALL_FLOW | PUBLISHED[name]}
    assert found == ALL_FLOW | PUBLISHED[name]
    decisions = config.env.num_envs * config.rollout.num_chunks * config.rollout.episodes_per_slot
    wanted = decisions / DECISIONS_OF_A_STEP.get(name, 2048)
    assert config.algorithm.minibatches == pytest.approx(wanted, rel=0.02)
    assert config.rollout.num_chunks * config.rollout.chunk_size == config.env.max_episode_steps


def embodyrl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "embodyrl", *words], preload=programs.VLA, cwd=folder, timeout=280)


def skip_without(simulator: str) -> None:
    if missing := SIMULATORS.entry(simulator).missing():
        pytest.skip(f"needs {missing[0].module}: {missing[0].install}")


@pytest.mark.parametrize("name", rest_slow(NAMES))
def test_it_is_valid_without_weights_and_does_not_run_without_them(name: str, tmp_path: Path) -> None:
    skip_without(name.partition("_")[0])
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    valid = embodyrl(tmp_path, "validate", name, "--elsewhere")
    assert valid.returncode == 0, valid.stderr
    assert "model.checkpoint is left open" in valid.stdout
    refused = embodyrl(tmp_path, "run", name)
    assert refused.returncode == 2
    weights = public_checkpoints(load_config(name, use=ConfigUse.elsewhere).config)[0]
    assert f"model.checkpoint is left open (<weights>) - name the weights, as in model.checkpoint={weights}" in (
        refused.stderr
    )


def test_an_experiment_says_which_weights_it_starts_from() -> None:
    names = {
        name.removeprefix("experiment/"): load_config(name, use=ConfigUse.elsewhere).config
        for name in list_experiments()
    }
    left_open = {name for name, config in names.items() if config.model.checkpoint == LEFT_OPEN}
    assert left_open == set(NAMES)
    for name in left_open:
        header = (REPOSITORY / "configs" / "experiment" / f"{name}.yaml").read_text().partition("defaults:")[0]
        assert re.findall(r"model\.checkpoint=(\S+)", header) == public_checkpoints(names[name])[:1], name


def test_the_table_of_public_checkpoints_is_that_of_the_models() -> None:
    table = (REPOSITORY / "docs" / "models.md").read_text().partition("| model | checkpoint")[2].partition("\n\n")[0]
    written: dict[str, set[str]] = {}
    last = ""
    for line in table.splitlines()[2:]:
        model, checkpoints = line.split("|")[1:3]
        last = model.strip(" `") or last
        written.setdefault(last, set()).update(re.findall(r"`(hf://[^`]+)`", checkpoints))
    known = {entry.name: {each.name for each in entry.checkpoints} for entry in SupportedModel.entries()}
    assert written == {name: names for name, names in known.items() if names}


@pytest.mark.slow
def test_grpo_in_libero_runs_end_to_end_with_a_tiny_checkpoint(tmp_path: Path) -> None:
    skip_without("libero")
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    if not (libero_files.place() and CHECKPOINT.is_dir()):
        pytest.skip("needs LIBERO's assets and a small checkpoint in ../shared")
    done = embodyrl(tmp_path, "run", NAMES[0], *TINY)
    assert done.returncode == 0, done.stderr
    learned = last_metrics(tmp_path)
    assert learned["train/ratio"] == pytest.approx(1.0, abs=1e-3)  # it learns from what it has just decided itself


def last_metrics(folder: Path) -> dict[str, float]:
    """Of a run that has learned from rendered images."""
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    learned: dict[str, float] = rows[-1]
    assert learned["train/epochs"] >= 1.0 and learned["train/grad_norm"] > 0.0
    assert learned["time/render"] > 0.0
    assert (folder / "out" / "checkpoints" / "last" / "policy" / "config.json").is_file()
    return learned


def write_public(name: str, experiment: str, folder: Path) -> Path:
    """A tiny checkpoint in the public layout of a flow-matching model, of the robot and cameras of an experiment."""
    from embodyrl.envs import ActionField
    from embodyrl.models import build_policy
    from embodyrl.models.flow.policy import HEADS_FILE
    from embodyrl.models.saved import DESCRIPTION_FILE
    from tests.parity.formula import SPEC
    from tests.parity.gr00t_formula import robot

    states, actions = (4, 4) if experiment.startswith("metaworld") else (8, 7)
    everything = ActionField(name="all", meaning="native", unit="1", low=(-1.0,) * actions, high=(1.0,) * actions)
    cameras = ("front", "hand") if name == "gr00t" else ("base", "left", "right")
    spec = dataclasses.replace(SPEC, proprio_dim=states, actions=(everything,), cameras=cameras)
    options: Any = SupportedModel.entry(name).load_options()
    config = options(name=name)
    policy: Any = build_policy(config, spec, chunk_size=5, seed=0)
    if name == "gr00t":
        policy.files = dataclasses.replace(policy.files, metadata={"libero_franka": robot(0.2, cameras)})
    folder.mkdir()
    policy.save(folder, config)
    for ours in (DESCRIPTION_FILE, HEADS_FILE):
        (folder / ours).unlink()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("experiment", FLOW)
def test_ppo_of_a_flow_matching_model_runs_end_to_end_with_a_tiny_checkpoint(experiment: str, tmp_path: Path) -> None:
    simulator, name = experiment.split("_")[0], experiment.split("_")[-1]
    skip_without(simulator)
    pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
    if simulator == "libero" and libero_files.place() is None:
        pytest.skip("needs LIBERO's assets in ../shared")
    checkpoint = write_public(name, experiment, tmp_path / "public")
    small = ["env.max_episode_steps=10", "rollout.num_chunks=2", "engine.micro_batch_size=2", *SMALL, *FLOW[experiment]]
    done = embodyrl(tmp_path, "run", experiment, *small, f"model.checkpoint={checkpoint}")
    assert done.returncode == 0, done.stderr
    assert last_metrics(tmp_path)["train/value_loss"] > 0.0
