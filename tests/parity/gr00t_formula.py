"""A GR00T checkpoint in the public layout whose weights are given by a formula, so that it need not be kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from embodyrl.models import PolicyObservation, build_policy
from embodyrl.models.flow.config import NoiseMethod
from embodyrl.models.gr00t.config import Gr00tConfig, ScratchConfig
from embodyrl.models.saved import DESCRIPTION_FILE
from tests.parity.formula import SPEC, fill, observation

CHUNK, HORIZON = 3, 5
NORMS = (
    "q_norm.weight",
    "k_norm.weight",
    "norm1.weight",
    "norm2.weight",
    "norm3.weight",
    "layernorm.weight",
    "vlln.weight",
)
"""How names of the weights of norms end. Those of the language model's last norm stay small, so that the epsilon of the
next one matters."""
TAG = "new_embodiment"


def robot(shift: float, cameras: tuple[str, ...]) -> dict[str, Any]:
    """Statistics of an invented robot: a state in two parts, an action of seven numbers, of which one never changes."""

    def part(count: int, offset: float) -> dict[str, list[float]]:
        places = [offset + number / 10 for number in range(count)]
        still = count == 7
        return {
            "min": [-place - 1.0 if index or not still else 0.5 for index, place in enumerate(places)],
            "max": [place + 0.5 for place in places] if not still else [0.5, *(place + 0.5 for place in places[1:])],
            "mean": [place / 3 for place in places],
            "std": [0.3 + place for place in places],
        }

    return {
        "statistics": {
            "state": {"hand": part(6, shift), "fingers": part(2, 2 * shift)},
            "action": {"everything": part(7, shift)},
        },
        "modalities": {"video": {camera: {"resolution": [48, 48]} for camera in cameras}},
    }


def write_checkpoint(folder: Path) -> Path:
    """Write it in bfloat16, with critic and exploration noise, for two robots."""
    shape = ScratchConfig(
        image_size=28,
        patch_size=14,
        vision_size=32,
        vision_layers=2,
        hidden_size=32,
        layers=2,
        action_size=24,
        action_layers=4,
        action_horizon=HORIZON,
    )
    config = Gr00tConfig(name="gr00t", scratch=shape, noise_method=NoiseMethod.flow_noise)
    policy: Any = build_policy(config, SPEC, chunk_size=CHUNK, seed=0).to(torch.bfloat16)
    fill(policy, NORMS, scale=0.3)
    metadata = {TAG: robot(0.2, ("front", "hand")), "oxe_droid": robot(0.4, ("front",))}
    policy.files = dataclasses.replace(policy.files, metadata=metadata)
    policy.save(folder, config)
    (folder / DESCRIPTION_FILE).unlink()  # public ones have none
    return folder


def write_config(folder: Path, **changes: Any) -> None:
    """Change entries of a checkpoint's config.json."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


def two_views() -> PolicyObservation:
    """Two different samples by formula, with two images each."""
    return observation(2)
