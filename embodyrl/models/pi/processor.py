"""From what a simulator shows to what the network takes, and back: images and normalised numbers."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from embodyrl.models.pi.checkpoint import NormStats
from embodyrl.models.pi.config import Normalization
from embodyrl.models.vla.processor import Normalizer

EPSILON = 1e-6
"""Added to widths, as in public code."""


def letterbox(image: Image.Image, side: int) -> Image.Image:
    """The image in the middle of a black square of `side` pixels."""
    if image.size == (side, side):
        return image
    ratio = max(image.size) / side
    width, height = (int(length / ratio) for length in image.size)
    square = Image.new("RGB", (side, side))
    square.paste(image.resize((width, height), Image.Resampling.BILINEAR), ((side - width) // 2, (side - height) // 2))
    return square


def pixel_values(images: Tensor, side: int, device: torch.device) -> Tensor:
    """Images `[B, V, 3, side, side]` in [-1, 1], float32, of `images [B, V, H, W, 3]` in uint8."""
    flat = images.flatten(0, 1)
    if flat.shape[1:3] != (side, side):
        resized = [np.asarray(letterbox(Image.fromarray(image), side)) for image in flat.cpu().numpy()]
        flat = torch.from_numpy(np.stack(resized))
    numbers = flat.to(device).permute(0, 3, 1, 2).float() / 255.0 * 2.0 - 1.0
    return torch.unflatten(numbers, 0, images.shape[:2])


def normalizer(ranges: NormStats, normalization: Normalization) -> Normalizer:
    """Return what maps the numbers of one data set, actions or states, to about [-1, 1].

    Args:
        ranges: of the data set.
        normalization: what their numbers are.
    """
    first, second = (torch.tensor(numbers, dtype=torch.float64) for numbers in (ranges.first, ranges.second))
    if normalization is Normalization.zscore:
        return Normalizer(first, second + EPSILON)
    half_width = 0.5 * (second - first + EPSILON)
    return Normalizer(first + half_width, half_width)
