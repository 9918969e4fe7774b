"""Codes of FAST as actions, on the policy's device, without the host.

Shapes: `B` samples, `T` codes, `H` actions of the horizon, `A` numbers of an action, `L` bytes of the text.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.pi0_fast.fast import FastTokenizer, dct_matrix

REPLACEMENT = 0xFFFD
"""Code point that stands for bytes that are no text."""


class ActionCodes(nn.Module):
    """Decodes the codes of chunks.

    Args:
        fast: the tokenizer.
        horizon: `H`.
        width: `A`.
    """

    texts: Tensor
    lengths: Tensor
    inverse: Tensor

    def __init__(self, fast: FastTokenizer, horizon: int, width: int) -> None:
        super().__init__()
        self.fast, self.horizon, self.width = fast, horizon, width
        lengths = np.array([len(text) for text in fast.texts])
        texts = np.zeros((len(lengths), max(1, lengths.max(initial=1))), np.int64)
        for number, text in enumerate(fast.texts):
            texts[number, : len(text)] = list(text)
        inverse = torch.from_numpy(dct_matrix(horizon).T.copy()) / fast.scale
        for name, numbers in (("texts", texts), ("lengths", lengths)):
            self.register_buffer(name, torch.from_numpy(numbers), persistent=False)
        self.register_buffer("inverse", inverse, persistent=False)

    @property
    def numbers(self) -> int:
        """Coefficients of a chunk."""
        return self.horizon * self.width

    def forward(self, codes: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """Decode as public code does: codes that the tokenizer does not have are left out, missing coefficients are 0,
        further ones are cut off, and a negative code makes the whole chunk 0.

        Args:
            codes: `[B, T]`.
            there: bool `[B, T]`, which of them belong to the chunk.

        Returns:
            Normalised chunks, float32 `[B, H, A]`, and whether the codes are exactly those of a chunk, bool `[B]`.
        """
        known = there & (codes >= 0) & (codes < len(self.lengths))
        points, found = code_points(*self._bytes(codes, known))
        spoilt = (there & ~known).any(1) | (found & (points == REPLACEMENT)).any(1)
        whole = (found.sum(1) == self.numbers) & ~spoilt
        failed = (there & (codes < 0)).any(1)
        coefficients = first_of(points + self.fast.smallest, found & ~failed[:, None], self.numbers)
        by_frequency = torch.unflatten(coefficients.to(self.inverse.dtype), 1, (self.horizon, self.width))
        return torch.einsum("tf,bfa->bta", self.inverse, by_frequency).float(), whole

    def _bytes(self, codes: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes `[B, L]` of the texts of codes, one behind the other, and which of them are there."""
        index = codes.clamp(0, len(self.lengths) - 1)
        texts, places = self.texts[index], torch.arange(self.texts.shape[1], device=codes.device)
        inside = (places < self.lengths[index].unsqueeze(-1)) & known.unsqueeze(-1)
        inside = inside.flatten(1)
        total = inside.sum(1, keepdim=True)
        size = inside.shape[1]
        return first_of(texts.flatten(1), inside, size), torch.arange(size, device=codes.device) < total


def first_of(numbers: Tensor, chosen: Tensor, size: int) -> Tensor:
    """Return the first `size` chosen numbers of each row `[B, L]`, zeros behind them: `[B, size]`."""
    place = chosen.cumsum(1) - 1
    place = torch.where(chosen & (place < size), place, size)  # the last column is thrown away
    return numbers.new_zeros(len(numbers), size + 1).scatter(1, place, numbers)[:, :size]


def code_points(text: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Decode UTF-8; whatever is none becomes `REPLACEMENT`, in the pieces in which the Unicode standard (3.9, "maximal
    subparts") replaces it.

    Args:
        text: bytes `[B, L]`.
        there: bool `[B, L]`, False behind its end.

    Returns:
        Code points `[B, L]`, each at the place of its first byte, and which of these places have one.
    """
    text = torch.where(there, text, 0)
    second, third, fourth = (functional.pad(text, (0, ahead))[:, ahead:] for ahead in (1, 2, 3))
    follow = torch.full_like(text, -1)  # bytes that must follow; no character begins with others
    for low, high, count in ((0x00, 0x7F, 0), (0xC2, 0xDF, 1), (0xE0, 0xEF, 2), (0xF0, 0xF4, 3)):
        follow = torch.where((text >= low) & (text <= high), count, follow)
    least = torch.where(text == 0xE0, 0xA0, torch.where(text == 0xF0, 0x90, 0x80))
    most = torch.where(text == 0xED, 0x9F, torch.where(text == 0xF4, 0x8F, 0xBF))
    one = (follow >= 1) & (second >= least) & (second <= most)
    two = one & (follow >= 2) & (third >> 6 == 0b10)
    three = two & (follow >= 3) & (fourth >> 6 == 0b10)
    taken = one.long() + two.long() + three.long()
    parts = (
        text,
        (text & 0x1F) << 6 | second & 0x3F,
        (text & 0x0F) << 12 | (second & 0x3F) << 6 | third & 0x3F,
        (text & 0x07) << 18 | (second & 0x3F) << 12 | (third & 0x3F) << 6 | fourth & 0x3F,
    )
    points = torch.stack(parts).gather(0, follow.clamp(min=0).unsqueeze(0)).squeeze(0)
    inside = torch.zeros_like(there)
    for ahead, follows in ((1, one), (2, two), (3, three)):
        inside |= functional.pad(follows, (ahead, 0))[:, : text.shape[1]]
    return torch.where(taken == follow, points, REPLACEMENT), there & ~inside
