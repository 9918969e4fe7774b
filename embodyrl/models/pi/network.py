"""The networks of pi0 (Black et al., 2024) and pi0.5: a vision-language model encodes images and task description once;
a smaller transformer with as many layers, the action expert, then denoises actions.

Both are Gemmas (Gemma Team, 2024). Each layer of the action expert attends to the keys and values of the same layer of
the language model. Shapes: `B` samples, `V`
images, `P` tokens of an image, `L` tokens of the task description (or any tokens), `M` tokens of the memory, `N = V*P +
L` tokens of the prefix, `H` actions of the horizon, `A` entries of an action, `E` width of the language model, `W`
width of the action expert, `h` heads, `d` width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.libraries import SiglipVisionConfig, SiglipVisionModel
from embodyrl.models.pi.config import Architecture, GemmaSizes
from embodyrl.models.vla.transformer import (
    MLP,
    Attention,
    KeysValues,
    KeyValueCache,
    joined,
    stacked,
    time_embedding,
)

# -------------------------------------------------------------------------------------------------------------- a Gemma


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32, with weights around 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Return the normalised `x`, and the gate of the residual branch."""
        return (normalized(x) * (1.0 + self.weight.float())).to(x.dtype), 1.0


class AdaptiveRMSNorm(nn.Module):
    """RMS norm with scale, shift and gate computed from a condition `[B, E]`, here the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Return the normalised `x`, and the gate of the residual branch."""
        scale, shift, gate = self.dense(condition).unsqueeze(1).chunk(3, dim=-1)
        return (normalized(x) * (1.0 + scale.float()) + shift.float()).to(x.dtype), gate


def normalized(x: Tensor) -> Tensor:
    """Scale `x` to a root mean square of 1 along the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Rotation:
    """Rotary position embedding of positions `[B, L]`; dimension i of a head is paired with i + d/2."""

    def __init__(self, positions: Tensor, head_dim: int, dtype: torch.dtype) -> None:
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        angles = positions.float().unsqueeze(-1) * (1.0 / 10_000.0**exponents)
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `[B, h, L, d]`."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin


class Layer(nn.Module):
    """Attention and feed-forward layer."""

    def __init__(self, sizes: GemmaSizes, norm: type[RMSNorm | AdaptiveRMSNorm]) -> None:
        super().__init__()
        self.input_layernorm = norm(sizes.width)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = norm(sizes.width)
        self.mlp = MLP(sizes, partial(functional.gelu, approximate="tanh"))

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        rotation: Rotation,
        memory: Callable[[KeysValues], KeysValues],
        condition: Tensor | None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the next `x`, and keys and values of this one, which `memory` puts behind those before them."""
        normed, gate = self.input_layernorm(x, condition)
        queries, own = self.self_attn.queries(normed, rotation), self.self_attn.keys_values(normed, rotation)
        x = x + self.self_attn(queries, memory(own), mask) * gate
        normed, gate = self.post_attention_layernorm(x, condition)
        return x + self.mlp(normed) * gate, own


class Gemma(nn.Module):
    """A Gemma transformer without embeddings: layers and a final norm."""

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
        memory: list[KeysValues] | KeyValueCache | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """Return hidden states `[B, L, E]`, and keys and values of every layer.

        Args:
            x: embeddings `[B, L, E]`.
            mask: bool, what each token may attend to, `[B, 1, L or 1, M+L]`.
            positions: `[B, L]`.
            memory: for each layer, keys and values of `M` preceding tokens; a cache keeps those of `x`, too.
            condition: `[B, E]`.
        """
        rotation = Rotation(positions, self.sizes.head_dim, x.dtype)
        mask = stacked(mask, self.sizes.heads // self.sizes.kv_heads)  # once for all layers
        keys_values = []
        for number, layer in enumerate(self.layers):
            x, own = layer(x, mask, rotation, _behind(memory, number), condition)
            keys_values.append(own)
        return self.norm(x, condition)[0], keys_values


def _behind(memory: list[KeysValues] | KeyValueCache | None, number: int) -> Callable[[KeysValues], KeysValues]:
    """Return the function that puts keys and values of a layer behind those before them."""
    if memory is None:
        return lambda own: own
    if isinstance(memory, KeyValueCache):
        return lambda own: memory.update(*own, number)
    return partial(joined, memory[number])


# ------------------------------------------------------------------------------------------------------------ the whole


@dataclass(frozen=True)
class Prefix:
    """Output of the language model for images and task description."""

    memory: list[KeysValues]
    """Keys and values of every layer."""
    mask: Tensor
    """`[B, N]` bool: False for padding."""
    hidden: Tensor
    """`[B, N, E]`; meaningless for padding."""


def prefix_mask(image_mask: Tensor, token_mask: Tensor, length: int) -> Tensor:
    """Return which of `N = length` embeddings of images and prompt are there, bool `[B, N]`.

    Args:
        image_mask: `[B, V]` bool: False for absent images.
        token_mask: `[B, L]` bool: False for padding.
        length: of both together.
    """
    each = (length - token_mask.shape[1]) // image_mask.shape[1]
    return torch.cat([image_mask.repeat_interleave(each, dim=1), token_mask], dim=1)


class PaliGemma(nn.Module):
    """SigLIP, a projector, and a Gemma.

    Args:
        vision: sizes of SigLIP, as transformers names them.
        language: sizes of Gemma.
        vocabulary: token ids.
    """

    def __init__(self, vision: Mapping[str, Any], language: GemmaSizes, vocabulary: int) -> None:
        super().__init__()
        tower = SiglipVisionModel(SiglipVisionConfig(**vision, vision_use_head=False))
        self.vision = getattr(tower, "vision_model", tower)
        self.projector = nn.Linear(vision["hidden_size"], language.width)
        self.embed_tokens = nn.Embedding(vocabulary, language.width)
        self.language = Gemma(language)

    def embed_images(self, images: Tensor) -> Tensor:
        """Embed `images [B, V, 3, h, h]` in [-1, 1] as `[B, V*P, E]`."""
        features = self.vision(pixel_values=images.flatten(0, 1)).last_hidden_state
        return torch.unflatten(self.projector(features), 0, images.shape[:2]).flatten(1, 2)

    def embed_words(self, tokens: Tensor) -> Tensor:
        """Embed token ids `[B, L]` as `[B, L, E]`, scaled by sqrt(E)."""
        scaled: Tensor = self.embed_tokens(tokens) * math.sqrt(self.language.sizes.width)
        return scaled

    def embed_prefix(self, images: Tensor, tokens: Tensor) -> Tensor:
        """Embed `images [B, V, 3, h, h]` in [-1, 1] and token ids `[B, L]` as `[B, N, E]`.

        Word embeddings are scaled by sqrt(E), as in Gemma; image tokens are not.
        """
        seen = self.embed_images(images)
        return torch.cat([seen, self.embed_words(tokens).to(seen.dtype)], dim=1)


class Pi(PaliGemma):
    """PaliGemma, and the action expert: a Gemma that attends to the keys and values of the other."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture.vision, architecture.language, architecture.vocabulary)
        self.architecture = architecture
        width = architecture.expert.width
        self.expert = Gemma(architecture.expert, adaptive=architecture.adaptive)
        self.action_in_proj = nn.Linear(architecture.action_dim, width)
        self.action_out_proj = nn.Linear(width, architecture.action_dim)
        if architecture.adaptive:
            self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(architecture.state_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)
        if architecture.expert_vocabulary:  # in public files, and used by nothing
            self.expert_lm_head = nn.Linear(width, architecture.expert_vocabulary, bias=False).requires_grad_(False)

    # ---------------------------------------------------------------------------------- images and task description

    def read(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor) -> Prefix:
        """Encode images and task description; each token attends to all that are not masked.

        Args:
            images: `[B, V, 3, h, h]` in [-1, 1].
            image_mask: `[B, V]` bool: False for absent images.
            tokens: `[B, L]` ids.
            token_mask: `[B, L]` bool: False for padding.
        """
        embedded = self.embed_prefix(images, tokens)
        mask = prefix_mask(image_mask, token_mask, embedded.shape[1])
        hidden, memory = self.language(embedded, mask[:, None, None, :], mask.long().cumsum(1) - 1)
        return Prefix(memory, mask, hidden)

    # -------------------------------------------------------------------------------------------------------- actions

    def embed_suffix(self, x: Tensor, time: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Embed noisy actions; also return the condition of the norms.

        pi0: state token and actions `[B, 1+H, W]`, which include the time; no condition. pi0.5: actions `[B, H, W]`;
        the embedded time `[B, W]` conditions the norms.

        Args:
            x: noisy actions `[B, H, A]`.
            time: `[B]`, 1 is noise, 0 is data.
            state: `[B, S]`; not used by pi0.5.
        """
        actions, moment = self.action_in_proj(x), time_embedding(time, self.architecture.expert.width).to(x.dtype)
        if self.architecture.adaptive:
            return actions, functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(moment))))
        timed = torch.cat([actions, moment[:, None, :].expand_as(actions).to(actions.dtype)], dim=-1)
        actions = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(timed)))
        return torch.cat([self.state_proj(state).unsqueeze(1), actions], dim=1), None

    def forward(self, prefix: Prefix, x: Tensor, time: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the velocity `[B, H, A]` from data to noise at `x [B, H, A]`, and the hidden states `[B, H, W]` that
        it is computed from. Other arguments as in `embed_suffix`."""
        embedded, condition = self.embed_suffix(x, time, state)
        length, horizon = embedded.shape[1], x.shape[1]
        own = torch.ones(length, length, dtype=torch.bool, device=x.device)
        own[: length - horizon, length - horizon :].fill_(False)  # the state does not attend to actions
        seen = prefix.mask[:, None, None, :].expand(-1, 1, length, -1)
        mask = torch.cat([seen, own.expand(len(x), 1, -1, -1)], dim=-1)
        positions = prefix.mask.sum(1, keepdim=True) + torch.arange(length, device=x.device)
        hidden, _ = self.expert(embedded, mask, positions, prefix.memory, condition)
        hidden = hidden[:, -horizon:]
        return self.action_out_proj(hidden), hidden


def initialize(network: Pi) -> None:
    """Draw random weights for a small model: word embeddings as long as image tokens, and open gates of adaptive
    norms."""
    nn.init.normal_(network.embed_tokens.weight, std=network.architecture.language.width**-0.5)
    nn.init.normal_(network.vision.embeddings.position_embedding.weight, std=0.1)
    for name, parameter in network.expert.named_parameters():
        if name.endswith("dense.weight"):
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("dense.bias"):
            nn.init.zeros_(parameter)
            nn.init.ones_(parameter[-network.architecture.expert.width :])
