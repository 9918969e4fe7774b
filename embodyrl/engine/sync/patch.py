"""Differences between two versions of the same bytes, small and exact."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

_LEVEL = 1


def make_patch(now: Tensor, before: Tensor, itemsize: int) -> bytes:
    """The bits that differ, compressed.

    First bytes of all numbers go in front, then second bytes, and so on: a small step of learning changes the lower
    ones, and the others are runs of zeros.

    Args:
        now, before: uint8 `[n]` on the CPU.
        itemsize: bytes of one number; n is a multiple.
    """
    planes = (now ^ before).view(-1, itemsize).t().contiguous()
    return zlib.compress(planes.numpy().data, _LEVEL)


def apply_patch(patch: bytes, before: Tensor, itemsize: int) -> Tensor:
    """`now`, from what `make_patch` made.

    Raises:
        zlib.error: the patch is damaged.
        ValueError: it is cut short, or for something of another size.
    """
    difference = bytearray(zlib.decompressobj().decompress(patch, len(before) + 1))
    if len(difference) != len(before):
        raise ValueError(f"a patch of {len(difference)} bytes for {len(before)}")
    planes = torch.from_numpy(np.frombuffer(difference, np.uint8)).view(itemsize, len(before) // itemsize)
    return planes.t().reshape(-1) ^ before
