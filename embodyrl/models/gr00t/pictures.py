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
    """Crop, resize, normalise. Resizing happens on the CPU, on whole numbers, wherever pictures come from: rollouts and
    learning must see the same."""

    def __init__(self, side: int, *, center_crop: bool, interpolation: Interpolation) -> None:
        super().__init__()
        self.side, self._center_crop, self._mode = side, center_crop, interpolation.value

    def forward(self, images: Tensor, device: torch.device) -> Tensor:
        """`pixel_values [B, V, 3, h, h]` in float32 of `images [B, V, H, W, 3]` in uint8."""
        planes = images.flatten(0, 1).permute(0, 3, 1, 2)
        if self._center_crop:
            planes = _crop(planes)
        if planes.shape[-2:] != (self.side, self.side):
            size = (self.side, self.side)
            planes = functional.interpolate(planes.cpu(), size, mode=self._mode, antialias=True, align_corners=False)
        normalized = (planes.to(device).float() / 255.0 - 0.5) / 0.5
        return normalized.unflatten(0, images.shape[:2])


def _crop(planes: Tensor) -> Tensor:
    """The middle of `[M, 3, H, W]`."""
    height, width = (int(CROP * side) for side in planes.shape[-2:])
    top, left = (round((side - kept) / 2) for side, kept in zip(planes.shape[-2:], (height, width), strict=True))
    return planes[..., top : top + height, left : left + width]
