"""The action head: a diffusion transformer that says where noisy actions should move, given images, task description
and state; its parts, some of which every robot has of its own.

Parameter names are those of the public checkpoints. Shapes: `B` samples, `L` tokens (of images and task description),
`M` other tokens that they look at, `H` actions that are denoised together (horizon), `D` numbers in an action (padded),
`E` entries of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.gr00t.config import Architecture, Transformer

# ---------------------------------------------------------------------------------------------------------------- parts

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
        return torch.unflatten(tokens, -1, (self.heads, -1)).transpose(1, 2)


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
        normed: Tensor = functional.layer_norm(tokens, tokens.shape[-1:], eps=1e-5) * (1 + scale) + shift
        return normed


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


# ------------------------------------------------------------------------------------------------------------ the whole


@dataclass(frozen=True)
class Condition:
    """What actions are denoised given; computed once per observation."""

    context: Tensor
    """Images and task description `[B, L, E]`."""
    state: Tensor
    """The robot's state `[B, 1, E]`."""
    embodiment: Embodiment
    """Which robot it is."""
    memory: dict[int, KeysValues] = field(default_factory=dict)
    """Keys and values of the context by the number of the block that looks at it, once a denoising step has computed
    them."""


class SelfAttentionTransformer(nn.Module):
    """Images and task description once more, trained together with the actions. Padding is not masked."""

    def __init__(self, size: Transformer) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(SelfAttentionBlock(size.width, size.heads) for _ in range(size.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """`[B, L, E]` of `[B, L, E]`."""
        for block in self.transformer_blocks:
            tokens = block(tokens)
        return tokens


class TimestepEncoder(nn.Module):
    """Holds the embedder under the name that checkpoints have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedder(width)

    def forward(self, bucket: Tensor) -> Tensor:
        """`[B, E]` of times `[B]`."""
        embedded: Tensor = self.timestep_embedder(bucket)
        return embedded


class DiT(nn.Module):
    """The diffusion transformer: blocks look at images and task description and at their own tokens by turns."""

    def __init__(self, size: Transformer, context: int, outputs: int) -> None:
        super().__init__()
        self.timestep_encoder = TimestepEncoder(size.width)
        self.transformer_blocks = nn.ModuleList(
            DiTBlock(size.width, size.heads, None if index % 2 else context) for index in range(size.layers)
        )
        self.proj_out_1 = nn.Linear(size.width, 2 * size.width)
        self.proj_out_2 = nn.Linear(size.width, outputs)

    def forward(self, tokens: Tensor, context: Tensor, bucket: Tensor, memory: dict[int, KeysValues]) -> Tensor:
        """`[B, L, outputs]` of `[B, L, E]` at times `bucket [B]`; leaves keys and values of the context in `memory`,
        and uses those that are there."""
        time = self.timestep_encoder(bucket)
        for index, block in enumerate(self.transformer_blocks):
            looks_away = index % 2 == 0
            tokens, keys_values = block(tokens, time, context if looks_away else None, memory.get(index))
            if looks_away:
                memory[index] = keys_values
        # The other way round than in the blocks: the shift comes first.
        shift, scale = self.proj_out_1(functional.silu(time)).unsqueeze(1).chunk(2, dim=-1)
        normed = functional.layer_norm(tokens, tokens.shape[-1:], eps=1e-6) * (1 + scale) + shift
        result: Tensor = self.proj_out_2(normed)
        return result


class ActionHead(nn.Module):
    """From the tokens of the vision-language model to the velocity of noisy actions."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        width, robots = sizes.dit.width, sizes.embodiments
        self.vlln = nn.LayerNorm(sizes.width, eps=1e-5)
        self.vl_self_attention = SelfAttentionTransformer(sizes.vl_self_attention)
        self.state_encoder = EmbodimentMLP(robots, sizes.max_state_dim, sizes.hidden, width)
        self.action_encoder = ActionEncoder(robots, sizes.max_action_dim, width)
        self.position_embedding = nn.Embedding(sizes.max_positions, width)
        self.future_tokens = nn.Embedding(sizes.future_tokens, width)
        self.model = DiT(sizes.dit, sizes.width, sizes.dit_outputs)
        self.action_decoder = EmbodimentMLP(robots, sizes.dit_outputs, sizes.hidden, sizes.max_action_dim)
        for table in (self.position_embedding, self.future_tokens):
            nn.init.normal_(table.weight, std=0.02)

    def condition(self, features: Tensor, state: Tensor, embodiment: Embodiment) -> Condition:
        """Return what actions are denoised given: tokens `[B, L, E]` of images and task description, and the state `[B,
        1, S]`."""
        context = self.vl_self_attention(self.vlln(features))
        return Condition(context, self.state_encoder(state, embodiment), embodiment)

    def hidden(self, actions: Tensor, bucket: Tensor, given: Condition) -> Tensor:
        """The transformer's output `[B, H, outputs]` in the places of actions `[B, H, D]`, at times `bucket [B]`."""
        horizon = actions.shape[1]
        encoded = self.action_encoder(actions, bucket, given.embodiment)
        encoded = encoded + self.position_embedding.weight[:horizon]
        future = self.future_tokens.weight.expand(len(actions), -1, -1)
        tokens = torch.cat([given.state, future, encoded], dim=1)
        result: Tensor = self.model(tokens, given.context, bucket, given.memory)[:, -horizon:]
        return result

    def velocity(self, hidden: Tensor, given: Condition) -> Tensor:
        """Return where the actions should move, `[B, H, D]` per unit of time, from noise (0) to data (1)."""
        result: Tensor = self.action_decoder(hidden, given.embodiment)
        return result
