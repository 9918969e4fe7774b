"""Qwen3-VL as N1.7 uses it: a vision transformer whose inner layers also reach the first layers of the language model,
and a language model whose positions have a time, a row and a column.

All images of a batch have one size, so that whatever depends on it is computed once. Names of parameters are those of
public checkpoints. Shapes: `M` images, `P` patches of an image, `Q = P / merge^2` tokens of it, `W` width of the vision
transformer, `B` samples, `L` tokens of a prompt, `E` width of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.gr00t_n17.config import Qwen
from embodyrl.models.gr00t_n17.language import Rotation, rotate

PERIOD = 10000.0
"""Longest period of rotary positions in the vision transformer."""
Grid = tuple[int, int]
"""Height and width of an image in patches."""


# --------------------------------------------------------------------------------------------------- places of patches


def in_merge_order(places: Tensor, grid: Grid, merge: int) -> Tensor:
    """Bring `[.., height*width]` of an image read row by row into the order in which patches of a token follow each
    other."""
    height, width = grid
    squares = torch.unflatten(places, -1, (height // merge, merge, width // merge, merge))
    return squares.transpose(-3, -2).flatten(-4)


def learned_places(grid: Grid, side: int, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which learned positions each patch lies between, `[4, P]`, and their weights `[4, P, 1]`: bilinear, with
    the corners of both grids on each other."""
    lows, shares = [], []
    for length in grid:
        at = torch.linspace(0, side - 1, length, device=device)
        low = at.long()
        lows.append(torch.stack([low, (low + 1).clamp(max=side - 1)]))
        shares.append(torch.stack([1 - (at - low), at - low]))
    (rows, columns), (tall, wide) = lows, shares
    places = (rows[:, None, :, None] * side + columns[None, :, None, :]).flatten(2).flatten(0, 1)
    weights = (tall[:, None, :, None] * wide[None, :, None, :]).flatten(2).flatten(0, 1)
    return in_merge_order(places, grid, merge), in_merge_order(weights, grid, merge).unsqueeze(-1)


def rotary_places(grid: Grid, head_dim: int, merge: int, device: torch.device) -> Rotation:
    """Return cosines and sines `[P, head_dim]` of rows, in one half of the frequencies, and columns, in the other."""
    half = head_dim // 2
    steps = torch.arange(0, half, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / PERIOD ** (steps / half)
    places = in_merge_order(torch.arange(grid[0] * grid[1], device=device), grid, merge)
    both = torch.stack([places // grid[1], places % grid[1]], dim=1)
    angles = (both.unsqueeze(-1).float() * frequencies).flatten(1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


# ----------------------------------------------------------------------------------------------- the vision transformer


class VisionAttention(nn.Module):
    """Self-attention within an image."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor, rotation: Rotation) -> Tensor:
        """Map `[M, P, W]` to `[M, P, W]`."""
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = (rotate(each.float(), rotation).to(value.dtype) for each in (query, key))
        attended = functional.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return projected


class VisionMLP(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(width, hidden)
        self.linear_fc2 = nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `[M, P, W]` to `[M, P, W]`."""
        mapped: Tensor = self.linear_fc2(functional.gelu(self.linear_fc1(tokens), approximate="tanh"))
        return mapped


class VisionBlock(nn.Module):
    """A block of the vision transformer."""

    def __init__(self, sizes: Qwen) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width, eps=1e-6)
        self.norm2 = nn.LayerNorm(sizes.width, eps=1e-6)
        self.attn = VisionAttention(sizes.width, sizes.heads)
        self.mlp = VisionMLP(sizes.width, sizes.mlp)

    def forward(self, tokens: Tensor, rotation: Rotation) -> Tensor:
        """Map `[M, P, W]` to `[M, P, W]`."""
        tokens = tokens + self.attn(self.norm1(tokens), rotation)
        result: Tensor = tokens + self.mlp(self.norm2(tokens))
        return result


class PatchMerger(nn.Module):
    """Joins the patches of a token.

    Args:
        sizes: of the model.
        joined: normalise the joined patches instead of each.
    """

    def __init__(self, sizes: Qwen, *, joined: bool) -> None:
        super().__init__()
        wide = sizes.width * sizes.merge**2
        self.joined, self.count = joined, sizes.merge**2
        self.norm = nn.LayerNorm(wide if joined else sizes.width, eps=1e-6)
        self.linear_fc1 = nn.Linear(wide, wide)
        self.linear_fc2 = nn.Linear(wide, sizes.text["hidden_size"])

    def forward(self, tokens: Tensor) -> Tensor:
        """Map patches `[M, P, W]` to tokens `[M, Q, E]`."""
        tokens = tokens if self.joined else self.norm(tokens)
        wide = tokens.unflatten(1, (-1, self.count)).flatten(2)
        wide = self.norm(wide) if self.joined else wide
        merged: Tensor = self.linear_fc2(functional.gelu(self.linear_fc1(wide)))
        return merged


class PatchEmbed(nn.Module):
    """Embeds patches; a convolution in public code, whose windows do not overlap."""

    def __init__(self, sizes: Qwen) -> None:
        super().__init__()
        window = (sizes.frames, sizes.patch, sizes.patch)
        self.proj = nn.Conv3d(3, sizes.width, kernel_size=window, stride=window)

    def forward(self, patches: Tensor) -> Tensor:
        """Map patches `[M, P, 3*frames*patch*patch]` to `[M, P, W]`."""
        return functional.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class VisionModel(nn.Module):
    """The vision transformer."""

    def __init__(self, sizes: Qwen) -> None:
        super().__init__()
        self.sizes = sizes
        self.patch_embed = PatchEmbed(sizes)
        self.pos_embed = nn.Embedding(sizes.positions**2, sizes.width)
        self.blocks = nn.ModuleList(VisionBlock(sizes) for _ in range(sizes.layers))
        self.merger = PatchMerger(sizes, joined=False)
        self.deepstack_merger_list = nn.ModuleList(PatchMerger(sizes, joined=True) for _ in sizes.deepstack)

    def patches(self, images: Tensor) -> Tensor:
        """Cut images `[M, 3, h, w]` into patches `[M, P, 3*frames*patch*patch]`: channel, time, row, column."""
        patch, merge = self.sizes.patch, self.sizes.merge
        cut = images.unflatten(3, (-1, merge, patch)).unflatten(2, (-1, merge, patch))
        cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)  # token row, token column, row in it, column in it, channel, y, x
        repeated = cut.unsqueeze(6).expand(*cut.shape[:6], self.sizes.frames, *cut.shape[6:])
        patches: Tensor = repeated.flatten(5).flatten(1, 4)
        return patches

    def positions(self, grid: Grid, device: torch.device) -> Tensor:
        """Return the learned positions `[P, W]`, interpolated to a grid."""
        places, weights = learned_places(grid, self.sizes.positions, self.sizes.merge, device)
        learned = functional.embedding(places, self.pos_embed.weight)
        return (learned * weights).sum(0).to(learned.dtype)

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return tokens `[M, Q, E]` of images `[M, 3, h, w]`, and those of the inner layers."""
        grid = images.shape[2] // self.sizes.patch, images.shape[3] // self.sizes.patch
        tokens = self.patch_embed(self.patches(images))
        tokens = tokens + self.positions(grid, tokens.device)
        head_dim = self.sizes.width // self.sizes.heads
        rotation = rotary_places(grid, head_dim, self.sizes.merge, tokens.device)
        inner: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            tokens = block(tokens, rotation)
            if index in self.sizes.deepstack:
                place = self.sizes.deepstack.index(index)
                inner[place] = self.deepstack_merger_list[place](tokens)
        return self.merger(tokens), [inner[place] for place in sorted(inner)]


# ---------------------------------------------------------------------------------------------------- places of tokens


def axes_of(sections: Sequence[int], device: torch.device) -> Tensor:
    """Return which of time (0), row and column each rotary frequency belongs to, `[half]`: they take turns, as long as
    rows and columns have any left."""
    index = torch.arange(sum(sections), device=device)
    turn = index % 3
    rows, columns = (((turn == axis) & (index < 3 * sections[axis])).long() for axis in (1, 2))
    return rows + 2 * columns


def text_rotation(places: Tensor, sections: Sequence[int], base: float) -> Rotation:
    """Return cosines and sines `[B, L, d]` of tokens at times, rows and columns `places [B, 3, L]`."""
    half = sum(sections)
    steps = torch.arange(0, 2 * half, 2, dtype=torch.float32, device=places.device)
    frequencies = 1.0 / base ** (steps / (2 * half))
    own = places.index_select(1, axes_of(sections, places.device)).transpose(1, 2)
    angles = own.float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()
