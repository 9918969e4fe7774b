"""Convolutional encoders of images.

Shapes: `B` samples, `V` cameras, `F` features of an image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.errors import did_you_mean
from embodyrl.models.cnn.options import DRQ, WINDOW, CNNConfig
from embodyrl.models.errors import PolicyError
from embodyrl.models.weights import load_strictly, read_tensors

GROUPS = 8
CLASSIFIERS = ("fc.", "head.", "classifier.")
"""Beginnings of the names of classifiers' weights in timm's networks."""


def build_backbone(name: str, frames: int) -> nn.Module:
    """Build timm's network `name` for `frames` images as channels, with random weights, without its classifier, with
    group normalisation.

    Statistics of a batch would make a sample depend on its neighbours, and acting differ from learning.

    Raises:
        PolicyError: timm has no such network, or one of its layers has no multiple of 8 channels.
    """
    from embodyrl.models.libraries import timm  # not needed by encoder drq

    if name not in timm.list_models():
        hint = did_you_mean(name, [DRQ, *timm.list_models()], lead=" - ")
        raise PolicyError(f"model.encoder: timm has no network {name!r}{hint}")
    backbone: nn.Module = timm.create_model(name, pretrained=False, in_chans=3 * frames, num_classes=0, global_pool="")
    _normalize_in_groups(backbone, name)
    return backbone


def _normalize_in_groups(module: nn.Module, name: str) -> None:
    for child, part in module.named_children():
        if not isinstance(part, nn.BatchNorm2d):
            _normalize_in_groups(part, name)
            continue
        if part.num_features % GROUPS:
            raise PolicyError(
                f"model.encoder: {name} has a layer of {part.num_features} channels, which cannot be normalised in "
                f"{GROUPS} groups: choose another network"
            )
        norm, activation = nn.GroupNorm(GROUPS, part.num_features), getattr(part, "act", None)
        # Some of timm's networks have their activation inside of the normalisation.
        setattr(module, child, norm if activation is None else nn.Sequential(norm, activation))


def load_backbone(backbone: nn.Module, path: Path, frames: int) -> None:
    """Read timm's weights, those of one image for every one of `frames`. Statistics of batches and the classifier are
    left out.

    Raises:
        PolicyError: the file is damaged, or names or shapes differ (each is named).
    """
    if not path.is_file():
        raise PolicyError(f"model.pretrained = {str(path)!r} does not exist", "name a file of timm's weights")
    own, unused = backbone.state_dict(), ("running_mean", "running_var", "num_batches_tracked")
    found = {name: each for name, each in read_tensors(path).items() if not name.endswith(unused)}
    # A normalisation with its activation inside has become the first of two parts.
    moved = {outer: name for name in own if (outer := ".".join(name.rsplit(".0.", 1))) not in own}
    named = {name if name in own else moved.get(name, name): each for name, each in found.items()}
    kept = {name: each for name, each in named.items() if not name.startswith(CLASSIFIERS)}
    for name, each in kept.items():
        if name in own and each.dim() == 4 and own[name].shape[1] == frames * each.shape[1] and each.shape[1] == 3:
            # Shared equally: the same image in all frames gives what it gave alone.
            kept[name] = each.repeat(1, frames, 1, 1) / frames
    load_strictly(backbone, kept, "pretrained encoder")


def build_plain(channels: Sequence[int], strides: Sequence[int], frames: int) -> nn.Module:
    """Build the layers of DrQ-v2's encoder (Yarats et al. 2021, arXiv:2107.09645) for `frames` images as channels:
    convolutions of 3 x 3 without padding, each followed by a rectifier; orthogonal weights and zero biases."""
    layers: list[nn.Module] = []
    for (fan_in, fan_out), stride in zip(pairwise([3 * frames, *channels]), strides, strict=True):
        convolution = nn.Conv2d(fan_in, fan_out, WINDOW, stride)
        nn.init.orthogonal_(convolution.weight, math.sqrt(2.0))
        assert convolution.bias is not None
        nn.init.zeros_(convolution.bias)
        layers += [convolution, nn.ReLU(inplace=True)]  # half the memory; nothing else reads what it overwrites
    return nn.Sequential(*layers)


class Encoder(nn.Module):
    """An image as features: a backbone's whole map, not its mean, because positions matter; a linear layer, a
    norm and tanh, as in DrQ (Yarats et al., 2021, arXiv:2107.09645)."""

    def __init__(self, config: CNNConfig, image_size: tuple[int, int], frames: int) -> None:
        super().__init__()
        plain, features = config.encoder == DRQ, config.image_features
        self.backbone = (
            build_plain(config.channels, config.strides, frames) if plain else build_backbone(config.encoder, frames)
        )
        # A policy from a checkpoint has its own weights: the file of the first ones may be gone.
        if config.pretrained is not None and config.checkpoint is None:
            load_backbone(self.backbone, Path(config.pretrained), frames)
        with torch.no_grad():
            first = next(self.backbone.parameters())
            size = self.backbone(torch.zeros(1, 3 * frames, *image_size, device=first.device)).numel()
        self.project = nn.Linear(size, features)
        self.norm = nn.LayerNorm(features)

    def forward(self, images: Tensor) -> Tensor:
        """Map `images [B, 3 * frames, h, w]` in [-1, 1] to `[B, F]`."""
        seen: Any = self.backbone(images)
        features: Tensor = self.norm(self.project(seen.flatten(1))).tanh()
        return features
