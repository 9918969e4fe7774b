"""The transformer of both experts: Gemma (Gemma Team, 2024), whose layers may look at the keys and values of another.

Shapes: `B` samples, `L` tokens, `M` tokens of the memory, `E` width, `h` heads, `d` width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.pi.sizes import GemmaSizes

KeysValues = tuple[Tensor, Tensor]
"""Rotated keys and values of a layer, `[B, h_kv, L, d]` each."""


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32, with weights around 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Normalised `x`, and what to multiply the branch with that it begins."""
        return (normalized(x) * (1.0 + self.weight.float())).to(x.dtype), 1.0


class AdaptiveRMSNorm(nn.Module):
    """The same with scale, shift and gate that depend on a condition `[B, E]`, here the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Normalised `x`, and what to multiply the branch with that it begins."""
        scale, shift, gate = self.dense(condition).unsqueeze(1).chunk(3, dim=-1)
        return (normalized(x) * (1.0 + scale.float()) + shift.float()).to(x.dtype), gate


def normalized(x: Tensor) -> Tensor:
    """`x` with a root mean square of 1 along the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Rotation:
    """Rotary position embedding of positions `[B, L]`; halves of a head make pairs."""

    def __init__(self, positions: Tensor, head_dim: int, dtype: torch.dtype) -> None:
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        angles = positions.float().unsqueeze(-1) * (1.0 / 10_000.0**exponents)
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `[B, h, L, d]`."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin


def stacked(mask: Tensor, heads: int) -> Tensor:
    """The mask `[B, 1, heads*L or 1, M+L]` of `heads` heads that stand one below the other, of that of each
    `[B, 1, L or 1, M+L]`."""
    return mask if mask.shape[2] == 1 else mask.repeat(1, 1, heads, 1)


class Attention(nn.Module):
    """Attention of heads that share keys and values in groups."""

    def __init__(self, sizes: GemmaSizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, sizes.heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(sizes.width, sizes.kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(sizes.width, sizes.kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.width, bias=False)

    def forward(
        self, x: Tensor, mask: Tensor, rotation: Rotation, memory: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        """Attend to what `mask` allows, the memory first; also returns keys and values of `x`.

        Args:
            x: `[B, L, E]`.
            mask: bool `[B, 1, h/h_kv*L or 1, M+L]`, see `stacked`.
            rotation: of the positions of `x`.
            memory: keys and values that stand before.
        """
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        own = rotation(keys), values
        if memory is None:
            keys, values = own
        else:
            keys, values = (torch.cat([before, here], dim=2) for before, here in zip(memory, own, strict=True))
        # Heads that share keys stand one below the other, as if they were more queries: keys need no copies.
        below = rotation(queries).reshape(len(x), keys.shape[1], -1, self.head_dim)
        attended = functional.scaled_dot_product_attention(below, keys, values, attn_mask=mask)
        return self.o_proj(attended.reshape(queries.shape).transpose(1, 2).flatten(2)), own


class MLP(nn.Module):
    """Feed-forward layer with a gate."""

    def __init__(self, sizes: GemmaSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.mlp, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.mlp, bias=False)
        self.down_proj = nn.Linear(sizes.mlp, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, L, E]` of `[B, L, E]`."""
        projected: Tensor = self.down_proj(functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        return projected


class Layer(nn.Module):
    """Attention and feed-forward layer."""

    def __init__(self, sizes: GemmaSizes, norm: type[RMSNorm | AdaptiveRMSNorm]) -> None:
        super().__init__()
        self.input_layernorm = norm(sizes.width)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = norm(sizes.width)
        self.mlp = MLP(sizes)

    def forward(
        self, x: Tensor, mask: Tensor, rotation: Rotation, memory: KeysValues | None, condition: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        """The next `x`, and keys and values of this one."""
        normed, gate = self.input_layernorm(x, condition)
        attended, keys_values = self.self_attn(normed, mask, rotation, memory)
        x = x + attended * gate
        normed, gate = self.post_attention_layernorm(x, condition)
        return x + self.mlp(normed) * gate, keys_values


class Gemma(nn.Module):
    """Layers and a last norm.

    Args:
        sizes: its shape.
        adaptive: norms depend on a condition.
    """

    def __init__(self, sizes: GemmaSizes, *, adaptive: bool = False) -> None:
        super().__init__()
        norm: type[RMSNorm | AdaptiveRMSNorm] = AdaptiveRMSNorm if adaptive else RMSNorm
        self.sizes = sizes
        self.layers = nn.ModuleList([Layer(sizes, norm) for _ in range(sizes.layers)])
        self.norm = norm(sizes.width)

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        positions: Tensor,
        memory: list[KeysValues] | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """Hidden states `[B, L, E]`, and keys and values of every layer.

        Args:
            x: embeddings `[B, L, E]`.
            mask: bool, what each token may look at, `[B, 1, L or 1, M+L]`.
            positions: `[B, L]`.
            memory: of each layer, keys and values of `M` tokens that stand before.
            condition: `[B, E]`.
        """
        rotation = Rotation(positions, self.sizes.head_dim, x.dtype)
        mask = stacked(mask, self.sizes.heads // self.sizes.kv_heads)  # once for all layers
        keys_values = []
        for number, layer in enumerate(self.layers):
            x, own = layer(x, mask, rotation, None if memory is None else memory[number], condition)
            keys_values.append(own)
        return self.norm(x, condition)[0], keys_values
