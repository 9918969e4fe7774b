"""Noise, blur, compression of images, or loss of some, as of a poor camera or line."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.perturb.kinds import Perturbation, generator, level_of
from embodyrl.seeding import derive_seed

Images = NDArray[np.uint8]
Floats = NDArray[np.float32]

VARIANTS = ("grain", "blur", "motion", "compression", "dropout")
"""What an episode may have; one is drawn for it."""

GRAIN = (8.0, 16.0, 26.0, 38.0, 52.0)
"""Standard deviation of normal noise, of 255."""
BLUR = (0.8, 1.3, 1.9, 2.6, 3.5)
"""Standard deviation of a normal blur [256ths of the height]."""
MOTION = (4.0, 6.0, 9.0, 13.0, 18.0)
"""Length of a streak [256ths of the height]."""
COARSENESS = (1.0, 2.0, 4.0, 7.0, 12.0)
"""Factor of the steps in which compression rounds, see `STEPS`."""
LOSS = (0.10, 0.20, 0.35, 0.50, 0.70)
"""Share of one camera's images that are black."""

STEPS = np.array(
    [
        *((16, 11, 10, 16, 24, 40, 51, 61), (12, 12, 14, 19, 26, 58, 60, 55), (14, 13, 16, 24, 40, 57, 69, 56)),
        *((14, 17, 22, 29, 51, 87, 80, 62), (18, 22, 37, 56, 68, 109, 103, 77), (24, 35, 55, 64, 81, 104, 113, 92)),
        *((49, 64, 78, 87, 103, 121, 120, 101), (72, 92, 95, 98, 112, 100, 103, 99)),
    ],
    np.float32,
)
"""Steps in which the frequencies of a block of 8 x 8 pixels are rounded: the example for brightness in Annex K of the
JPEG standard (ITU-T T.81)."""


class ImageNoise:
    """Noise in the images of one episode.

    Args:
        seed: of the episode.
        level: 1 .. 5.
    """

    def __init__(self, seed: int, level: int) -> None:
        random = generator(seed, "noise")
        self.variant = VARIANTS[int(random.integers(len(VARIANTS)))]
        """One of `VARIANTS`."""
        self._angle = float(random.uniform(0.0, math.pi))
        self._lost = int(random.integers(2**31))
        self._seed, self._level = seed, level

    @classmethod
    def of(cls, seed: int, perturb: Perturbation) -> ImageNoise | None:
        """Return the noise of an episode; None without."""
        level = level_of(perturb, "noise")
        return cls(seed, level) if level else None

    def apply(self, images: Images, step: int) -> Images:
        """Return the images `[V, H, W, 3]` after so many control steps of the episode, with noise, as a new array."""
        number, scale = self._level - 1, images.shape[1] / 256.0
        if self.variant == "dropout":
            return self._without(images, step)
        if self.variant == "grain":
            random = self._of_step(step)
            noise = random.standard_normal(images.shape, np.float32)
            return _rounded(images + GRAIN[number] * noise)
        if self.variant == "blur":
            return _rounded(blurred(images.astype(np.float32), BLUR[number] * scale))
        if self.variant == "motion":
            return _rounded(streaked(images.astype(np.float32), MOTION[number] * scale, self._angle))
        return _rounded(compressed(images.astype(np.float32), COARSENESS[number]))

    def _of_step(self, step: int) -> np.random.Generator:
        return np.random.default_rng(derive_seed(self._seed, "perturb/noise", step))

    def _without(self, images: Images, step: int) -> Images:
        left = images.copy()
        if self._of_step(step).random() < LOSS[self._level - 1]:
            left[self._lost % len(images)] = 0
        return left


def _rounded(images: Floats) -> Images:
    return np.clip(np.rint(images), 0, 255).astype(np.uint8)


def blurred(images: Floats, sigma: float) -> Floats:
    """Blur `[V, H, W, 3]` with a normal distribution of standard deviation `sigma` [pixels]; edges are repeated."""
    reach = max(1, math.ceil(2.5 * sigma))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / max(sigma, 1e-6)) ** 2)
    for axis in (1, 2):
        images = _weighted(images, weights / weights.sum(), axis, reach)
    return images


def _weighted(images: Floats, weights: NDArray[np.float64], axis: int, reach: int) -> Floats:
    """Return the weighted mean of neighbours along an axis."""
    size = images.shape[axis]
    padded = np.pad(images, [(reach, reach) if number == axis else (0, 0) for number in range(4)], mode="edge")
    parts = (padded.take(range(shift, shift + size), axis) for shift in range(2 * reach + 1))
    total = np.zeros_like(images)
    for weight, part in zip(weights.astype(np.float32), parts, strict=True):
        total += weight * part
    return total


def streaked(images: Floats, length: float, angle: float) -> Floats:
    """Return the mean of `[V, H, W, 3]` along a streak of so many pixels; edges are repeated."""
    weights = _streak(length, angle)
    reach, (height, width) = len(weights) // 2, images.shape[1:3]
    padded = np.pad(images, [(0, 0), (reach, reach), (reach, reach), (0, 0)], mode="edge")
    total = np.zeros_like(images)
    for down, right in np.argwhere(weights).tolist():
        total += weights[down, right] * padded[:, down : down + height, right : right + width]
    return total


SAMPLES = 64
"""Points of a streak, each shared by the four pixels around it."""


def _streak(length: float, angle: float) -> Floats:
    """Return the weights of the pixels of a streak around its middle, `[2 R + 1, 2 R + 1]`."""
    reach = math.ceil(length / 2) + 1
    weights = np.zeros((2 * reach + 1, 2 * reach + 1))
    along = np.linspace(-0.5, 0.5, SAMPLES) * length
    for point in np.stack([along * math.sin(angle), along * math.cos(angle)], 1) + reach:
        (row, column), (down, right) = point.astype(int), point % 1.0
        shares = np.outer((1.0 - down, down), (1.0 - right, right))
        weights[row : row + 2, column : column + 2] += shares / SAMPLES
    return weights.astype(np.float32)


def _cosines() -> Floats:
    """Return the matrix of the discrete cosine transform of 8 values, `[8, 8]`."""
    rows = np.arange(8)[:, None]
    matrix = np.cos(math.pi * (2 * np.arange(8)[None] + 1) * rows / 16) * 0.5
    matrix[0] *= math.sqrt(0.5)
    return matrix.astype(np.float32)


COSINES = _cosines()


def compressed(images: Floats, coarseness: float) -> Floats:
    """Round the frequencies of every block of 8 x 8 pixels of `[V, H, W, 3]`, in steps of `coarseness * STEPS`, as JPEG
    does."""
    views, height, width, channels = images.shape
    padded = np.pad(images, [(0, 0), (0, -height % 8), (0, -width % 8), (0, 0)], mode="edge") - np.float32(128)
    tall, wide = padded.shape[1] // 8, padded.shape[2] // 8
    blocks = padded.reshape(views, tall, 8, wide, 8, channels).transpose(0, 1, 3, 5, 2, 4)
    steps = np.float32(coarseness) * STEPS
    waves = np.rint(COSINES @ blocks @ COSINES.T / steps) * steps
    whole: Floats = (COSINES.T @ waves @ COSINES).transpose(0, 1, 4, 2, 5, 3).reshape(padded.shape)
    found: Floats = whole[:, :height, :width] + np.float32(128)
    return found
