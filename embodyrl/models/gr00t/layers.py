"""Parts of the action head: attention blocks, and small networks that every robot has of its own.

Parameter names are those of the public checkpoints. Shapes: `B` samples, `L` tokens, `M` other tokens that they
look at, `E` entries of a token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

Embodiment = int | Tensor
"""A robot's number, of all samples or of each one `[B]`."""
KeysValues = tuple[Tensor, Tensor]
"""Of tokens that others look at, `[B, h, M, E/h]` each, for `h` heads."""
MAX_PERIOD = 10000.0
"""Of the waves that tell the time. Angles reach a thousand, so that the order of operations decides the fifth digit; it
is that of the public code."""


def _range(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.float32, device=device)


class EmbodimentLinear(nn.Module):
    """A linear layer with weights of its own for every robot."""

    def __init__(self, embodiments: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(embodiments, inputs, outputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(embodiments, outputs))

    def forward(self, tokens: Tensor, embodiment: Embodiment) -> Tensor:
        """`[B, L, outputs]` of `[B, L, inputs]`."""
        return tokens @ self.W[embodiment] + self.b[embodiment].unsqueeze(-2)


class EmbodimentMLP(nn.Module):
    """Two such layers with ReLU between them."""

    def __init__(self, embodiments: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(embodiments, inputs, hidden)
        self.layer2 = EmbodimentLinear(embodiments, hidden, outputs)

    def forward(self, tokens: Tensor, embodiment: Embodiment) -> Tensor:
        """`[B, L, outputs]` of `[B, L, inputs]`."""
        hidden = functional.relu(self.layer1(tokens, embodiment))
        result: Tensor = self.layer2(hidden, embodiment)
        return result


class ActionEncoder(nn.Module):
    """Noisy actions and the time that they are at, as tokens."""

    def __init__(self, embodiments: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.W1 = EmbodimentLinear(embodiments, action_dim, width)
        self.W2 = EmbodimentLinear(embodiments, 2 * width, width)
        self.W3 = EmbodimentLinear(embodiments, width, width)

    def forward(self, actions: Tensor, bucket: Tensor, embodiment: Embodiment) -> Tensor:
        """Tokens `[B, H, E]` of actions `[B, H, D]` at times `bucket [B]`."""
        embedded = self.W1(actions, embodiment)
        half = embedded.shape[-1] // 2
        exponents = -_range(half, bucket.device) * (math.log(MAX_PERIOD) / half)
        angles = bucket.float().unsqueeze(-1) * exponents.exp()
        time = torch.cat([angles.sin(), angles.cos()], dim=-1).to(embedded.dtype)
        both = torch.cat([embedded, time.unsqueeze(1).expand_as(embedded)], dim=-1)
        result: Tensor = self.W3(functional.silu(self.W2(both, embodiment)), embodiment)
        return result


class TimestepEmbedder(nn.Module):
    """The time that actions are at, for the diffusion transformer."""

    FREQUENCIES = 128

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(2 * self.FREQUENCIES, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, bucket: Tensor) -> Tensor:
        """`[B, E]` of times `[B]`. Unlike in `ActionEncoder`, cosines come first and the last frequency is reached."""
        exponents = -math.log(MAX_PERIOD) * _range(self.FREQUENCIES, bucket.device) / (self.FREQUENCIES - 1)
        angles = bucket.float().unsqueeze(-1) * exponents.exp()
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.linear_1.weight.dtype)
        result: Tensor = self.linear_2(functional.silu(self.linear_1(waves)))
        return result


class Attention(nn.Module):
    """Multi-head attention, to the tokens themselves or to others."""

    def __init__(self, width: int, heads: int, context: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(context or width, width)
        self.to_v = nn.Linear(context or width, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(
        self, tokens: Tensor, context: Tensor | None = None, known: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """`[B, L, E]` of `[B, L, E]`, which look at `context [B, M, ...]` or at themselves, and keys and values of what
        they look at, which need not be computed where they are `known`."""
        seen = tokens if context is None else context
        key, value = known or (self._split(self.to_k(seen)), self._split(self.to_v(seen)))
        attended = functional.scaled_dot_product_attention(self._split(self.to_q(tokens)), key, value)
        return self.to_out[0](attended.transpose(1, 2).flatten(2)), (key, value)

    def _split(self, tokens: Tensor) -> Tensor:
        """`[B, h, L, E/h]` of `[B, L, E]`."""
        return tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class _GELUProjection(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.gelu(self.proj(tokens), approximate="tanh")


class FeedForward(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Between the two, public code has a layer without weights: dropout.
        self.net = nn.ModuleList([_GELUProjection(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width)])

    def forward(self, tokens: Tensor) -> Tensor:
        """`[..., E]` of `[..., E]`."""
        for layer in self.net:
            tokens = layer(tokens)
        return tokens


class AdaptiveLayerNorm(nn.Module):
    """A norm without weights of its own; the time scales and shifts what comes out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, tokens: Tensor, time: Tensor) -> Tensor:
        """`[B, L, E]` of `[B, L, E]` at times `time [B, E]`."""
        scale, shift = self.linear(functional.silu(time)).unsqueeze(1).chunk(2, dim=-1)
        return functional.layer_norm(tokens, tokens.shape[-1:], eps=1e-5) * (1 + scale) + shift


class SelfAttentionBlock(nn.Module):
    """A block of a plain transformer, in which every token looks at every token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-5)
        self.attn1 = Attention(width, heads)
        self.norm3 = nn.LayerNorm(width, eps=1e-5)
        self.ff = FeedForward(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[B, L, E]` of `[B, L, E]`."""
        tokens = tokens + self.attn1(self.norm1(tokens))[0]
        result: Tensor = tokens + self.ff(self.norm3(tokens))
        return result


class DiTBlock(nn.Module):
    """A block of the diffusion transformer; it looks at a context, or at its own tokens where `context` is None."""

    def __init__(self, width: int, heads: int, context: int | None) -> None:
        super().__init__()
        self.norm1 = AdaptiveLayerNorm(width)
        self.attn1 = Attention(width, heads, context)
        self.ff = FeedForward(width)

    def forward(
        self, tokens: Tensor, time: Tensor, context: Tensor | None, known: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """`[B, L, E]` of `[B, L, E]` at times `time [B, E]`; keys and values as in `Attention`."""
        attended, keys_values = self.attn1(self.norm1(tokens, time), context, known)
        tokens = tokens + attended
        normed = functional.layer_norm(tokens, tokens.shape[-1:], eps=1e-5)
        return tokens + self.ff(normed), keys_values
