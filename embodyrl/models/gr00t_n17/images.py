"""Images as the network sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from embodyrl.models.errors import PolicyError
from embodyrl.models.gr00t_n17.geometry import Geometry, Step


def pixel_values(images: Tensor, geometry: Geometry, device: torch.device) -> Tensor:
    """Convert `images [B, V, H, W, 3]` in uint8 to `[B, V, 3, h, w]` float32 in -1 .. 1.

    Padding, cropping and resizing run on the CPU and end in whole numbers, so that rollouts and learning get the same
    pixels.
    """
    flat = images.flatten(0, 1)
    steps = geometry.steps(*flat.shape[1:3])
    planes = (change(flat.cpu(), steps) if steps else flat).to(device).permute(0, 3, 1, 2)
    return torch.unflatten((planes.float() - 127.5) / 127.5, 0, images.shape[:2])


def change(images: Tensor, steps: list[Step]) -> Tensor:
    """Change images `[M, H, W, 3]` in uint8 on the CPU, step by step."""
    for step in steps:
        images = CHANGES[step.kind](images, step)
    return images


def _pad(images: Tensor, step: Step) -> Tensor:
    below, right = step.height - images.shape[1] - step.top, step.width - images.shape[2] - step.left
    return functional.pad(images, (0, 0, step.left, right, step.top, below))


def _crop(images: Tensor, step: Step) -> Tensor:
    return images[:, step.top : step.top + step.height, step.left : step.left + step.width]


def _bicubic(images: Tensor, step: Step) -> Tensor:
    planes = images.permute(0, 3, 1, 2).contiguous()
    size = (step.height, step.width)
    resized = functional.interpolate(planes, size, mode="bicubic", antialias=True, align_corners=False)
    return resized.permute(0, 2, 3, 1)


def _area(images: Tensor, step: Step) -> Tensor:
    """Resize with OpenCV, whose INTER_AREA has a rounding of its own where images grow."""
    cv2 = _opencv()
    size = (step.width, step.height)
    resized = [cv2.resize(image, size, interpolation=cv2.INTER_AREA) for image in images.contiguous().numpy()]
    return torch.from_numpy(np.stack(resized))


def _opencv() -> Any:
    try:
        import cv2  # only where images are resized
    except ImportError as error:
        raise PolicyError(
            f"OpenCV, with which this model's images are resized, cannot be imported ({error})",
            "pip install 'embodyrl[vla]'",
        ) from error
    return cv2


CHANGES = {"pad": _pad, "crop": _crop, "area": _area, "bicubic": _bicubic}
