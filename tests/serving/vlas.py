"""Tiny vision-language-action models with random weights, loaded without a simulator."""

from __future__ import annotations

from typing import Any

import numpy as np

import embodyrl
from embodyrl.config import ConfigUse, load_config
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.models import build_policy
from embodyrl.runner.playing import LoadedPolicy

SPEC = SimulatorSpec(
    tasks={"open": "turn the faucet open", "close": "turn the faucet closed"},
    actions=(
        ActionField(name="arm", meaning="delta_position", unit="m", low=(-1.0,) * 3, high=(1.0,) * 3, scale=0.05),
        ActionField(name="gripper", meaning="gripper", unit="1", low=(-1.0,), high=(1.0,), opens=-1.0, closes=1.0),
    ),
    proprio_dim=4,
    max_episode_steps=30,
    control_frequency=20.0,
    cameras=("front",),
    image_size=(64, 64),
)
TINY = {"openvla_oft": "tiny_oft_grpo", "pi0": "tiny_pi0_grpo", "smolvla": "tiny_smolvla_grpo"}


def tiny(model: str, *words: str) -> LoadedPolicy:
    """A policy of this model; it takes its most likely actions."""
    usual = ["eval.sample=false", "rollout.chunk_size=4", "model.checkpoint=null"]
    usual += ["model.frozen=nothing"] if model == "smolvla" else []
    config = load_config(TINY[model], [*usual, *words], use=ConfigUse.play).config
    policy = build_policy(config.model, SPEC, chunk_size=4, seed=1)
    return LoadedPolicy(config, HybridEngine(policy, config=config.engine, iterations=1, seed=1), SPEC)


def observation(number: int) -> embodyrl.Observation:
    """A view unlike any other, of one row."""
    draw = np.random.default_rng(number)
    return embodyrl.Observation(
        images=draw.integers(0, 256, (1, 1, 64, 64, 3), dtype=np.uint8),
        proprio=draw.normal(size=(1, 4)).astype(np.float32),
        task_descriptions=[list(SPEC.tasks.values())[number % 2]],
    )


def message(number: int) -> dict[str, Any]:
    """The same as a client of a robot sends it."""
    seen = observation(number)
    assert seen.images is not None and seen.proprio is not None
    return {
        "observation/image": seen.images[0, 0],
        "observation/state": seen.proprio[0],
        "prompt": seen.task_descriptions[0],
    }
