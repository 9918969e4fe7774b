"""Noise in images: each variant disturbs more with the level, and is the same for the same episode and step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from embodyrl.envs.perturb.noise import VARIANTS, ImageNoise

SEEDS = {ImageNoise(seed, 1).variant: seed for seed in range(60)}
"""A seed for each variant."""


def images(size: int = 64) -> np.ndarray:
    """Two views of a scene with edges: discs on a gradient, `[2, size, size, 3]`."""
    rows, columns = np.mgrid[:size, :size]
    scene = np.stack([rows * 3, columns * 3, 255 - rows * 2], -1) % 256
    scene[(rows - 20) ** 2 + (columns - 30) ** 2 < 150] = (200, 30, 40)
    return np.stack([scene, scene[::-1]]).astype(np.uint8)


def test_every_variant_is_drawn_for_some_episode() -> None:
    assert set(SEEDS) == set(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_noise_grows_with_the_level(variant: str) -> None:
    shown, sizes = images(), []
    for level in range(1, 6):
        noise = ImageNoise(SEEDS[variant], level)
        assert noise.variant == variant, "the level changes how strong, not what"
        seen = [noise.apply(shown, step) for step in range(40 if variant == "dropout" else 2)]
        assert all(each.shape == shown.shape and each.dtype == np.uint8 for each in seen)
        sizes.append(float(np.mean([np.abs(each.astype(int) - shown).mean() for each in seen])))
    assert all(low < high for low, high in itertools.pairwise(sizes)), sizes


@pytest.mark.parametrize("variant", VARIANTS)
def test_noise_follows_from_seed_level_and_step(variant: str) -> None:
    shown = images()
    before = shown.copy()
    once, again = (ImageNoise(SEEDS[variant], 5) for _ in range(2))
    for step in (0, 7):
        assert np.array_equal(once.apply(shown, step), again.apply(shown, step))
    assert np.array_equal(shown, before), "it is a copy"
    if variant == "grain":
        assert not np.array_equal(once.apply(shown, 0), once.apply(shown, 1))


def test_a_camera_that_is_lost_is_the_same_one_all_along() -> None:
    noise, shown = ImageNoise(SEEDS["dropout"], 5), np.full((3, 16, 16, 3), 9, np.uint8)
    black = np.array([(noise.apply(shown, step) == 0).all(axis=(1, 2, 3)) for step in range(40)])
    assert 15 < black.sum() < 40 and black.any(axis=0).sum() == 1


@pytest.mark.parametrize("size", [16, 33, 224])
def test_images_of_any_size(size: int) -> None:
    for seed in SEEDS.values():
        assert ImageNoise(seed, 5).apply(images(size), 1).shape == (2, size, size, 3)
