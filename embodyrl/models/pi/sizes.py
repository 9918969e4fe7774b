"""The shape of a Gemma transformer. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GemmaSizes:
    """Shape of a transformer."""

    width: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
