"""The action head: a diffusion transformer that predicts the velocity of noisy actions, given images, task description
and state. Some of its parts have separate weights for each robot.

Parameter names are those of the public checkpoints. Shapes: `B` samples, `L` tokens (of images and task description),
`M` tokens of a context, `H` actions that are denoised together (horizon), `D` numbers in an action (padded), `E` width
of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.gr00t.config import HeadSizes, Transformer

# ---------------------------------------------------------------------------------------------------------------- parts

Embodiment = int | Tensor
"""A robot's index, for all samples or for each `[B]`."""
KeysValues = tuple[Tensor, Tensor]
"""Keys and values of a context, `[B, h, M, E/h]` each, for `h` heads."""
MAX_PERIOD = 10000.0
"""Longest period of the time embedding. Angles reach a thousand, so that the order of operations affects the fifth
digit; it is that of the public code."""


LOWERED = 1.0 - 1e-9
"""Factor of frequencies before they are rounded to float32. Kernels of exp differ in the last digit, which times of a
thousand carry to the fifth digit of velocities. Rounded from float64 all are those of the public numbers, but for the
fifth, which lies half a digit from its neighbour and was rounded down there."""


def _waves(bucket: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return sines and cosines `[B, n]` of times `[B]` for logarithms of frequencies `[n]`, all in float32."""
    frequencies = (exponents.double().exp() * LOWERED).float()
    angles = bucket.float().unsqueeze(-1) * frequencies
    return angles.sin(), angles.cos()


def _range(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.float32, device=device)


class EmbodimentLinear(nn.Module):
    """A linear layer with separate weights for each robot."""

    def __init__(self, embodiments: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(embodiments, inputs, outputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(embodiments, outputs))

    def forward(self, tokens: Tensor, embodiment: Embodiment) -> Tensor:
        """Map `[B, L, inputs]` to `[B, L, outputs]`."""
        return tokens @ self.W[embodiment] + self.b[embodiment].unsqueeze(-2)


class EmbodimentMLP(nn.Module):
    """Two linear layers with separate weights for each robot, and ReLU between them."""

    def __init__(self, embodiments: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(embodiments, inputs, hidden)
        self.layer2 = EmbodimentLinear(embodiments, hidden, outputs)

    def forward(self, tokens: Tensor, embodiment: Embodiment) -> Tensor:
        """Map `[B, L, inputs]` to `[B, L, outputs]`."""
        hidden = functional.relu(self.layer1(tokens, embodiment))
        result: Tensor = self.layer2(hidden, embodiment)
        return result


class ActionEncoder(nn.Module):
    """Embeds noisy actions and their time as tokens."""

    def __init__(self, embodiments: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.W1 = EmbodimentLinear(embodiments, action_dim, width)
        self.W2 = EmbodimentLinear(embodiments, 2 * width, width)
        self.W3 = EmbodimentLinear(embodiments, width, width)

    def forward(self, actions: Tensor, bucket: Tensor, embodiment: Embodiment) -> Tensor:
        """Return tokens `[B, H, E]` of actions `[B, H, D]` at times `bucket [B]`."""
        embedded = self.W1(actions, embodiment)
        half = embedded.shape[-1] // 2
        exponents = -_range(half, bucket.device) * (math.log(MAX_PERIOD) / half)
        time = torch.cat(_waves(bucket, exponents), dim=-1).to(embedded.dtype)
        both = torch.cat([embedded, time.unsqueeze(1).expand_as(embedded)], dim=-1)
        result: Tensor = self.W3(functional.silu(self.W2(both, embodiment)), embodiment)
        return result


class TimestepEmbedder(nn.Module):
    """Embeds the time for the diffusion transformer."""

    FREQUENCIES = 128

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(2 * self.FREQUENCIES, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, bucket: Tensor) -> Tensor:
        """Return embeddings `[B, E]` of times `[B]`.

        Unlike in `ActionEncoder`, cosines come first and the last frequency is included.
        """
        exponents = -math.log(MAX_PERIOD) * _range(self.FREQUENCIES, bucket.device) / (self.FREQUENCIES - 1)
        sine, cosine = _waves(bucket, exponents)
        waves = torch.cat([cosine, sine], dim=-1).to(self.linear_1.weight.dtype)
        result: Tensor = self.linear_2(functional.silu(self.linear_1(waves)))
        return result


class Attention(nn.Module):
    """Multi-head self-attention or cross-attention."""

    def __init__(self, width: int, heads: int, context: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(context or width, width)
        self.to_v = nn.Linear(context or width, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(
        self,
        tokens: Tensor,
        context: Tensor | None = None,
        known: KeysValues | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Attend from tokens `[B, L, E]` to `context [B, M, ...]`, or to the tokens if it is None.

        Args:
            tokens: that attend.
            context: that is attended to.
            known: keys and values of the context, which are then not computed again.
            mask: bool `[B, 1, 1, M]`, True where the context may be attended to; None: everywhere.

        Returns:
            the result `[B, L, E]`, and keys and values.
        """
        seen = tokens if context is None else context
        key, value = known or (self._split(self.to_k(seen)), self._split(self.to_v(seen)))
        attended = functional.scaled_dot_product_attention(self._split(self.to_q(tokens)), key, value, attn_mask=mask)
        return self.to_out[0](attended.transpose(1, 2).flatten(2)), (key, value)

    def _split(self, tokens: Tensor) -> Tensor:
        """Split `[B, L, E]` into heads `[B, h, L, E/h]`."""
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
        # The identity stands for dropout in public code; it keeps the indices in parameter names.
        self.net = nn.ModuleList([_GELUProjection(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width)])

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `[..., E]` to `[..., E]`."""
        for layer in self.net:
            tokens = layer(tokens)
        return tokens


class AdaptiveLayerNorm(nn.Module):
    """A layer norm without weights; its output is scaled and shifted by the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, tokens: Tensor, time: Tensor) -> Tensor:
        """Map `[B, L, E]` to `[B, L, E]` at times `time [B, E]`."""
        scale, shift = self.linear(functional.silu(time)).unsqueeze(1).chunk(2, dim=-1)
        normed: Tensor = functional.layer_norm(tokens, tokens.shape[-1:], eps=1e-5) * (1 + scale) + shift
        return normed


class SelfAttentionBlock(nn.Module):
    """A transformer block with full self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-5)
        self.attn1 = Attention(width, heads)
        self.norm3 = nn.LayerNorm(width, eps=1e-5)
        self.ff = FeedForward(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `[B, L, E]` to `[B, L, E]`."""
        tokens = tokens + self.attn1(self.norm1(tokens))[0]
        result: Tensor = tokens + self.ff(self.norm3(tokens))
        return result


class DiTBlock(nn.Module):
    """A block of the diffusion transformer: cross-attention to a context, or self-attention if `context` is None."""

    def __init__(self, width: int, heads: int, context: int | None) -> None:
        super().__init__()
        self.norm1 = AdaptiveLayerNorm(width)
        self.attn1 = Attention(width, heads, context)
        self.ff = FeedForward(width)

    def forward(
        self,
        tokens: Tensor,
        time: Tensor,
        context: Tensor | None,
        known: KeysValues | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Map `[B, L, E]` to `[B, L, E]` at times `time [B, E]`; the others as in `Attention`."""
        attended, keys_values = self.attn1(self.norm1(tokens, time), context, known, mask)
        tokens = tokens + attended
        normed = functional.layer_norm(tokens, tokens.shape[-1:], eps=1e-5)
        return tokens + self.ff(normed), keys_values


# ------------------------------------------------------------------------------------------------------------ the whole


@dataclass(frozen=True)
class Condition:
    """Inputs of every denoising step; computed once per observation."""

    context: Tensor
    """Images and task description `[B, L, E]`."""
    state: Tensor
    """The robot's state `[B, 1, E]`."""
    embodiment: Embodiment
    """Index of the robot."""
    memory: dict[int, KeysValues] = field(default_factory=dict)
    """Keys and values of the context by index of the block; the first denoising step fills it."""
    text: Tensor | None = None
    """bool `[B, L]`, True for tokens of the task description; None: nothing asks, see `HeadSizes.text_every`."""
    images: Tensor | None = None
    """bool `[B, L]`, likewise for those of images."""
    valid: Tensor | None = None
    """bool `[B, L]`, False for padding; None: nothing asks."""


class SelfAttentionTransformer(nn.Module):
    """Self-attention over the tokens of images and task description. Padding is not masked."""

    def __init__(self, size: Transformer) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(SelfAttentionBlock(size.width, size.heads) for _ in range(size.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `[B, L, E]` to `[B, L, E]`."""
        for block in self.transformer_blocks:
            tokens = block(tokens)
        return tokens


class TimestepEncoder(nn.Module):
    """Wraps the embedder, for the parameter names of checkpoints."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedder(width)

    def forward(self, bucket: Tensor) -> Tensor:
        """Return embeddings `[B, E]` of times `[B]`."""
        embedded: Tensor = self.timestep_embedder(bucket)
        return embedded


class DiT(nn.Module):
    """The diffusion transformer: cross-attention to images and task description alternates with self-attention."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        size, context = sizes.dit, sizes.width
        self.text_every = sizes.text_every
        self.timestep_encoder = TimestepEncoder(size.width)
        self.transformer_blocks = nn.ModuleList(
            DiTBlock(size.width, size.heads, None if index % 2 else context) for index in range(size.layers)
        )
        self.proj_out_1 = nn.Linear(size.width, 2 * size.width)
        self.proj_out_2 = nn.Linear(size.width, sizes.dit_outputs)

    def forward(self, tokens: Tensor, given: Condition, bucket: Tensor) -> Tensor:
        """Map tokens `[B, L, E]` to `[B, L, outputs]` at times `bucket [B]`. Keys and values of the context are read
        from its memory, or stored there."""
        time = self.timestep_encoder(bucket)
        text, images = (None if mask is None else mask[:, None, None] for mask in (given.text, given.images))
        for index, block in enumerate(self.transformer_blocks):
            if index % 2:
                tokens, _ = block(tokens, time, None)
                continue
            reads_text = self.text_every is not None and index // 2 % self.text_every == 0
            seen = given.memory.get(index)
            tokens, given.memory[index] = block(tokens, time, given.context, seen, text if reads_text else images)
        # Unlike in the blocks, the shift comes first.
        shift, scale = self.proj_out_1(functional.silu(time)).unsqueeze(1).chunk(2, dim=-1)
        normed = functional.layer_norm(tokens, tokens.shape[-1:], eps=1e-6) * (1 + scale) + shift
        result: Tensor = self.proj_out_2(normed)
        return result


class ActionHead(nn.Module):
    """Predicts the velocity of noisy actions from the tokens of the vision-language model."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        width, robots = sizes.dit.width, sizes.embodiments
        self.vlln = nn.LayerNorm(sizes.width, eps=1e-5)
        if sizes.vl_self_attention is not None:
            self.vl_self_attention = SelfAttentionTransformer(sizes.vl_self_attention)
        self.state_encoder = EmbodimentMLP(robots, sizes.max_state_dim, sizes.hidden, width)
        self.action_encoder = ActionEncoder(robots, sizes.max_action_dim, width)
        self.position_embedding = nn.Embedding(sizes.max_positions, width)
        tables = [self.position_embedding]
        if sizes.future_tokens:
            self.future_tokens = nn.Embedding(sizes.future_tokens, width)
            tables.append(self.future_tokens)
        self.model = DiT(sizes)
        self.action_decoder = EmbodimentMLP(robots, sizes.dit_outputs, sizes.hidden, sizes.max_action_dim)
        for table in tables:
            nn.init.normal_(table.weight, std=0.02)
        self.sizes = sizes

    def condition(
        self,
        features: Tensor,
        state: Tensor,
        embodiment: Embodiment,
        *,
        text: Tensor | None = None,
        images: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Condition:
        """Encode tokens `[B, L, E]` of images and task description, and the state `[B, 1, S]`; see `Condition`."""
        context = self.vlln(features)
        if self.sizes.vl_self_attention is not None:
            context = self.vl_self_attention(context)
        encoded = self.state_encoder(state, embodiment)
        return Condition(context, encoded, embodiment, text=text, images=images, valid=valid)

    def hidden(self, actions: Tensor, bucket: Tensor, given: Condition) -> Tensor:
        """Return the transformer's output `[B, H, outputs]` for actions `[B, H, D]` at times `bucket [B]`."""
        horizon = actions.shape[1]
        encoded = self.action_encoder(actions, bucket, given.embodiment)
        encoded = encoded + self.position_embedding.weight[:horizon]
        tokens = [given.state, encoded]
        if self.sizes.future_tokens:
            tokens.insert(1, self.future_tokens.weight.expand(len(actions), -1, -1))
        result: Tensor = self.model(torch.cat(tokens, dim=1), given, bucket)[:, -horizon:]
        return result

    def velocity(self, hidden: Tensor, given: Condition) -> Tensor:
        """Return the velocity `[B, H, D]` of actions per unit of time, from noise (0) to data (1)."""
        result: Tensor = self.action_decoder(hidden, given.embodiment)
        return result
