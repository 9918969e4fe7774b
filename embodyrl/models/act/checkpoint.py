"""Files of an ACT checkpoint beside the weights, and names of weights. Also builds these files for models with random
weights, and for the published size.

Imports no torch, so that a config can be checked against its checkpoint before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import unit_range
from embodyrl.models.act.config import DEFAULTS, ENV, ENVIRONMENT, ACTConfig, Architecture
from embodyrl.models.lerobot import (
    ACTION,
    BUFFERS,
    STATE,
    VISION,
    LerobotFiles,
    Scale,
    read_buffers,
    read_companions,
)
from embodyrl.models.vla.checkpoint import CONFIG, simulator_to_start_in

PREFIX = "model."
"""Beginning of the names of weights in public files."""
IMAGENET = {"mean": [[[0.485]], [[0.456]], [[0.406]]], "std": [[[0.229]], [[0.224]], [[0.225]]]}
"""Mean and standard deviation of ImageNet's colours, by which LeRobot normalises the images of any data set."""


def own_name(public: str) -> str | None:
    """Return the name in the network of a name in a file; None for a buffer of normalisation, which is none of its."""
    return None if public.startswith(BUFFERS) else public.removeprefix(PREFIX)


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Normalisation of images, states and actions."""

    images: tuple[Scale, ...]
    """Of the three colours of each image."""
    states: Scale | None
    """Of the robot's; None: the model reads none."""
    environment: Scale | None
    """Of the environment's state; None: the model reads none."""
    actions: Scale


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles(LerobotFiles):
    """All files of a checkpoint except the weights."""

    DEFAULTS = DEFAULTS

    @classmethod
    def read(cls, folder: Path, *, statistics: str | None = None) -> CheckpointFiles:
        """Read a checkpoint's folder.

        Args:
            folder: the checkpoint's folder.
            statistics: file to use instead of the statistics of states and actions in the folder.

        Raises:
            PolicyError: it is not the folder of such a checkpoint, or the other file does not exist.
        """
        files = cls(companions=read_companions(folder), buffers=read_buffers(folder))
        return files if statistics is None else files.with_statistics(statistics)

    @cached_property
    def architecture(self) -> Architecture:
        """Shapes and connections of the network.

        Raises:
            PolicyError: config.json is damaged, or asks for what is not implemented.
        """
        return Architecture.from_config(self.config)

    def scales(self) -> Scales:
        """Return the normalisation of everything that the network reads and returns.

        Raises:
            PolicyError: statistics are missing or damaged.
        """
        found, sizes = self.statistics, self.architecture
        return Scales(
            images=tuple(found.scale(name, VISION) for name in sizes.images),
            states=found.scale(STATE, "STATE") if sizes.state_dim else None,
            environment=found.scale(ENVIRONMENT, ENV) if sizes.environment_dim else None,
            actions=found.scale(ACTION, "ACTION"),
        )


# ------------------------------------------------------------------------------------------------- without a checkpoint


def scratch_files(config: ACTConfig, simulator: SimulatorSpec | None, chunk_size: int) -> CheckpointFiles:
    """Build the files of a model with random weights. It predicts one chunk, and its ranges are the simulator's unless
    statistics are given.

    Raises:
        PolicyError: there is no simulator (None), its actions are discrete, or the file of statistics does not exist.
    """
    simulator = simulator_to_start_in(simulator)
    sizes = config.scratch
    own = {
        "chunk_size": chunk_size,
        "n_action_steps": chunk_size,
        "vision_backbone": sizes.backbone.value,
        "backbone_width": sizes.backbone_width,
        "dim_model": sizes.hidden_size,
        "n_heads": sizes.heads,
        "dim_feedforward": sizes.feedforward_size,
        "n_encoder_layers": sizes.encoder_layers,
        "n_decoder_layers": sizes.decoder_layers,
        "use_vae": sizes.style,
        "latent_dim": sizes.style_size,
        "n_vae_encoder_layers": sizes.style_layers,
    }
    shapes = {f"observation.images.{camera}": [3, *simulator.image_size] for camera in simulator.cameras}
    centre, half_width = unit_range(simulator)
    first, end = simulator.environment_state
    states = simulator.proprio_dim - (end - first)
    numbers: dict[str, Any] = {
        STATE: {"mean": [0.0] * states, "std": [1.0] * states},
        ACTION: {"mean": np.asarray(centre).tolist(), "std": np.asarray(half_width).tolist()},
    }
    files = _files(_description(own, shapes, states, simulator.action_dim, end - first), numbers)
    return files if config.statistics is None else files.with_statistics(config.statistics)


def scratch_files_of(proprio: int | None, acting: int | None) -> CheckpointFiles:
    """Build the files of a model with random weights as far as statistics depend on them, before there is a simulator;
    sizes that only it knows are None."""
    description = _description({}, {"observation.images.camera": [3, 64, 64]}, proprio or 0, acting or 1)
    return _files(description, {})


def published_files() -> CheckpointFiles:
    """Build the files of a model of the published size, for ALOHA's robot."""
    numbers = {name: {"mean": [0.0] * 14, "std": [1.0] * 14} for name in (STATE, ACTION)}
    return _files(_description({}, {"observation.images.top": [3, 480, 640]}, 14, 14), numbers)


def _description(
    own: Mapping[str, Any], images: Mapping[str, list[int]], state: int, action: int, environment: int = 0
) -> Mapping[str, Any]:
    """Return the config.json of a new policy, with LeRobot's settings where they are not given."""
    read = {STATE: {"type": "STATE", "shape": [state]}} if state else {}
    if environment:
        read[ENVIRONMENT] = {"type": ENV, "shape": [environment]}
    seen = {name: {"type": VISION, "shape": shape} for name, shape in images.items()}
    return {
        **DEFAULTS,
        **own,
        "input_features": {**read, **seen},
        "output_features": {ACTION: {"type": "ACTION", "shape": [action]}},
        "pretrained_backbone_weights": None,
    }


def _files(description: Mapping[str, Any], numbers: Mapping[str, Any]) -> CheckpointFiles:
    """Return files made of their contents, with the usual statistics of images."""
    seen = [name for name, each in description["input_features"].items() if each["type"] == VISION]
    read = {name: each for name, each in numbers.items() if name != STATE or STATE in description["input_features"]}
    files = CheckpointFiles(companions={CONFIG: json.dumps(description, indent=4).encode()}, buffers={})
    return files.with_numbers(read | dict.fromkeys(seen, IMAGENET))
