"""Random shifts of images, Yarats et al. (2021), "Image augmentation is all you need", arXiv:2004.13649: what critics
and policy learn from a few images then does not depend on single pixels.

Shapes: `M` decisions, `V` images of a moment, `p` pixels of the largest shift.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_shifts(count: int, pixels: int, generator: torch.Generator) -> Tensor:
    """Draw a shift for each of `count` moments, int64 `[count, 2]`: rows and columns, each in 0 .. 2 `pixels`.

    Args:
        count: `M`.
        pixels: `p`.
        generator: on the device of the images.
    """
    return torch.randint(2 * pixels + 1, (count, 2), generator=generator, device=generator.device)


def shifted(images: Tensor, shifts: Tensor, pixels: int) -> Tensor:
    """Return images `[M, V, H, W, 3]` of the same type, those of each moment shifted together; edges are repeated.

    On bytes, before they become floats, this costs a quarter.

    Args:
        images: `[M, V, H, W, 3]`.
        shifts: `[M, 2]`, see `draw_shifts`; `p` leaves an image where it is.
        pixels: `p`.
    """
    count, cameras, height, width, colours = images.shape
    inside = slice(pixels, pixels + height), slice(pixels, pixels + width)
    padded = images.new_empty(count, cameras, height + 2 * pixels, width + 2 * pixels, colours)
    padded[:, :, inside[0], inside[1]] = images
    padded[:, :, inside[0], : inside[1].start] = images[:, :, :, :1]
    padded[:, :, inside[0], inside[1].stop :] = images[:, :, :, -1:]
    padded[:, :, : inside[0].start] = padded[:, :, inside[0].start :][:, :, :1]
    padded[:, :, inside[0].stop :] = padded[:, :, : inside[0].stop][:, :, -1:]
    # All windows without a copy, [M, 2p+1, 2p+1, V, H, W, 3], of which each moment takes one.
    windows = padded.unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 5, 6, 4)
    return windows[torch.arange(count, device=images.device), shifts[:, 0], shifts[:, 1]]
