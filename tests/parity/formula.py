"""A checkpoint in the public layout whose weights are given by a formula, so that it need not be kept anywhere."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch

from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.models import Policy, PolicyObservation, build_policy
from embodyrl.models.openvla_oft.config import ActionHead, OpenVLAOFTConfig
from embodyrl.models.prismatic.checkpoint import STATISTICS, CheckpointFiles
from embodyrl.models.prismatic.config import ScratchConfig
from embodyrl.models.saved import DESCRIPTION_FILE

TASKS = {"pick": "pick up the red cube", "stove": "Turn on the stove and put the moka pot on it"}
CHUNK, SIDE = 2, 32
SPEC = SimulatorSpec(
    tasks=TASKS,
    actions=(ActionField(name="all", meaning="native", unit="1", low=(-1.0,) * 7, high=(1.0,) * 7),),
    proprio_dim=8,
    max_episode_steps=10,
    control_frequency=20.0,
    cameras=("front", "hand"),
    image_size=(SIDE, SIDE),
)


def statistics(shift: float) -> dict[str, object]:
    """Ranges of an invented data set: seven action entries, of which the last is not normalised, and eight states."""
    places = np.arange(8) / 10 + shift
    action = {"q01": -places[:7] - 0.1, "q99": places[:7] + 0.2, "min": -places[:7] - 0.5, "max": places[:7] + 0.5}
    proprio = {"q01": -places - 1.0, "q99": places + 2.0, "min": -places - 3.0, "max": places + 3.0}
    listed = [{key: value.tolist() for key, value in part.items()} for part in (action, proprio)]
    return {"action": {**listed[0], "mask": [True] * 6 + [False]}, "proprio": listed[1]}


MULTIPLY = ("norm.weight", "norm1.weight", "norm2.weight", "ffn.0.weight", "gamma")
"""How names of a norm's weights end."""


def fill(module: torch.nn.Module, multiply: tuple[str, ...] = MULTIPLY, scale: float = 0.15) -> None:
    """Weights by name and place: the sine of a place, scaled; 1 plus that where a norm multiplies by it."""
    for name, parameter in module.named_parameters():
        start = zlib.crc32(name.encode()) % 1000
        wave = scale * np.sin(1.7 * np.arange(parameter.numel()) + start)
        values = torch.from_numpy(wave + name.endswith(multiply)).reshape(parameter.shape)
        parameter.data.copy_(values.to(torch.bfloat16))


def write_checkpoint(folder: Path, *, fused: bool = True) -> Path:
    """Write it in bfloat16, with an L1 head, a proprio projector and a value head."""
    config = OpenVLAOFTConfig(
        name="openvla_oft",
        action_head=ActionHead.l1,
        use_proprio=True,
        num_images=2,
        scratch=ScratchConfig(
            vision=["test_vit2", "test_vit3"] if fused else ["test_vit"],
            image_size=SIDE,
            hidden_size=32,
            layers=2,
            mlp_size=48,
        ),
    )
    policy: Policy = build_policy(config, SPEC, chunk_size=CHUNK, seed=0).to(torch.bfloat16)
    fill(policy)
    ranges = {"first_no_noops": statistics(0.1), "second": statistics(0.3)}
    companions = {**policy.files.companions, STATISTICS: json.dumps(ranges).encode()}
    policy.files = CheckpointFiles(config=policy.files.config, companions=companions)
    policy.save(folder, config)
    (folder / DESCRIPTION_FILE).unlink()  # public ones have none
    return folder


def observation(images: int) -> PolicyObservation:
    """Two different samples by formula."""
    places = np.arange(2 * images * 48 * 48 * 3).reshape(2, images, 48, 48, 3)
    proprio = np.sin(np.arange(16)).reshape(2, 8).astype(np.float32)
    return PolicyObservation(
        images=torch.from_numpy((places * 37 % 251).astype(np.uint8)),
        proprio=torch.from_numpy(proprio),
        task_descriptions=list(TASKS.values()),
    )
