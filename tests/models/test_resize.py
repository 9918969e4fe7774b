"""Resizing on the device against PIL."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from embodyrl.models.vla.resize import resize, resize_as_tensorflow, resize_by_products

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


def test_lanczos3_of_tensorflow_is_rounded_once() -> None:
    """Against its kernel and weights written out. PIL, which rounds and clips between passes, agrees to a level where
    nothing is clipped; its bicubic filter does not."""

    def kernel(x: float) -> float:
        return (
            3 * np.sin(np.pi * x) * np.sin(np.pi * x / 3) / (np.pi * x) ** 2 if 1e-3 < abs(x) < 3 else float(abs(x) < 3)
        )

    def of_line(line: np.ndarray, after: int) -> np.ndarray:
        scale = len(line) / after
        stretch = max(scale, 1.0)
        factors = [[kernel((y + 0.5 - (x + 0.5) * scale) / stretch) for y in range(len(line))] for x in range(after)]
        return np.stack([np.tensordot(row, line, 1) / sum(row) for row in factors])

    draw, far = np.random.default_rng(0), np.zeros(2, dtype=int)
    for before, after in (((40, 40), (35, 35)), ((20, 9), (33, 33)), ((17, 60), (24, 16))):
        for low, high in ((0, 256), (100, 156)):
            image = draw.integers(low, high, (*before, 3), dtype=np.uint8)
            rows = of_line(image.astype(np.float64), after[0])
            exact = of_line(rows.transpose(1, 0, 2), after[1]).transpose(1, 0, 2)
            found = resize_as_tensorflow(torch.from_numpy(image)[None], after, Image.Resampling.LANCZOS)[0].numpy()
            np.testing.assert_array_equal(found, np.clip(np.round(exact), 0, 255).astype(np.uint8))
        pil = [Image.fromarray(image).resize(after[::-1], filter) for filter in reversed(FILTERS[1:])]
        far = np.maximum(far, [np.abs(found.astype(int) - np.asarray(other, dtype=int)).max() for other in pil])
    assert far[0] <= 1 and far[1] > 5
    with pytest.raises(ValueError, match="bicubic"):
        resize_as_tensorflow(torch.from_numpy(image)[None], (4, 4), Image.Resampling.BICUBIC)
