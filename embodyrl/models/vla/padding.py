"""Attention of language models in which padding gets zeros: where an action head attends to padding, these zeros reach
the actions.

Shapes: `B` samples, `L` tokens, `h` heads, `E` width of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.models.libraries import AttentionInterface


def causal_mask(valid: Tensor) -> Tensor:
    """Return the causal attention mask `[B, 1, L, L]`, without padding (`valid [B, L]` is False).

    Rows of padding are all False, and their attention output is zero (`padded_attention`). Public code runs with
    FlashAttention, which outputs zeros for padding. Since the action head attends to padding, these zeros reach the
    actions.
    """
    length = valid.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()
    return before & valid[:, None, :, None] & valid[:, None, None, :]


def padded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers: `[B, L, h, E/h]` of queries `[B, h, L, E/h]`, zeros for fully masked rows.

    Kernels differ on fully masked rows, and gradients of some are NaN (cuDNN's in bfloat16 at lengths of 64, 192, ..:
    github.com/pytorch/pytorch/issues/196678). Such a row therefore attends to everything, and its result is replaced
    by zeros.
    """
    looks = attention_mask.any(dim=-1, keepdim=True)
    interface: Any = AttentionInterface  # untyped
    attend = interface()["sdpa"]
    seen, _ = attend(module, query, key, value, attention_mask | ~looks, **options)
    return seen.masked_fill(~looks.transpose(1, 2), 0.0), None


ATTENTION = "padded_sdpa"
"""Name of `padded_attention` in transformers."""
AttentionInterface.register(ATTENTION, padded_attention)
