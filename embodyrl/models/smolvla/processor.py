"""Preprocessing of images, and normalisation of states and actions, as in LeRobot."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.lerobot import Scale


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


class Normalizer(nn.Module):
    """Normalises numbers of a data set, and back. Nothing is clipped.

    Args:
        scale: of the `D` numbers.
    """

    origin: Tensor
    divisor: Tensor
    factor: Tensor

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        for name in ("origin", "divisor", "factor"):
            numbers = torch.tensor(getattr(scale, name), dtype=torch.float32)
            self.register_buffer(name, numbers, persistent=False)
        self.shift = scale.shift

    def __len__(self) -> int:
        return len(self.origin)

    def normalize(self, numbers: Tensor) -> Tensor:
        """Normalise numbers `[..., D]` of the data set."""
        return (numbers - self.origin) / self.divisor - self.shift

    def unnormalize(self, numbers: Tensor) -> Tensor:
        """Convert the network's numbers `[..., D]` to those of the data set."""
        return (numbers + self.shift) * self.factor + self.origin
