"""Options of ACT, and the architecture in a checkpoint's config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from embodyrl.config.schema import WIDEST_LAYER, ModelConfig, setting
from embodyrl.models.errors import PolicyError
from embodyrl.models.lerobot import ACTION, ENV, ENVIRONMENT, STATE, VISION, check_type, refuse_unknown, section
from embodyrl.models.vla.config import StateInput
from embodyrl.models.vla.folder import check_whole, damaged
from embodyrl.screen import counted


class Backbone(StrEnum):
    """ResNet that reads the images."""

    resnet18 = "resnet18"
    resnet34 = "resnet34"


@dataclass(frozen=True, kw_only=True)
class ScratchConfig:
    """Sizes of a model with random weights; a checkpoint has its own. It predicts `rollout.chunk_size` actions at
    once."""

    backbone: Backbone = setting(Backbone.resnet18)
    """ResNet that reads the images."""
    backbone_width: int = setting(64, low=1)
    """Channels of the ResNet's first stage; each of the three that follow has twice as many as the one before."""
    hidden_size: int = setting(512, low=4)
    """Width of the transformers."""
    heads: int = setting(8, low=1)
    """Attention heads of each."""
    feedforward_size: int = setting(3200, low=1)
    """Width of their feed-forward layers."""
    encoder_layers: int = setting(4, low=1)
    """Layers of the transformer that reads images and state."""
    decoder_layers: int = setting(1, low=1)
    """Layers of the transformer that predicts actions. The published model has 1: the code of Zhao et al. builds 7 and
    reads the first one's output."""
    style: bool = setting(True)
    """Learn from demonstrations as a variational autoencoder, whose latent variable explains in what different people
    differ. It is zero whenever the policy acts."""
    style_size: int = setting(32, low=1)
    """Numbers in the latent variable."""
    style_layers: int = setting(4, low=1)
    """Layers of the transformer that reads demonstrated actions."""


@dataclass(frozen=True, kw_only=True)
class ACTConfig(ModelConfig):
    """A transformer that predicts a chunk of actions from images and the robot's state; it reads no task
    description."""

    statistics: str | None = setting(None)
    """File of statistics that normalise states and actions: a LeRobotDataset's meta/stats.json, or a LeRobot policy's
    ..normalizer_processor.safetensors. null: those in the checkpoint's folder; a model with random weights takes the
    simulator's ranges. Images keep the checkpoint's, or those of ImageNet."""
    cameras: list[str] = setting([])
    """Which of env.cameras each image of the checkpoint shows, in its order. []: env.cameras, in their order."""
    state: StateInput = setting(StateInput.token)
    """token: the robot's state is a token. none: the token is that of the mean state."""
    dropout: float | None = setting(None, low=0.0, below=1.0)
    """Share of the transformers' numbers that supervised learning drops at random. Nothing is dropped in rollouts and
    in what learns from them. null: as in the checkpoint; 0.1 without one."""
    kl_weight: float | None = setting(None, low=0.0)
    """Weight of the latent variable's KL divergence from a standard normal distribution in supervised learning. null:
    as in the checkpoint; 10 without one."""
    log_std_init: float = setting(-1.5, low=-5.0, high=2.0)
    """Start value of the exploration noise's log standard deviation, which is learned, in normalised actions."""
    detach_critic: bool = setting(True)
    """Train only the critic with the value loss, not the network that it reads."""
    value_sizes: list[int] = setting([256, 256], low=1, high=WIDEST_LAYER)
    """Widths of the critic's hidden layers."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    """Shape of the model where `checkpoint` is null."""


# --------------------------------------------------------------------------------------------------------- architecture

DEFAULTS: Mapping[str, Any] = {
    "type": "act",
    "n_obs_steps": 1,
    "chunk_size": 100,
    "n_action_steps": 100,
    "vision_backbone": "resnet18",
    "backbone_width": 64,
    "replace_final_stride_with_dilation": False,
    "pre_norm": False,
    "dim_model": 512,
    "n_heads": 8,
    "dim_feedforward": 3200,
    "feedforward_activation": "relu",
    "n_encoder_layers": 4,
    "n_decoder_layers": 1,
    "use_vae": True,
    "latent_dim": 32,
    "n_vae_encoder_layers": 4,
    "temporal_ensemble_coeff": None,
    "dropout": 0.1,
    "kl_weight": 10.0,
    "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
}
"""What LeRobot takes for entries that a config.json does not have; `backbone_width` is ours, for thinner ResNets."""
BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
"""Blocks of each of a ResNet's four stages."""
SIZES = {
    "backbone_width": "backbone_width",
    "feedforward": "dim_feedforward",
    "encoder_layers": "n_encoder_layers",
    "decoder_layers": "n_decoder_layers",
    "style_size": "latent_dim",
    "horizon": "chunk_size",
}
"""Whole numbers of `Architecture`, by their names in config.json."""
STYLE_LAYERS = "n_vae_encoder_layers"
KNOWN: Mapping[str, tuple[Any, ...]] = {
    "n_obs_steps": (1,),
    "vision_backbone": tuple(BLOCKS),
    "replace_final_stride_with_dilation": (False, 0),
    "feedforward_activation": ("relu", "gelu"),
    "pre_norm": (True, False),
    "use_vae": (True, False),
}
"""Entries of config.json with the values that are implemented."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Everything that determines shapes and connections of the network."""

    backbone: str
    backbone_width: int
    width: int
    heads: int
    feedforward: int
    activation: str
    norm_first: bool
    """Whether layers normalise what they read, instead of what they return."""
    encoder_layers: int
    decoder_layers: int
    style_size: int
    """Numbers in the latent variable."""
    style_layers: int
    """Layers of the transformer that reads demonstrations; 0: none was trained."""
    horizon: int
    """`H`, actions that are predicted at once."""
    action_dim: int
    """`D`"""
    state_dim: int
    """`S`; 0: the model reads no state."""
    environment_dim: int
    """`U`, numbers of the environment's state; 0: the model reads none."""
    images: tuple[str, ...]
    """Names of the images, in their order; without any, it reads the environment's state."""
    image_size: tuple[int, int]
    """Height and width of each [pixels]; 0 without images."""
    dropout: float
    kl_weight: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read LeRobot's config.json, filled up with `DEFAULTS`.

        Raises:
            PolicyError: the file is that of another model, is damaged, or asks for what is not implemented.
        """
        check_type(config, "act")
        refuse_unknown(config, KNOWN)
        inputs, outputs = section(config, "input_features"), section(config, "output_features")
        kinds = {name: _kind(name, feature) for name, feature in inputs.items()}
        images = {name: inputs[name] for name, kind in kinds.items() if kind == VISION}
        environment = [name for name, kind in kinds.items() if kind == ENV]
        if environment not in ([], [ENVIRONMENT]):
            raise damaged("input_features", list(inputs), f"no other one of type {ENV} than {ENVIRONMENT}")
        if not images and not environment:
            raise damaged("input_features", list(inputs), f"an image (type VISUAL) or {ENVIRONMENT} among them")
        sizes = {name: _shape(name, feature, 3)[1:] for name, feature in images.items()}
        first = next(iter(sizes.values()), (0, 0))
        if any(size != first for size in sizes.values()):
            raise PolicyError(
                f"config.json: images have different sizes ({', '.join(map(str, sizes.values()))}); the simulators' "
                "images all have the same, so take a checkpoint whose images do"
            )
        width, heads = (check_whole(config[key], key) for key in ("dim_model", "n_heads"))
        if width % heads or width % 4:
            raise damaged("dim_model", width, f"a multiple of 4 and of n_heads = {heads}")
        return cls(
            backbone=config["vision_backbone"],
            width=width,
            heads=heads,
            activation=config["feedforward_activation"],
            norm_first=bool(config["pre_norm"]),
            **{own: check_whole(config[key], key) for own, key in SIZES.items()},
            style_layers=check_whole(config[STYLE_LAYERS], STYLE_LAYERS) if config["use_vae"] else 0,
            action_dim=_shape(ACTION, outputs.get(ACTION), 1)[0],
            state_dim=_shape(STATE, inputs[STATE], 1)[0] if STATE in inputs else 0,
            environment_dim=_shape(ENVIRONMENT, inputs[ENVIRONMENT], 1)[0] if environment else 0,
            images=tuple(images),
            image_size=(first[0], first[1]),
            dropout=_number_from_0(config, "dropout", below=1.0),
            kl_weight=_number_from_0(config, "kl_weight"),
        )


def with_options(sizes: Architecture, config: ACTConfig) -> Architecture:
    """Return an architecture with the options that replace a checkpoint's settings."""
    own = {"dropout": config.dropout, "kl_weight": config.kl_weight}
    chosen: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    return replace(sizes, **chosen)


def _kind(name: str, feature: Any) -> Any:
    if not isinstance(feature, Mapping):
        raise damaged(f"input_features.{name}", feature, "an object with type and shape")
    return feature.get("type")


def _shape(name: str, feature: Any, dims: int) -> tuple[int, ...]:
    shape = feature.get("shape") if isinstance(feature, Mapping) else None
    if not isinstance(shape, list) or len(shape) != dims or not all(type(size) is int and size > 0 for size in shape):
        raise damaged(f"shape of {name!r}", shape, counted(dims, "whole number") + " above 0")
    kind = "image_size" if dims > 1 else "_dim"
    return tuple(check_whole(size, f"{name}.{kind}") for size in shape)


def _number_from_0(config: Mapping[str, Any], key: str, below: float = 1e9) -> float:
    found = config[key]
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0.0 <= found < below:
        raise damaged(key, found, f"a number from 0 to below {below:g}")
    return float(found)
