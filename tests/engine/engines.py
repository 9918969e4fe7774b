"""A small engine and a batch of its own decisions, for the tests of this folder."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))  # where `learning` is

from learning import LearningEngine, learning_engine

from embodyrl.config.build import build_section
from embodyrl.config.schema import Device, EngineConfig, LossConfig, OptimizerConfig
from embodyrl.engine.compute import noise_in
from embodyrl.engine.parallel import SINGLE_PROCESS, Ranks
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.models import Policy, build_policy
from embodyrl.models.mlp.options import MLPConfig

SPEC = SimulatorSpec(
    tasks={"push": "push"},
    actions=(ActionField(name="arm", meaning="force", unit="N", low=(-1.0,), high=(1.0,)),),
    proprio_dim=3,
    max_episode_steps=10,
    control_frequency=1.0,
)


def make_policy(**options: Any) -> Policy:
    return build_policy(MLPConfig(name="mlp", **{"hidden_sizes": [8]} | options), SPEC, chunk_size=1, seed=1)


def make_engine(
    *,
    policy: Policy | None = None,
    optimizer: OptimizerConfig | None = None,
    loss: str = "ppo",
    loss_options: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    folder: Path | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    **algorithm: Any,
) -> LearningEngine:
    return learning_engine(
        policy or make_policy(),
        config=EngineConfig(device=Device.cpu, optimizer=optimizer or OptimizerConfig(lr=0.01), **engine or {}),
        algorithm=OnPolicyConfig(
            name="ppo",
            loss=build_section(LossConfig, {"name": loss} | (loss_options or {})),
            **{"minibatches": 2, "epochs": 2} | algorithm,
        ),
        iterations=4,
        seed=1,
        folder=folder,
        ranks=ranks,
    )


def make_batch(engine: LearningEngine, size: int = 16) -> dict[str, Any]:
    """Decisions of the engine's own policy, with advantages that favour large samples."""
    draw = np.random.default_rng(0)
    observation = Observation(proprio=draw.normal(size=(size, 3)).astype(np.float32), task_descriptions=["push"] * size)
    output = engine.act(observation, "train")
    sample = output.trace["sample"].clone()
    return {
        "proprio": torch.from_numpy(observation.proprio),
        "task_index": torch.zeros(size, dtype=torch.int64),
        "trace": {"sample": sample},
        "version": torch.full((size,), engine.version),
        "sequence": torch.arange(size) // 4,
        "executed": torch.ones(size, 1, dtype=torch.bool),
        "valid": torch.ones(size, dtype=torch.bool),
        "weights": torch.full((size,), 1 / size),
        "advantages": sample.squeeze(-1) - sample.mean(),
        "returns": torch.ones(size),
        "old_logprobs": output.logprobs.sum(-1).clone(),
        "old_values": output.values.clone(),
    }


def weights(engine: LearningEngine) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(engine.policy.parameters()).detach().clone()


def whole_state(engine: LearningEngine) -> dict[str, Any]:
    """A state as a checkpoint holds it, with the noise in actions."""
    state = engine.state_dict()
    return copy.deepcopy(state | {"streams": state["streams"] | engine.noise_state()})


def resumed(engine: LearningEngine, state: dict[str, Any]) -> str | None:
    """Go on from a checkpoint's state; returns the warning."""
    warning = engine.load_state_dict(copy.deepcopy(state))
    engine.load_noise(noise_in(copy.deepcopy(state["streams"])))
    return warning
