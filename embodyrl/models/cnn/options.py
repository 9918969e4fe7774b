"""Options of the CNN policy, and checks of a config of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import Config, ModelConfig, setting
from embodyrl.models.mlp.options import Activation
from embodyrl.models.vla.cameras import check_each_once, check_there


class Encoders(StrEnum):
    """How many encoders read the images of several cameras."""

    one = "one"
    each = "each"


@dataclass(frozen=True, kw_only=True)
class CNNConfig(ModelConfig):
    """A convolutional network on images, beside the robot's state, and a small network on both."""

    encoder: str = setting("resnet10t")
    """Convolutional network by its name in timm (`python -c 'import timm; print(timm.list_models("resnet*"))'`), with
    group normalisation in 8 groups in place of batch normalisation."""
    pretrained: str | None = setting(None)
    """File of weights for the encoder under timm's names (safetensors); nothing is downloaded. null: random weights."""
    cameras: list[str] = setting([])
    """Cameras of env.cameras that are read, in this order. []: all of them."""
    encoders: Encoders = setting(Encoders.one)
    """one: the same encoder reads the images of all cameras. each: every camera has its own."""
    state: bool = setting(True)
    """Read the robot's state, beside the images."""
    image_features: int = setting(256, low=1)
    """Numbers that an image becomes."""
    state_features: int = setting(64, low=1)
    """Numbers that the state becomes."""
    hidden_sizes: list[int] = setting([256], low=1)
    """Widths of the hidden layers behind, of the policy and of the value network."""
    activation: Activation = setting(Activation.tanh)
    """Nonlinearity between these layers."""
    log_std_init: float = setting(-0.5, low=-5.0, high=2.0)
    """Start value of the exploration noise's log standard deviation, in units of half the action range. Discrete
    actions have no such noise."""
    normalize_observations: bool = setting(True)
    """Scale states by a running mean and standard deviation, updated once per iteration and saved with the policy."""
    shared: bool = setting(True)
    """Policy and value network read the same features. False: the value network has encoders of its own."""
    critic_gradient: bool = setting(True)
    """Train shared encoders with the value loss, too."""


def check(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for each fault of a config of the CNN policy."""
    model = config.model
    assert isinstance(model, CNNConfig)
    yield from check_there(config)
    yield from check_each_once(model.cameras, config)
    if not model.critic_gradient and not model.shared:
        yield ConfigIssue(
            "model.critic_gradient",
            "model.critic_gradient = false keeps the value loss from shared encoders, but model.shared = false",
            "remove one of the two",
        )
    if model.pretrained is not None and model.checkpoint is None and not Path(model.pretrained).is_file():
        yield ConfigIssue(
            "model.pretrained",
            f"model.pretrained = {model.pretrained!r} does not exist",
            "name a .safetensors file of timm's weights, or set it to null",
        )
