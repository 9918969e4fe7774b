"""Resizing: averages of areas, checked by hand and against a direct computation."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from embodyrl.envs.images import resize


def grey(rows: list[list[int]]) -> NDArray[np.uint8]:
    """A grey image `[H, W, 3]`."""
    return np.repeat(np.array(rows, np.uint8)[:, :, None], 3, axis=2)


def test_whole_blocks_are_averaged_and_halves_rounded_up() -> None:
    image = grey([[0, 10, 1, 2], [20, 30, 3, 4]])
    assert np.array_equal(resize(image, 1, 2), grey([[15, 3]]))  # 60 / 4, and 10 / 4 = 2.5


def test_pixels_that_are_cut_count_by_their_share() -> None:
    # three pixels to two: each new one is 1.5 wide, so (0 + 30 / 2) / 1.5 = 10 and (30 / 2 + 90) / 1.5 = 70
    assert np.array_equal(resize(grey([[0, 30, 90]]), 1, 2), grey([[10, 70]]))


def test_a_larger_image_repeats_pixels() -> None:
    assert np.array_equal(resize(grey([[1, 9]]), 2, 4), grey([[1, 1, 9, 9]] * 2))


def test_the_same_size_is_the_same_image() -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    assert np.array_equal(resize(image, 5, 7), image)


@pytest.mark.parametrize("size", [(3, 2), (7, 5), (13, 4), (1, 1)])
def test_against_fractions(size: tuple[int, int]) -> None:
    image = np.random.default_rng(1).integers(0, 256, (8, 6, 3), np.uint8)

    def shares(old: int, new: int) -> list[list[Fraction]]:
        """How much of old pixel j lies in new pixel i, in old pixels."""
        edges = [Fraction(i * old, new) for i in range(new + 1)]
        return [[max(Fraction(0), min(edges[i + 1], j + 1) - max(edges[i], j)) for j in range(old)] for i in range(new)]

    down, across = shares(8, size[0]), shares(6, size[1])
    area = Fraction(8, size[0]) * Fraction(6, size[1])
    resized = resize(image, *size)
    for i, j in np.ndindex(*size):
        total = sum(down[i][y] * across[j][x] * int(image[y, x, 1]) for y in range(8) for x in range(6))
        assert resized[i, j, 1] == int(total / area + Fraction(1, 2))


def test_the_largest_sums_fit() -> None:
    white = np.full((1080, 1920, 3), 255, np.uint8)
    assert (resize(white, 224, 224) == 255).all()
