"""Resizing on the device against PIL."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from embodyrl.models.vla.resize import resize, resize_by_products

FILTERS = [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS]
SIZES = [
    ((256, 256), (224, 224)),
    ((128, 128), (224, 224)),
    ((480, 640), (168, 224)),
    ((48, 48), (32, 32)),
    ((7, 13), (32, 5)),
    ((33, 33), (33, 20)),
    ((1, 3), (4, 4)),
]


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize(("before", "after"), SIZES)
def test_equals_pil_to_the_bit(before: tuple[int, int], after: tuple[int, int], filter: Image.Resampling) -> None:
    """On noise, and on black and white pixels, where filters overshoot the range of a byte."""
    draw = np.random.default_rng(sum(before))
    noise = draw.integers(0, 256, (*before, 3), dtype=np.uint8)
    images = np.stack([noise, np.where(noise < 128, 0, 255).astype(np.uint8)])
    expected = [np.asarray(Image.fromarray(image).resize(after[::-1], filter)) for image in images]
    for resized in (resize, resize_by_products):
        assert np.array_equal(resized(torch.from_numpy(images), after, filter).numpy(), np.stack(expected))
