"""Preprocessing of images, and of states that prompts contain."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from embodyrl.models.vla.processor import Normalizer, read_state
from embodyrl.models.vla.resize import resize


def letterbox(images: Tensor, side: int) -> Tensor:
    """Resize `images [M, H, W, 3]` in uint8 to fit a black square, centred: `[M, side, side, 3]`."""
    ratio = max(images.shape[1:3]) / side
    height, width = (int(length / ratio) for length in images.shape[1:3])
    resized = resize(images, (height, width), Image.Resampling.BILINEAR)
    left, top = (side - width) // 2, (side - height) // 2
    return functional.pad(resized, (0, 0, left, side - width - left, top, side - height - top))


def pixel_values(images: Tensor, side: int, device: torch.device) -> Tensor:
    """Convert `images [B, V, H, W, 3]` in uint8 to `[B, V, 3, side, side]` float32 in [-1, 1]."""
    flat = letterbox(images.flatten(0, 1).to(device), side)
    numbers = flat.permute(0, 3, 1, 2).float() / 255.0 * 2.0 - 1.0
    return torch.unflatten(numbers, 0, images.shape[:2])


class WrittenStates:
    """States as prompts contain them. Computed on the CPU, where tokenizers are, wherever the policy is: this is no
    module, so that its numbers stay where they were made.

    Args:
        ranges: normalizes them.
        width: numbers in a prompt; zeros follow the state.
    """

    def __init__(self, ranges: Normalizer, width: int) -> None:
        self._ranges, self._width = ranges, width

    def __call__(self, proprio: Tensor | None) -> list[NDArray[np.float32]]:
        """Return `B` normalised states `[width]`.

        Raises:
            PolicyError: the states are missing, or have another size.
        """
        state = self._ranges.normalize(read_state(proprio, len(self._ranges), self._ranges.origin.device))
        return [*functional.pad(state, (0, self._width - state.shape[1])).cpu().numpy()]
