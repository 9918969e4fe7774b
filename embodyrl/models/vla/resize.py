"""Resizing of images as PIL does it, to the bit, on any device, and as TensorFlow does it.

PIL (Resample.c) filters rows, rounds to bytes, then filters columns. Weights are float64, normalised, and rounded to 22
binary places. Here each pass is a product with a matrix of these weights: sums of less than 2^53 are exact in float64
in any order.

TensorFlow (tf.image.resize with antialias) filters columns, then rows, with the same weights in float32, and rounds
once, at the end. PIL also clips after its first pass: both differ by a grey level, and by more beside black and white.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_PLACES = 22
"""Binary places of PIL's weights for bytes."""


def resize(images: Tensor, size: tuple[int, int], filter: Image.Resampling) -> Tensor:
    """Resize `images [M, H, W, 3]` in uint8 to `[M, h, w, 3]`, `size` = (h, w); bilinear, bicubic or Lanczos.

    On the CPU PIL itself does it, which is faster there.
    """
    if images.shape[1:3] == size:
        return images
    if images.device.type != "cpu":
        return resize_by_products(images, size, filter)
    resized = [np.asarray(Image.fromarray(image).resize(size[::-1], filter)) for image in images.numpy()]
    return torch.from_numpy(np.stack(resized))


def resize_by_products(images: Tensor, size: tuple[int, int], filter: Image.Resampling) -> Tensor:
    """Do what `resize` does as matrix products, on any device."""
    for axis, length in ((2, size[1]), (1, size[0])):
        if images.shape[axis] != length:
            images = _filtered(images, axis, weights(images.shape[axis], length, filter, images.device))
    return images


def resize_as_tensorflow(images: Tensor, size: tuple[int, int], filter: Image.Resampling) -> Tensor:
    """Do what `tf.image.resize(..., antialias=True)` does, rounded to whole grey levels: half ones to even.

    Computed in float64, so that only sums within 1e-5 of a half can be rounded otherwise.

    Args:
        images: uint8 `[M, H, W, 3]`.
        size: height and width `(h, w)` of the result `[M, h, w, 3]`.
        filter: Lanczos is TensorFlow's `lanczos3`. Its `bicubic` has another kernel, and is refused.
    """
    if filter is Image.Resampling.BICUBIC:
        raise ValueError("TensorFlow's bicubic filter is another one than PIL's")
    if images.shape[1:3] == size:
        return images
    rows, columns = (
        normalized_weights(before, after, filter, images.device)
        for before, after in zip(images.shape[1:3], size, strict=True)
    )
    sums = torch.einsum("yh,mhwc->mywc", rows, images.double())
    sums = torch.einsum("xw,mywc->myxc", columns, sums)
    return sums.round().clamp(0, 255).to(torch.uint8)


def _filtered(images: Tensor, axis: int, matrix: Tensor) -> Tensor:
    sums = images.movedim(axis, -1).double() @ matrix.T
    rounded = ((sums + 2 ** (_PLACES - 1)) / 2**_PLACES).floor().clamp(0, 255)
    filtered: Tensor = rounded.to(torch.uint8).movedim(-1, axis).contiguous()
    return filtered


@functools.lru_cache(maxsize=32)
def weights(before: int, after: int, filter: Image.Resampling, device: torch.device) -> Tensor:
    """Return PIL's whole-number weights `[after, before]` in float64."""
    places = normalized_weights(before, after, filter, torch.device("cpu")) * 2**_PLACES
    return torch.trunc(places + torch.copysign(torch.tensor(0.5), places)).to(device)


@functools.lru_cache(maxsize=32)
def normalized_weights(before: int, after: int, filter: Image.Resampling, device: torch.device) -> Tensor:
    """Return weights `[after, before]` in float64; each row adds up to 1."""
    support, kernel = _KERNELS[filter]
    scale = before / after
    stretch = max(scale, 1.0)
    rows = torch.zeros(after, before, dtype=torch.float64)
    for index in range(after):
        centre = (index + 0.5) * scale
        first = max(int(centre - support * stretch + 0.5), 0)
        last = min(int(centre + support * stretch + 0.5), before)
        factors = [kernel((source - centre + 0.5) * (1.0 / stretch)) for source in range(first, last)]
        total = sum(factors)
        rows[index, first:last] = torch.tensor([factor * (1.0 / total) for factor in factors], dtype=torch.float64)
    return rows.to(device)


def _triangle(x: float) -> float:
    return max(1.0 - abs(x), 0.0)


def _cubic(x: float) -> float:
    """The cubic convolution of Keys (1981) with a = -0.5."""
    x, a = abs(x), -0.5
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2.0 else 0.0


def _lanczos(x: float) -> float:
    return _sinc(x) * _sinc(x / 3) if -3.0 <= x < 3.0 else 0.0


def _sinc(x: float) -> float:
    return 1.0 if x == 0.0 else math.sin(x * math.pi) / (x * math.pi)


_KERNELS = {
    Image.Resampling.BILINEAR: (1.0, _triangle),
    Image.Resampling.BICUBIC: (2.0, _cubic),
    Image.Resampling.LANCZOS: (3.0, _lanczos),
}
"""Half of each filter's width in pixels of the smaller image, and the filter."""
