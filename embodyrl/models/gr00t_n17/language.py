"""The language model of both versions: the first layers of Qwen3, causal, in which padding gets zeros from attention.

Shapes: `B` samples, `L` tokens of a prompt, `E` width of a token, `d` width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.models.libraries import Qwen3Config, Qwen3Model
from embodyrl.models.vla.padding import ATTENTION

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, `[..., L, d]`."""


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Add rotary positions to queries or keys `[..., L, d]`."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


class LanguageModel(nn.Module):
    """The first layers of Qwen3.

    Args:
        text: arguments of transformers' Qwen3Config.
        layers: that are kept.
        final_norm: whether the last norm is applied; else it has weights that nothing uses.
    """

    def __init__(self, text: Mapping[str, Any], layers: int, *, final_norm: bool) -> None:
        super().__init__()
        options = {**text, "num_hidden_layers": layers, "attn_implementation": ATTENTION}
        model = Qwen3Model(Qwen3Config(**options))
        self.embed_tokens, self.layers, self.norm = model.embed_tokens, model.layers, model.norm
        self.applies_norm = final_norm

    def forward(self, tokens: Tensor, mask: Tensor, rotation: Rotation, added: Sequence[Tensor] = ()) -> Tensor:
        """Return output tokens `[B, L, E]`.

        Args:
            tokens: embedded ones `[B, L, E]`.
            mask: `[B, 1, L, L]`, see `causal_mask`.
            rotation: positions of the tokens, cosines and sines `[B, L, d]`.
            added: `[B, L, E]` each, added to the outputs of the first layers.
        """
        cosine, sine = (each.to(tokens.dtype) for each in rotation)
        for index, layer in enumerate(self.layers):
            tokens = layer(tokens, attention_mask=mask, position_embeddings=(cosine, sine))
            if index < len(added):
                tokens = tokens + added[index]
        return self.norm(tokens) if self.applies_norm else tokens
