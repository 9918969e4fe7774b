"""Options of the CNN policy, and checks of a config of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from embodyrl.config.infos import ModelInfo
from embodyrl.config.issues import ConfigIssue
from embodyrl.config.schema import WIDEST_LAYER, Config, setting
from embodyrl.models.mlp.check import check_saved
from embodyrl.models.mlp.options import HeadConfig, check_head
from embodyrl.models.vla.cameras import check_each_once, check_there

DRQ = "drq"
"""Name of the encoder that is not one of timm's."""
WINDOW = 3
"""Height and width of what a layer of it reads [pixels]."""


class Encoders(StrEnum):
    """How many encoders read the images of several cameras."""

    one = "one"
    each = "each"


@dataclass(frozen=True, kw_only=True)
class CNNConfig(HeadConfig):
    """A convolutional network on images, beside the robot's state, and a small network on both."""

    encoder: str = setting("resnet10t")
    """Convolutional network by its name in timm (`python -c 'import timm; print(timm.list_models("resnet*"))'`), with
    group normalisation in 8 groups in place of batch normalisation. drq: a few plain layers of 3 x 3, as in DrQ-v2
    (Yarats et al. 2021)."""
    channels: list[int] = setting([32, 32, 32, 32], low=1, high=WIDEST_LAYER, only_with={"encoder": (DRQ,)})
    """Channels of each layer of encoder `drq`."""
    strides: list[int] = setting([2, 1, 1, 1], low=1, high=8, only_with={"encoder": (DRQ,)})
    """Stride of each layer of encoder `drq` [pixels]. Larger ones make images smaller sooner and cost less."""
    pretrained: str | None = setting(None)
    """File of weights for the encoder under timm's names (safetensors); nothing is downloaded. null: random weights."""
    cameras: list[str] = setting([])
    """Cameras of env.cameras that are read, in this order. []: all of them."""
    encoders: Encoders = setting(Encoders.one)
    """one: the same encoder reads the images of all cameras. each: every camera has its own."""
    state: bool = setting(True)
    """Read the robot's state, beside the images."""
    image_features: int = setting(256, low=1, high=WIDEST_LAYER)
    """Numbers that an image becomes."""
    state_features: int = setting(64, low=1, high=WIDEST_LAYER)
    """Numbers that the state becomes."""
    hidden_sizes: list[int] = setting([256], low=1, high=WIDEST_LAYER)
    """Widths of the hidden layers behind, of the policy and of the value network."""
    normalize_observations: bool = setting(True)
    """Scale states by a running mean and standard deviation, updated once per iteration and saved with the policy. With
    a replay they begin with the decisions before learning."""
    shared: bool = setting(True, only_with={"head": ("gaussian",)})
    """Policy and value network read the same features. False: the value network has encoders of its own."""
    critic_gradient: bool = setting(True, only_with={"head": ("gaussian",), "shared": ()})
    """Train shared encoders with the value loss, too."""


class CNNInfo(ModelInfo):
    """The CNN policy."""

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config of the CNN policy."""
        model = config.model
        assert isinstance(model, CNNConfig)
        yield from check_there(config)
        yield from check_each_once(model.cameras, config)
        yield from check_head(config)
        yield from check_saved(config)
        yield from _encoder(model, config)
        theirs = None if model.encoder == DRQ else model.pretrained
        if theirs is not None and model.checkpoint is None and not Path(theirs).is_file():
            yield ConfigIssue(
                "model.pretrained",
                f"model.pretrained = {theirs!r} does not exist",
                "name a .safetensors file of timm's weights, or set it to null",
            )


def _encoder(model: CNNConfig, config: Config) -> Iterator[ConfigIssue]:
    """Check that the settings of the encoder are its own, and that images are large enough for it."""
    if model.encoder != DRQ:
        return
    if model.pretrained is not None:
        yield ConfigIssue(
            ("model.pretrained", "model.encoder"),
            f"model.pretrained = {model.pretrained!r} are weights of a network of timm, and model.encoder is {DRQ!r}",
            "set model.pretrained to null",
        )
    if not model.channels or len(model.channels) != len(model.strides):
        yield ConfigIssue(
            ("model.channels", "model.strides"),
            f"model.channels has {len(model.channels)} numbers and model.strides {len(model.strides)}: each layer of "
            "the encoder has one of both",
            "give both as many",
        )
    elif config.env.cameras and smallest_map(config.env.image_size, model.strides) < 1:
        yield ConfigIssue(
            ("model.strides", "env.image_size"),
            f"images of {' x '.join(map(str, config.env.image_size))} pixels are too small for {len(model.strides)} "
            f"layers with strides {model.strides}: nothing is left of them",
            "make env.image_size larger, or leave layers out",
        )


def smallest_map(image_size: Sequence[int], strides: Sequence[int]) -> int:
    """Return the smaller of height and width of what encoder `drq` makes of images; 0 or less: nothing."""
    size = min(image_size)
    for stride in strides:
        size = (size - WINDOW) // stride + 1
    return size
