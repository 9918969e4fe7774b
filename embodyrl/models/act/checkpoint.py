"""Files of an ACT checkpoint beside the weights, and names of weights. Also builds these files for models with random
weights, and for the published size.

Imports no torch, so that a config can be checked against its checkpoint before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from embodyrl.envs import SimulatorSpec
from embodyrl.models.act.config import DEFAULTS, ACTConfig, Architecture
from embodyrl.models.lerobot import (
    ACTION,
    BUFFERS,
    ENV,
    ENVIRONMENT,
    STATE,
    VISION,
    LerobotFiles,
    Scale,
    new_features,
    new_numbers,
)

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
    def scratch(cls, config: ACTConfig, simulator: SimulatorSpec, chunk_size: int) -> CheckpointFiles:
        """See `CheckpointFolder.scratch`."""
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
        images = dict.fromkeys(simulator.cameras, (3, *simulator.image_size))
        first, end = simulator.environment_state
        state, action = simulator.proprio_dim - (end - first), simulator.action_dim
        features = new_features(images, state=state, action=action, environment=end - first)
        return cls.described(own | features, new_numbers(state, action, simulator))

    @classmethod
    def published(cls, config: ACTConfig) -> CheckpointFiles:
        """See `CheckpointFolder.published`; for ALOHA's robot."""
        return cls.described(new_features({"top": (3, 480, 640)}, state=14, action=14), new_numbers(14, 14))

    @classmethod
    def described(cls, own: Mapping[str, Any], numbers: Mapping[str, Any]) -> CheckpointFiles:
        """Return the files of a new policy, with LeRobot's settings where its own are not given, and the usual
        statistics of images."""
        read = own["input_features"]
        images = [name for name, feature in read.items() if feature["type"] == VISION]
        kept = {name: each for name, each in numbers.items() if name != STATE or STATE in read}
        description = {**DEFAULTS, **own, "pretrained_backbone_weights": None}
        return cls.new(description, kept | dict.fromkeys(images, IMAGENET))

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


def files_before_simulator(proprio: int | None, acting: int | None) -> CheckpointFiles:
    """Return the files of a model with random weights as far as statistics depend on them; sizes that only the
    simulator knows are None."""
    return CheckpointFiles.described(new_features({"camera": (3, 64, 64)}, state=proprio or 0, action=acting or 1), {})
