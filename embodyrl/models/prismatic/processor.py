"""Preprocessing of images, normalisation of states and actions, and action tokens.

Images are resized as by PIL, as in the public image processor, or as public evaluations in LIBERO do before that: with
TensorFlow, by Lanczos. They encode and decode a JPEG first, which is not repeated here.

Each number of an action is one token, which stands for the centre of one of 255 equal intervals of [-1, 1]. Tokens are
counted from the first action token, `0 .. bins-1`; the highest stands for -1. `bins` edges make `bins - 1` intervals,
so that the two lowest tokens share the last interval.

Shapes: `B` samples, `V` cameras, `H, W` pixels, `h` the model's side; `...` any.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.prismatic.checkpoint import Preprocessing, Range
from embodyrl.models.prismatic.config import Interpolation
from embodyrl.models.vla.resize import resize, resize_as_tensorflow

# --------------------------------------------------------------------------------------------------------------- images

CROP_AREA = 0.9
"""Share of the image's area that a centre crop keeps."""


class ImagePipeline(nn.Module):
    """Resizes, crops and normalises images.

    Args:
        config: sizes and colours. The means are those of `tvf_normalize_params`, as in public code; they are rounded to
            bfloat16 there.
        center_crop: keep the middle 90 % of the area.
        interpolation: how images are resized.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, config: Preprocessing, center_crop: bool, interpolation: Interpolation = Interpolation.checkpoint
    ) -> None:
        super().__init__()
        self.side, self._interpolation = config.side, Image.Resampling(config.interpolation)
        self.center_crop, self.interpolation = center_crop, interpolation
        for name in ("mean", "std"):
            numbers = torch.tensor(getattr(config, name), dtype=torch.float32)
            self.register_buffer(name, numbers.view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Convert `images [B, V, H, W, 3]` in uint8 to `pixel_values [B, V*channels, h, h]` in float32."""
        batch = len(images)
        flat = images.flatten(0, 1).to(self.mean.device)
        planes = self._resized(flat).permute(0, 3, 1, 2)
        if self.center_crop:
            planes = _crop(planes)
        copies = len(self.mean) // 3
        normalised = (planes.float().div(255).repeat(1, copies, 1, 1) - self.mean) / self.std
        return torch.unflatten(normalised, 0, (batch, -1)).flatten(1, 2)

    def _resized(self, images: Tensor) -> Tensor:
        size = (self.side, self.side)
        if self.interpolation is Interpolation.lanczos3:
            return resize_as_tensorflow(images, size, Image.Resampling.LANCZOS)
        return resize(images, size, self._interpolation)


def _crop(planes: Tensor) -> Tensor:
    """Crop the centre of `[M, 3, h, h]` in uint8, and resize it to the same size.

    Sampling points and rounding are those of TensorFlow's crop_and_resize and convert_image_dtype.
    """
    side = planes.shape[-1]
    line = torch.linspace(-1.0, 1.0, side, device=planes.device) * math.sqrt(CROP_AREA)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).expand(len(planes), -1, -1, -1)
    cropped = functional.grid_sample(planes.float() / 255, grid, mode="bilinear", align_corners=True)
    return (cropped.clamp(0.0, 1.0) * 255.5).floor().clamp(max=255.0)


# -------------------------------------------------------------------------------------------------------- normalisation

Bounds = Literal["q99", "min_max"]


class NormRange(nn.Module):
    """Maps numbers of a data set to [-1, 1] and back. Entries outside the mask are unchanged.

    Args:
        ends: of one data set, for actions or for states.
        epsilon: added to the width, as in public code of OpenVLA-OFT; 0 for OpenVLA.
    """

    low: Tensor
    width: Tensor
    mask: Tensor

    def __init__(self, ends: Range, epsilon: float) -> None:
        super().__init__()
        low, high = (torch.tensor(numbers, dtype=torch.float64) for numbers in (ends.low, ends.high))
        mask = torch.tensor(ends.mask, dtype=torch.bool)
        self.register_buffer("low", low.float(), persistent=False)
        self.register_buffer("width", (high - low + epsilon).float(), persistent=False)
        self.register_buffer("mask", mask, persistent=False)

    def __len__(self) -> int:
        return len(self.low)

    def unnormalize(self, numbers: Tensor) -> Tensor:
        """Map numbers in [-1, 1] `[..., D]` to the data set's range."""
        return torch.where(self.mask, 0.5 * (numbers + 1.0) * self.width + self.low, numbers)

    def normalize(self, numbers: Tensor) -> Tensor:
        """Map numbers in the data set's range `[..., D]` to [-1, 1], and clip them."""
        shrunk = torch.where(self.mask, 2.0 * (numbers - self.low) / self.width - 1.0, numbers)
        return shrunk.clamp(-1.0, 1.0)


# -------------------------------------------------------------------------------------------------------- action tokens


class ActionBins(nn.Module):
    """Conversion between action tokens and numbers in [-1, 1]."""

    centres: Tensor
    edges: Tensor

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins
        edges = torch.linspace(-1.0, 1.0, bins, dtype=torch.float64)
        centres = 0.5 * (edges[1:] + edges[:-1])
        interval = torch.arange(bins - 1, -1, -1).clamp(max=bins - 2)
        self.register_buffer("centres", centres[interval].float(), persistent=False)
        self.register_buffer("edges", edges.float(), persistent=False)

    def decode(self, tokens: Tensor) -> Tensor:
        """Return the numbers in [-1, 1] `[...]` of tokens `[...]`."""
        return self.centres[tokens]

    def encode(self, numbers: Tensor) -> Tensor:
        """Return the tokens `[...]` of numbers `[...]`, which are clipped to [-1, 1]."""
        return self.bins - torch.bucketize(numbers.clamp(-1.0, 1.0), self.edges, right=True)
