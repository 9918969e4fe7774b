"""Preprocessing of images as in LeRobot."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def pixel_values(images: Tensor, side: int, device: torch.device) -> Tensor:
    """Convert `images [B, V, H, W, 3]` in uint8 to `[B, V, 3, side, side]` float32 in [-1, 1].

    Images are resized without antialiasing to fit the square, and padded with black on the left and above.
    """
    flat = images.flatten(0, 1).to(device).permute(0, 3, 1, 2).float() / 255.0
    height, width = flat.shape[2:]
    if (height, width) != (side, side):
        ratio = max(width / side, height / side)
        height, width = int(height / ratio), int(width / ratio)
        flat = functional.interpolate(flat, size=(height, width), mode="bilinear", align_corners=False)
        flat = functional.pad(flat, (side - width, 0, side - height, 0))
    return torch.unflatten(flat * 2.0 - 1.0, 0, images.shape[:2])
