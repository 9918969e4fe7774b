"""Layers that the language models and action experts of pi0 and SmolVLA share.

Shapes: `B` samples, `L` tokens, `M` tokens before them, `E` width of a token, `h` heads, `d` width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.vla.config import StackSizes

KeysValues = tuple[Tensor, Tensor]
"""Rotated keys and values of a layer, `[B, h_kv, L, d]` each."""
Rotation = Callable[[Tensor], Tensor]
"""Adds positions to queries or keys `[B, h, L, d]`."""


def project(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear layer to `x` in the type of its weights: with weights in 16 bits some layers keep 32."""
    # Autocast, which tensors without data do not have, chooses a type itself.
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        x = x.to(layer.weight.dtype)
    projected: Tensor = layer(x)
    return projected


def joined(before: KeysValues, after: KeysValues) -> KeysValues:
    """Return the keys and values of tokens that follow each other."""
    keys, values = (torch.cat(pair, dim=2) for pair in zip(before, after, strict=True))
    return keys, values


def stacked(mask: Tensor, heads: int) -> Tensor:
    """Repeat a mask `[B, 1, L or 1, M+L]` for `heads` heads that are stacked along the query dimension:
    `[B, 1, heads*L or 1, M+L]`."""
    return mask if mask.shape[2] == 1 else mask.repeat(1, 1, heads, 1)


class Attention(nn.Module):
    """Grouped-query attention.

    Args:
        sizes: of the stack.
        crosses: keys and values are made from another stack's, not from the tokens.
    """

    def __init__(self, sizes: StackSizes, *, crosses: bool = False) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        kept = sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, sizes.heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(kept if crosses else sizes.width, kept, bias=False)
        self.v_proj = nn.Linear(kept if crosses else sizes.width, kept, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.width, bias=False)

    def split(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Project `[B, L, ..]` and split it into heads `[B, h, L, d]`."""
        return torch.unflatten(project(layer, x), -1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, x: Tensor, rotation: Rotation) -> KeysValues:
        """Return keys and values of `x [B, L, E]`."""
        return rotation(self.split(self.k_proj, x)), self.split(self.v_proj, x)

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return queries of `x [B, L, E]`."""
        return rotation(self.split(self.q_proj, x))

    def forward(self, queries: Tensor, seen: KeysValues, mask: Tensor) -> Tensor:
        """Attend from queries `[B, h, L, d]` to keys and values, as `mask` allows: `[B, L, E]`.

        Args:
            queries: from `queries`.
            seen: keys and values of `M` tokens before theirs, and of their own.
            mask: bool `[B, 1, h/h_kv*L or 1, M+L]`, True where a token may attend; see `stacked`.
        """
        keys, values = seen
        # Heads that share keys are stacked along the query dimension, so that keys need not be repeated.
        below = queries.reshape(len(queries), keys.shape[1], -1, self.head_dim)
        attended = functional.scaled_dot_product_attention(
            below.to(values.dtype), keys.to(values.dtype), values, attn_mask=mask
        )
        return project(self.o_proj, attended.reshape(queries.shape).transpose(1, 2).flatten(2))


def positions_of(mask: Tensor) -> Tensor:
    """Return positions `[B, L]`, not counting padding."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


class KeyValueCache:
    """Keys and values of every layer for a number of positions that is known before; a language model of transformers
    takes it for its cache.

    transformers' dynamic cache uploads empty tensors and copies all keys for each token; its static cache attends to
    positions that are not written yet.

    Args:
        positions: the most positions that are written.
    """

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._layers: dict[int, _Layer] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values `[B, h, L, d]` of a layer, and return all that it has."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = _Layer(key_states, value_states, self._positions)
        return self._layers[layer_idx].append(key_states, value_states)


class _Layer:
    """Keys and values `[B, h, positions, d]`, of which the first are written."""

    def __init__(self, keys: Tensor, values: Tensor, positions: int) -> None:
        self._memory = [each.new_empty(*each.shape[:2], positions, each.shape[3]) for each in (keys, values)]
        self._written = 0

    def append(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        begin, self._written = self._written, self._written + given[0].shape[2]
        for memory, part in zip(self._memory, given, strict=True):
            memory[:, :, begin : self._written] = part
        keys, values = (memory[:, :, : self._written] for memory in self._memory)
        return keys, values


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, sizes: StackSizes, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(sizes.width, sizes.mlp, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.mlp, bias=False)
        self.down_proj = nn.Linear(sizes.mlp, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, L, E]` to `[B, L, E]`."""
        return project(self.down_proj, self.activation(project(self.gate_proj, x)) * project(self.up_proj, x))


def time_embedding(time: Tensor, width: int, shortest: float = 0.004, longest: float = 4.0) -> Tensor:
    """Return sines and cosines `[B, width]` of times `[B]`, with periods from the shortest to the longest.

    Computed in float64: the angle of the shortest period is 1571 * time, of which float32 keeps four digits.
    """
    shares = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    angles = (2.0 * math.pi / (shortest * (longest / shortest) ** shares)) * time.double().unsqueeze(1)
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(time.dtype)
