"""From the observations of an episode to one vector. Shapes: `F` frames in time, `E` numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from embodyrl.seeding import derive_seed

SMALL = 8
"""Pictures are averaged down to this many pixels each way."""


def random_projection(images: Tensor | None, proprio: Tensor | None, *, dim: int) -> Tensor:
    """Gaussian random projection, which keeps distances (Johnson and Lindenstrauss 1984); the same in every run.

    Args:
        images: uint8 `[F, V, H, W, 3]` or None. proprio: float32 `[F, S]` or None. dim: `E`.

    Returns:
        float32 `[E]` on the CPU.
    """
    parts = []
    if proprio is not None:
        parts.append(proprio.flatten())
    if images is not None:
        pictures = images.flatten(0, 1).permute(0, 3, 1, 2).float() / 255.0
        parts.append(adaptive_avg_pool2d(pictures, SMALL).flatten())
    features = torch.cat(parts).cpu()
    generator = torch.Generator().manual_seed(derive_seed(0, "projection", len(features)))
    return torch.randn(dim, len(features), generator=generator) @ features / len(features) ** 0.5
