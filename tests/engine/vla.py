"""A small vision-language-action model in an engine, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learning import LearningEngine, learning_engine

from embodyrl.config.build import build_section
from embodyrl.config.schema import Device, EngineConfig, Level, LossConfig, OptimizerConfig
from embodyrl.engine.parallel import SINGLE_PROCESS, Ranks
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.models import Policy, build_policy
from embodyrl.models.openvla_oft.config import OpenVLAOFTConfig
from embodyrl.models.prismatic.config import ScratchConfig
from embodyrl.registry import SupportedModel

for requirement in SupportedModel.entry("openvla_oft").missing():
    pytest.skip(f"needs {requirement.module}: {requirement.install}", allow_module_level=True)

CHUNK = 2
SPEC = SimulatorSpec(
    tasks={"push": "push the cube", "pull": "pull it"},
    actions=(ActionField(name="arm", meaning="force", unit="N", low=(-1.0, -1.0), high=(1.0, 1.0)),),
    cameras=("front",),
    image_size=(32, 32),
    proprio_dim=3,
    max_episode_steps=10,
    control_frequency=1.0,
)


def oft_config(**options: Any) -> OpenVLAOFTConfig:
    scratch = ScratchConfig(image_size=32, hidden_size=32, layers=2, mlp_size=48)
    return OpenVLAOFTConfig(name="openvla_oft", **{"scratch": scratch} | options)


def make_oft(seed: int = 1, **options: Any) -> Policy:
    return build_policy(oft_config(**options), SPEC, chunk_size=CHUNK, seed=seed)


def make_engine(
    policy: Policy | None = None,
    *,
    lr: float = 0.01,
    kl_coef: float = 0.0,
    saved: Path | None = None,
    folder: Path | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    loss: str = "ppo",
    algorithm: dict[str, Any] | None = None,
    **engine: Any,
) -> LearningEngine:
    return learning_engine(
        policy or make_oft(),
        config=EngineConfig(device=Device.cpu, **{"optimizer": OptimizerConfig(lr=lr)} | engine),
        algorithm=OnPolicyConfig(
            name="ppo",
            loss=build_section(LossConfig, {"name": loss}),
            **{"minibatches": 1, "epochs": 1, "logprob_level": Level.token, "kl_coef": kl_coef, "entropy_coef": 0.01}
            | (algorithm or {}),
        ),
        iterations=4,
        seed=1,
        saved=saved,
        folder=folder,
        ranks=ranks,
    )


def make_observation(size: int = 6, seed: int = 0) -> Observation:
    draw = np.random.default_rng(seed)
    return Observation(
        images=draw.integers(0, 256, (size, 1, 32, 32, 3), dtype=np.uint8),
        proprio=draw.normal(size=(size, 3)).astype(np.float32),
        task_descriptions=[list(SPEC.tasks.values())[i % 2] for i in range(size)],
    )


def make_batch(engine: LearningEngine, size: int = 6) -> dict[str, Any]:
    """Decisions of the engine's own policy, with some advantages."""
    observation = make_observation(size)
    output = engine.act(observation, "train")
    entries = (size, CHUNK, output.logprobs.shape[1] // CHUNK)
    return {
        "images": torch.from_numpy(observation.images),
        "task_index": torch.arange(size) % 2,
        "trace": {name: value.clone() for name, value in output.trace.items()},
        "version": torch.full((size,), engine.version),
        "sequence": torch.arange(size),
        "executed": torch.ones(size, CHUNK, dtype=torch.bool),
        "valid": torch.ones(entries, dtype=torch.bool),
        "weights": torch.full(entries, 1 / (size * CHUNK)),
        "advantages": torch.linspace(-1, 1, size)[:, None, None].expand(entries),
        "returns": torch.ones(size),
        "old_logprobs": output.logprobs.view(entries).clone(),
        "old_values": output.values.clone(),
    }


TASK_DESCRIPTIONS = list(SPEC.tasks.values())
