"""Preprocessing of images, and normalisation of states and actions."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from embodyrl.models.pi.checkpoint import NormStats
from embodyrl.models.pi.config import Normalization
from embodyrl.models.vla.processor import Normalizer

EPSILON = 1e-6
"""Added to the width of ranges, as in public code."""


def letterbox(image: Image.Image, side: int) -> Image.Image:
    """Resize an image to fit a black square of `side` pixels, centred."""
    if image.size == (side, side):
        return image
    ratio = max(image.size) / side
    width, height = (int(length / ratio) for length in image.size)
    square = Image.new("RGB", (side, side))
    square.paste(image.resize((width, height), Image.Resampling.BILINEAR), ((side - width) // 2, (side - height) // 2))
    return square


def pixel_values(images: Tensor, side: int, device: torch.device) -> Tensor:
    """Convert `images [B, V, H, W, 3]` in uint8 to `[B, V, 3, side, side]` float32 in [-1, 1]."""
    flat = images.flatten(0, 1)
    if flat.shape[1:3] != (side, side):
        resized = [np.asarray(letterbox(Image.fromarray(image), side)) for image in flat.cpu().numpy()]
        flat = torch.from_numpy(np.stack(resized))
    numbers = flat.to(device).permute(0, 3, 1, 2).float() / 255.0 * 2.0 - 1.0
    return torch.unflatten(numbers, 0, images.shape[:2])


def normalizer(ranges: NormStats, normalization: Normalization) -> Normalizer:
    """Return the normalizer of the actions or states of a data set.

    Args:
        ranges: statistics of the data set.
        normalization: the kind of these statistics.
    """
    first, second = (torch.tensor(numbers, dtype=torch.float64) for numbers in (ranges.first, ranges.second))
    if normalization is Normalization.zscore:
        return Normalizer(first, second + EPSILON)
    half_width = 0.5 * (second - first + EPSILON)
    return Normalizer(first + half_width, half_width)
