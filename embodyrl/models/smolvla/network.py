"""The network of SmolVLA: a vision tower, the first layers of a language model, and an action expert whose layers read
the language model's keys and values of the same depth.

Shukor et al. (2025), "SmolVLA: A Vision-Language-Action Model for Affordable and Efficient Robotics",
arXiv:2506.01844; details as in LeRobot 0.6.1. Shapes: `B` samples, `V` images, `P` tokens of an image, `L` tokens of a
task description, `N = V*P + L + 1` tokens of the prefix (images, task description, state), `T` actions of the horizon,
`A` numbers of an action, `E` width of the language model, `W` width of the action expert, `h` heads, `d` their width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.smolvla.config import Architecture, LlamaSizes, VisionSizes
from embodyrl.models.vla.transformer import MLP, Attention, KeysValues, joined, project, stacked, time_embedding

# ------------------------------------------------------------------------------------------------------------- vision


class VisionAttention(nn.Module):
    """Attention among all patches of an image."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(sizes.width, sizes.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[M, patches, width]` to the same shape."""
        queries, keys, values = (
            torch.unflatten(layer(x), -1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        out: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return out


class VisionMLP(nn.Module):
    """Feed-forward layer."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(sizes.width, sizes.mlp), nn.Linear(sizes.mlp, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[M, patches, width]` to the same shape."""
        out: Tensor = self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))
        return out


class VisionLayer(nn.Module):
    """Attention and feed-forward layer, each behind a norm."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.self_attn = VisionAttention(sizes)
        self.layer_norm2 = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.mlp = VisionMLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[M, patches, width]` to the same shape."""
        x = x + self.self_attn(self.layer_norm1(x))
        out: Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class Patches(nn.Module):
    """Embeds an image's patches and their places."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, sizes.width, sizes.patch_size, sizes.patch_size)
        self.position_embedding = nn.Embedding((sizes.image_size // sizes.patch_size) ** 2, sizes.width)

    def forward(self, images: Tensor) -> Tensor:
        """Map `images [M, 3, S, S]` to `[M, patches, width]`."""
        patches: Tensor = self.patch_embedding(images).flatten(2).transpose(1, 2)
        return patches + self.position_embedding.weight


class Encoder(nn.Module):
    """Layers that follow each other."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList([VisionLayer(sizes) for _ in range(sizes.layers)])

    def forward(self, x: Tensor) -> Tensor:
        """Map `[M, patches, width]` to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


class VisionTower(nn.Module):
    """SigLIP (Zhai et al., 2023, arXiv:2303.15343): a transformer over the patches of an image."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.embeddings = Patches(sizes)
        self.encoder = Encoder(sizes)
        self.post_layernorm = nn.LayerNorm(sizes.width, eps=sizes.epsilon)

    def forward(self, images: Tensor) -> Tensor:
        """Map `images [M, 3, S, S]` in [-1, 1] to `[M, patches, width]`."""
        out: Tensor = self.post_layernorm(self.encoder(self.embeddings(images)))
        return out


def shuffled(x: Tensor, side: int) -> Tensor:
    """Join squares of `side` x `side` patches to one token: `[M, patches, width]` to `[M, P, side*side*width]`.

    Within a token the order is row, column, channel.
    """
    grid, width = math.isqrt(x.shape[1]), x.shape[2]
    squares = x.view(len(x), grid // side, side, grid // side, side, width).permute(0, 1, 3, 2, 4, 5)
    return squares.reshape(len(x), -1, side * side * width)


# --------------------------------------------------------------------------------------------- layers of both stacks


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., E]`."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


class Rotation:
    """Rotary position embedding of positions `[B, L]`; dimension i of a head is paired with i + d/2.

    The base is 10,000 whatever the language model was trained with, as in LeRobot.
    """

    def __init__(self, positions: Tensor, head_dim: int) -> None:
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        angles = (positions.float().unsqueeze(-1) / 10_000.0**exponents).unsqueeze(1)
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `[B, h, L, d]`, computed in float32."""
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(x.dtype)


class Layer(nn.Module):
    """Attention and feed-forward layer of the language model or of the expert."""

    def __init__(self, sizes: LlamaSizes, *, crosses: bool = False) -> None:
        super().__init__()
        self.shared = sizes.heads // sizes.kv_heads
        self.input_layernorm = RMSNorm(sizes.width, sizes.epsilon)
        self.self_attn = Attention(sizes, crosses=crosses)
        self.post_attention_layernorm = RMSNorm(sizes.width, sizes.epsilon)
        self.mlp = MLP(sizes, functional.silu)

    def _finish(self, x: Tensor, queries: Tensor, seen: KeysValues, mask: Tensor) -> Tensor:
        x = x + self.self_attn(queries, seen, stacked(mask, self.shared))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class SelfLayer(Layer):
    """Layer whose tokens attend to a memory and to each other."""

    def forward(
        self, x: Tensor, mask: Tensor, rotation: Rotation, memory: KeysValues | None, *, only_keys: bool = False
    ) -> tuple[Tensor, KeysValues]:
        """Return the next `x [B, L, E]`, and keys and values of this one.

        Args:
            x: `[B, L, E]`.
            mask: bool `[B, 1, L or 1, M+L]`, True where a token may attend.
            rotation: of the positions of `x`.
            memory: keys and values of `M` preceding tokens.
            only_keys: leave `x` as it is, because nothing reads what follows.
        """
        normed = self.input_layernorm(x)
        own = self.self_attn.keys_values(normed, rotation)
        if only_keys:
            return x, own
        seen = own if memory is None else joined(memory, own)
        return self._finish(x, self.self_attn.queries(normed, rotation), seen, mask), own


class CrossLayer(Layer):
    """Layer whose tokens attend to what it makes of the language model's keys and values, and not to each other."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__(sizes, crosses=True)

    def forward(
        self, x: Tensor | None, mask: Tensor, rotation: Rotation | None, memory: KeysValues
    ) -> tuple[Tensor | None, KeysValues]:
        """Return the next `x [B, L, W]`, and the memory.

        Args:
            x: `[B, L, W]`. None: return what this layer makes of the memory, which all denoising steps share.
            mask: bool `[B, 1, 1, M]`, True where a token may attend.
            rotation: of the positions of `x`, which begin at 0; keys are not rotated again.
            memory: from a call without `x`; without `x`, the language model's keys and values.
        """
        if x is None or rotation is None:
            attention, (keys, values) = self.self_attn, (each.transpose(1, 2).flatten(2) for each in memory)
            return None, (attention.split(attention.k_proj, keys), attention.split(attention.v_proj, values))
        return self._finish(x, self.self_attn.queries(self.input_layernorm(x), rotation), memory, mask), memory


# ------------------------------------------------------------------------------------------------------------ the whole


class LanguageModel(nn.Module):
    """Word embeddings and the first layers of the language model."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        sizes = architecture.language
        self.embed_tokens = nn.Embedding(architecture.vocabulary, sizes.width)
        self.layers = nn.ModuleList([SelfLayer(sizes) for _ in architecture.crosses])
        self.norm = RMSNorm(sizes.width, sizes.epsilon)  # in public files, and used by nothing

    def forward(
        self, x: Tensor, mask: Tensor, rotation: Rotation, memory: Sequence[KeysValues | None]
    ) -> list[KeysValues]:
        """Return keys and values of every layer for tokens `x`; nothing reads what the last layer makes of them.

        Args:
            x: `[B, L, E]`.
            mask: bool `[B, 1, 1, M+L]`, True where they may attend.
            rotation: of their positions.
            memory: for each layer, keys and values of `M` preceding tokens.
        """
        found = []
        for number, (layer, before) in enumerate(zip(self.layers, memory, strict=True), start=1):
            x, own = layer(x, mask, rotation, before, only_keys=number == len(memory))
            found.append(own)
        return found


class Expert(nn.Module):
    """The action expert, as many layers as the language model."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        sizes = architecture.expert
        self.head_dim = sizes.head_dim
        self.layers = nn.ModuleList(
            [CrossLayer(sizes) if crosses else SelfLayer(sizes) for crosses in architecture.crosses]
        )
        self.norm = RMSNorm(sizes.width, sizes.epsilon)

    def look(self, memory: Sequence[KeysValues], mask: Tensor) -> list[KeysValues]:
        """Return what each layer reads of the language model's keys and values, the same for all denoising steps."""
        seen = mask[:, None, None, :]
        return [
            layer(None, seen, None, there)[1] if isinstance(layer, CrossLayer) else there
            for layer, there in zip(self.layers, memory, strict=True)
        ]

    def forward(self, x: Tensor, prefix: Prefix) -> Tensor:
        """Map embedded actions `x [B, T, W]` to the same shape; each attends to the prefix and to those before it."""
        place = torch.arange(x.shape[1], device=x.device)
        seen, both = prefix.mask[:, None, None, :], action_mask(prefix.mask, x.shape[1])
        # Where actions attend to the prefix only, their positions begin at 0; else they continue from the prefix's.
        apart = Rotation(place.expand(len(x), -1), self.head_dim)
        behind = Rotation(prefix.mask.sum(1, keepdim=True) + place, self.head_dim)
        for layer, memory in zip(self.layers, prefix.memory, strict=True):
            crosses = isinstance(layer, CrossLayer)
            x, _ = layer(x, seen if crosses else both, apart if crosses else behind, memory)
        out: Tensor = self.norm(x)
        return out


def action_mask(prefix: Tensor, length: int) -> Tensor:
    """Return what actions may attend to, bool `[B, 1, T, N+T]`: the prefix `[B, N]`, themselves and earlier actions.

    Args:
        prefix: False for absent images and padding.
        length: `T`.
    """
    place = torch.arange(length, device=prefix.device)
    earlier = (place[:, None] >= place).expand(len(prefix), 1, -1, -1)
    return torch.cat([prefix[:, None, None, :].expand(-1, -1, length, -1), earlier], dim=-1)


@dataclass(frozen=True)
class Prefix:
    """What actions read of images, task description and state."""

    memory: list[KeysValues]
    """Keys and values of every layer of the language model; for a layer that crosses, what the expert makes of them."""
    mask: Tensor
    """`[B, N]` bool: False for absent images and padding."""


class SmolVLA(nn.Module):
    """Vision tower, connector, language model and action expert."""

    def __init__(self, architecture: Architecture, *, head: bool = False) -> None:
        """Build the network.

        Args:
            architecture: its sizes.
            head: with the language model's output layer, which nothing uses; public files have it.
        """
        super().__init__()
        self.architecture = architecture
        vision, language, expert = architecture.vision, architecture.language, architecture.expert
        self.vision = VisionTower(vision)
        self.connector = nn.Linear(vision.width * vision.shuffle**2, language.width, bias=False)
        self.text = LanguageModel(architecture)
        if head:
            self.lm_head = nn.Linear(language.width, architecture.vocabulary, bias=False)
        self.expert = Expert(architecture)
        self.state_proj = nn.Linear(architecture.state_dim, language.width)
        self.action_in_proj = nn.Linear(architecture.action_dim, expert.width)
        self.action_out_proj = nn.Linear(expert.width, architecture.action_dim)
        self.action_time_mlp_in = nn.Linear(2 * expert.width, expert.width)
        self.action_time_mlp_out = nn.Linear(expert.width, expert.width)

    # ----------------------------------------------------------------------------------------------------- the prefix

    def see(self, images: Tensor) -> Tensor:
        """Encode `images [B, V, 3, S, S]` in [-1, 1] as tokens `[B, V, P, E]`."""
        patches = self.vision(images.flatten(0, 1).to(self.connector.weight.dtype))
        tokens = self.connector(shuffled(patches, self.architecture.vision.shuffle))
        return torch.unflatten(tokens, 0, images.shape[:2])

    def embed(self, seen: Tensor, shown: Tensor, tokens: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embedded images and task description `[B, N-1, E]`, and their mask.

        Both are scaled by sqrt(E). Markers of images, where the checkpoint has them, are not, and are read for absent
        images as well.

        Args:
            seen: from `see`.
            shown: `[B, V]` bool: False for absent images.
            tokens: ids `[B, L]`.
            token_mask: `[B, L]` bool: False for padding.
        """
        scale = math.sqrt(self.architecture.language.width)
        images, mask = seen * scale, shown.unsqueeze(2).expand(seen.shape[:3])
        if self.architecture.markers is not None:
            images, mask = self._marked(images, mask, self.architecture.markers)
        words = self.text.embed_tokens(tokens) * scale
        embedded = torch.cat([images.flatten(1, 2), words.to(images.dtype)], dim=1)
        return embedded, torch.cat([mask.flatten(1, 2), token_mask], dim=1)

    def _marked(self, images: Tensor, mask: Tensor, ids: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Put both markers in front of each image, and the first of them behind it; and behind these images, so marked,
        those that no camera shows."""
        blanks = self.architecture.marked_blanks
        images = functional.pad(images, (0, 0, 0, 0, 0, blanks))
        mask = functional.pad(mask, (0, 0, 0, blanks))
        known = self.text.embed_tokens.weight  # rows of it need no ids on the device
        marks = torch.stack([known[number] for number in (*ids, ids[0])]).to(images.dtype)
        marks = marks.expand(*images.shape[:2], -1, -1)
        there = mask.new_ones(())
        return (
            torch.cat([marks[:, :, :2], images, marks[:, :, 2:]], dim=2),
            torch.cat([there.expand(*mask.shape[:2], 2), mask, there.expand(*mask.shape[:2], 1)], dim=2),
        )

    def read(self, embedded: Tensor, mask: Tensor) -> list[KeysValues]:
        """Return keys and values of every layer for images and task description, which attend to each other.

        Args:
            embedded: `[B, N-1, E]`.
            mask: `[B, N-1]` bool: False for what is absent.
        """
        rotation = Rotation(mask.long().cumsum(1) - 1, self.architecture.language.head_dim)
        memory: list[KeysValues] = self.text(embedded, mask[:, None, None, :], rotation, [None] * len(self.text.layers))
        return memory

    def add_state(self, memory: list[KeysValues], mask: Tensor, state: Tensor) -> Prefix:
        """Append the state, which attends to the rest of the prefix, while the rest does not attend to it.

        Args:
            memory: from `read`.
            mask: `[B, N-1]`, as in `read`.
            state: `[B, S]`.
        """
        x = project(self.state_proj, state).unsqueeze(1)
        rotation = Rotation(mask.sum(1, keepdim=True), self.architecture.language.head_dim)
        whole = functional.pad(mask, (0, 1), value=True)
        own = self.text(x, whole[:, None, None, :], rotation, memory)
        every = [joined(before, after) for before, after in zip(memory, own, strict=True)]
        return Prefix(self.expert.look(every, whole), whole)

    # -------------------------------------------------------------------------------------------------------- actions

    def embed_suffix(self, x: Tensor, time: Tensor) -> Tensor:
        """Embed noisy actions `x [B, T, A]` at times `[B]` (1 is noise, 0 is data) as `[B, T, W]`."""
        actions = project(self.action_in_proj, x)
        moment = time_embedding(time, self.architecture.expert.width, *self.architecture.periods).to(actions.dtype)
        timed = torch.cat([actions, moment[:, None, :].expand_as(actions)], dim=-1)
        return project(self.action_time_mlp_out, functional.silu(project(self.action_time_mlp_in, timed)))

    def forward(self, prefix: Prefix, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return the velocity `[B, T, A]` from data to noise at `x [B, T, A]` and times `[B]`, and the hidden states
        `[B, T, W]` that it is computed from."""
        hidden = self.expert(self.embed_suffix(x, time), prefix)
        return project(self.action_out_proj, hidden), hidden


def keep_wide(network: SmolVLA) -> None:
    """Hold the projections of states and actions in float32, and with them the layers that project the language model's
    keys and values: what LeRobot adds to the language model stays in 32 bits."""
    for name in ("state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out"):
        network.get_submodule(name).float()
    for layer in network.expert.layers:
        if isinstance(layer, CrossLayer):
            layer.self_attn.k_proj.float()
            layer.self_attn.v_proj.float()


def initialize(network: SmolVLA) -> None:
    """Draw random weights for a small model: word embeddings as long as image tokens once both are scaled."""
    width = network.architecture.language.width
    nn.init.normal_(network.text.embed_tokens.weight, std=width**-0.5)
    nn.init.normal_(network.connector.weight, std=(network.connector.in_features * width) ** -0.5)
    nn.init.normal_(network.vision.embeddings.position_embedding.weight, std=0.1)
