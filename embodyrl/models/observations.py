"""Whether an observation is what a model takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.models.errors import PolicyError


def check_images(images: Any, count: int) -> Tensor:
    """Pictures `[B, V, H, W, 3]` of an observation, as a tensor.

    Args:
        images: numpy array or tensor, or None.
        count: pictures per observation that the model takes.

    Raises:
        PolicyError: they are missing, or of another type, shape or number than the model takes.
    """
    if images is None:
        raise PolicyError("the model needs pictures, and the observation has none: set env.cameras")
    pictures = images if isinstance(images, Tensor) else torch.from_numpy(np.array(images))
    if pictures.dtype != torch.uint8:
        raise PolicyError(f"pictures must be uint8 (0 .. 255), got {str(pictures.dtype).removeprefix('torch.')}")
    if pictures.dim() != 5 or pictures.shape[-1] != 3:
        raise PolicyError(f"pictures must have shape [B, V, H, W, 3], got {list(pictures.shape)}")
    if pictures.shape[1] != count:
        raise PolicyError(f"the model takes {count} picture(s) per observation, got {pictures.shape[1]}")
    return pictures
