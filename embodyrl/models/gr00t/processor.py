"""Preprocessing of images as in the public code, and normalisation of states and actions.

Shapes: `B` samples, `V` cameras, `H, W` pixels, `h` the model's side.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.gr00t.checkpoint import NormStats
from embodyrl.models.gr00t.config import Interpolation, Normalization
from embodyrl.models.lerobot import Scale

CROP = 0.95
"""Share of the image's sides that a centre crop keeps."""


class ImagePipeline(nn.Module):
    """Crops, resizes and normalises images. Resizing always runs on the CPU and ends in whole numbers, so that rollouts
    and learning get the same pixels."""

    def __init__(self, side: int, *, center_crop: bool, interpolation: Interpolation) -> None:
        super().__init__()
        self.side, self._center_crop, self._mode = side, center_crop, interpolation

    def resizes(self, size: tuple[int, int] | None) -> bool:
        """Return whether images of a size (height, width) are resized."""
        return self._center_crop or size != (self.side, self.side)

    def forward(self, images: Tensor, device: torch.device) -> Tensor:
        """Convert `images [B, V, H, W, 3]` in uint8 to `pixel_values [B, V, 3, h, h]` in float32."""
        planes = images.flatten(0, 1).permute(0, 3, 1, 2)
        if self._center_crop:
            planes = _crop(planes)
        if planes.shape[-2:] != (self.side, self.side):
            planes = self._resize(planes.cpu())
        normalized = (planes.to(device).float() / 255.0 - 0.5) / 0.5
        return torch.unflatten(normalized, 0, images.shape[:2])

    def _resize(self, planes: Tensor) -> Tensor:
        """Resize `[M, 3, H, W]` to `[M, 3, h, h]`, both in uint8.

        Isaac-GR00T's bilinear resizing computes in fractions and truncates the result, so that images are half a grey
        level darker on average than rounded ones. Eagle's processor, which LeRobot uses for bicubic resizing, rounds.
        """
        fractions = self._mode is Interpolation.bilinear
        numbers = planes.contiguous().float() / 255.0 if fractions else planes  # a third faster than channels last
        size = (self.side, self.side)
        resized = functional.interpolate(numbers, size, mode=self._mode.value, antialias=True, align_corners=False)
        return (resized * 255).to(torch.uint8) if fractions else resized


def _crop(planes: Tensor) -> Tensor:
    """Return the centre crop of `[M, 3, H, W]`."""
    height, width = (int(CROP * side) for side in planes.shape[-2:])
    top, left = (round((side - kept) / 2) for side, kept in zip(planes.shape[-2:], (height, width), strict=True))
    return planes[..., top : top + height, left : left + width]


def scale_of(ranges: NormStats, mode: Normalization) -> Scale:
    """Return the normalisation of a robot's state or action.

    Args:
        ranges: its statistics.
        mode: min_max: -1 and 1 are the ends of the range. mean_std: mean 0, standard deviation 1.
    """
    low, high, mean, std = (
        np.array(column, np.float64) for column in (ranges.min, ranges.max, ranges.mean, ranges.std)
    )
    if mode is Normalization.mean_std:
        return Scale(mean, std, std)
    half_width = 0.5 * (high - low)
    return Scale(0.5 * (low + high), half_width, half_width)
