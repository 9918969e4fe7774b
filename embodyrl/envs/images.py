"""Resizing of images, and the time that a simulator process spends on rendering."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

_rendering_s = 0.0


@contextmanager
def timed_rendering() -> Iterator[None]:
    """Count the seconds of the block as rendering; blocks are not nested.

    `SlotSimulator` and ManiSkill's batch use it. Any other simulator writes

        with timed_rendering():
            images = ...

    around its rendering, which otherwise counts as physics.
    """
    global _rendering_s
    start = time.perf_counter()
    try:
        yield
    finally:
        _rendering_s += time.perf_counter() - start


def rendering_seconds() -> float:
    """Return the seconds that this process has spent on rendering so far."""
    return _rendering_s


def resize(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resize `image [H, W, 3]` to `[height, width, 3]` by area averaging.

    Every new pixel is the average of the area that it covers in the old image, rounded to the nearest value. Areas are
    integers, so the result does not depend on a processor's floating-point arithmetic.
    """
    if image.shape[:2] == (height, width):
        return image
    rows = _sums(image.astype(np.int64), height)
    sums = _sums(rows.swapaxes(0, 1), width).swapaxes(0, 1)
    area = image.shape[0] * image.shape[1]
    averages: NDArray[np.uint8] = ((2 * sums + area) // (2 * area)).astype(np.uint8)
    return averages


def _sums(values: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Return the sums over `parts` equal parts of the first axis, times `parts`. A value on the border of two parts
    counts for each by its share."""
    length = len(values)
    whole, share = np.divmod(np.arange(parts + 1) * length, parts)  # borders of the parts: at a value, or inside one
    before = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
    cut = values[np.minimum(whole, length - 1)]  # the end cuts nothing: its share is 0
    return np.diff(parts * before[whole] + share[:, None, None] * cut, axis=0)
