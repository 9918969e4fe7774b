"""Checkpoints of GR00T N1.7 and N1.6 in NVIDIA's layout whose weights are given by a formula."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodyrl.config.build import build_section
from embodyrl.config.schema import ModelConfig
from embodyrl.models import build_policy
from embodyrl.models.saved import DESCRIPTION_FILE
from embodyrl.registry import SupportedModel
from tests.parity.formula import SPEC, fill

CHUNK, HORIZON, STEPS = 3, 5, 4
"""Actions that are executed, that are denoised, and that mean something."""
NORMS = ("q_norm.weight", "k_norm.weight", "norm1.weight", "norm2.weight", "norm3.weight", "norm.weight", "vlln.weight")
"""How names of the weights of norms end."""
TAG, OTHER = "new_embodiment", "libero_sim"


def ends(count: int, shift: float, steps: int | None = None) -> dict[str, Any]:
    """Statistics of a group, of which the second number never changes."""
    places = np.arange(count) / 10 + shift
    columns = {
        "min": -places - 1.0,
        "max": places + 0.5,
        "mean": places / 3,
        "std": 0.3 + places,
        "q01": -places - 0.8,
        "q99": places + 0.4,
    }
    for column in columns.values():
        column[1:2] = 0.25
    if steps is not None:
        columns = {name: np.linspace(0.5, 1.0, steps)[:, None] * column for name, column in columns.items()}
    return {name: column.tolist() for name, column in columns.items()}


def robot(cameras: tuple[str, ...]) -> dict[str, Any]:
    """Groups of an invented robot, whose joints move relative to the state."""
    relative = {"rep": "RELATIVE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}
    return {
        "video": {"delta_indices": [0], "modality_keys": list(cameras)},
        "state": {"delta_indices": [0], "modality_keys": ["joints", "gripper"], "mean_std_embedding_keys": ["gripper"]},
        "action": {
            "delta_indices": list(range(STEPS)),
            "modality_keys": ["joints", "gripper"],
            "action_configs": [relative, relative | {"rep": "ABSOLUTE"}],
        },
    }


def numbers(shift: float) -> dict[str, Any]:
    """Statistics of that robot."""
    return {
        "state": {"joints": ends(6, shift), "gripper": ends(2, 2 * shift)},
        "action": {"joints": ends(6, shift), "gripper": ends(1, shift)},
        "relative_action": {"joints": ends(6, shift / 2, STEPS)},
    }


def write_checkpoint(folder: Path, model: str = "gr00t_n17") -> Path:
    """Write it in bfloat16, with critic and exploration noise, for two robots."""
    shape = {"image_size": 32, "patch_size": 8, "vision_size": 32, "vision_layers": 2, "hidden_size": 32, "layers": 2}
    shape |= {"action_size": 24, "action_layers": 5, "action_horizon": HORIZON}
    shape |= {"self_attention_layers": int(model != "gr00t_n16")}
    SupportedModel.entry(model).load_options()
    config = build_section(ModelConfig, {"name": model, "scratch": shape, "noise_method": "flow_noise"})
    policy: Any = build_policy(config, SPEC, chunk_size=CHUNK, seed=0).to(torch.bfloat16)
    fill(policy, NORMS, scale=0.3)
    companions = dict(policy.files.companions)

    def change(name: str, edit: Any) -> None:
        content = json.loads(companions[name])
        edit(content)
        companions[name] = json.dumps(content, indent=1).encode()

    settings = {"use_percentiles": True, "use_relative_action": True, "crop_fraction": 0.95}
    robots = {TAG: robot(("front", "hand")), OTHER: robot(("front",))}
    change(
        "processor_config.json", lambda content: content["processor_kwargs"].update(settings, modality_configs=robots)
    )
    companions["statistics.json"] = json.dumps({TAG: numbers(0.2), OTHER: numbers(0.4)}).encode()
    companions["embodiment_id.json"] = json.dumps({TAG: 0, OTHER: 0}).encode()
    policy.files = dataclasses.replace(policy.files, companions=companions)
    policy.save(folder, config)
    (folder / DESCRIPTION_FILE).unlink()  # public ones have none
    return folder


def rewrite(path: Path, edit: Any) -> None:
    """Change the contents of a JSON file."""
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
