"""From a simulator's pictures to what the vision tower takes, as the public code does it.

Shapes: `B` samples, `V` cameras, `H, W` pixels, `h` the model's side.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.gr00t.options import Interpolation

CROP = 0.95
"""Share of the picture's sides that a centre crop keeps."""


class PicturePipeline(nn.Module):
    """Crop, resize, normalise. Resizing happens on the CPU wherever pictures come from, and ends in whole numbers:
    rollouts and learning must see the same."""

    def __init__(self, side: int, *, center_crop: bool, interpolation: Interpolation) -> None:
        super().__init__()
        self.side, self._center_crop, self._mode = side, center_crop, interpolation

    def forward(self, images: Tensor, device: torch.device) -> Tensor:
        """`pixel_values [B, V, 3, h, h]` in float32 of `images [B, V, H, W, 3]` in uint8."""
        planes = images.flatten(0, 1).permute(0, 3, 1, 2)
        if self._center_crop:
            planes = _crop(planes)
        if planes.shape[-2:] != (self.side, self.side):
            planes = self._resize(planes.cpu())
        normalized = (planes.to(device).float() / 255.0 - 0.5) / 0.5
        return normalized.unflatten(0, images.shape[:2])

    def _resize(self, planes: Tensor) -> Tensor:
        """`[M, 3, h, h]` of `[M, 3, H, W]`, both in uint8.

        Isaac-GR00T's bilinear way goes through fractions, and cuts off what lies behind the decimal point: pictures are
        half a grey level darker on average than rounded ones. Eagle's processor, which LeRobot leaves the bicubic way
        to, rounds.
        """
        fractions = self._mode is Interpolation.bilinear
        numbers = planes.contiguous().float() / 255.0 if fractions else planes  # a third faster than channels last
        size = (self.side, self.side)
        resized = functional.interpolate(numbers, size, mode=self._mode.value, antialias=True, align_corners=False)
        return (resized * 255).to(torch.uint8) if fractions else resized


def _crop(planes: Tensor) -> Tensor:
    """The middle of `[M, 3, H, W]`."""
    height, width = (int(CROP * side) for side in planes.shape[-2:])
    top, left = (round((side - kept) / 2) for side, kept in zip(planes.shape[-2:], (height, width), strict=True))
    return planes[..., top : top + height, left : left + width]
