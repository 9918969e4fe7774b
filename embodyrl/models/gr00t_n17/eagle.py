"""Eagle 3 as N1.6 uses it: SigLIP at the images' own aspect ratio, four patches joined to a token, and Qwen3.

All images of a batch have one size. Names of parameters are those of public checkpoints, except as in `network.NAMING`.
Shapes: `M` images, `P` patches of an image, `Q = P / merge^2` tokens of it, `W` width of the vision transformer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.gr00t_n17.config import Eagle
from embodyrl.models.gr00t_n17.language import Rotation
from embodyrl.models.libraries import SiglipVisionConfig, SiglipVisionModel


class PatchEmbeddings(nn.Module):
    """Embeds patches, and adds positions that are resized to the image."""

    def __init__(self, sizes: Eagle) -> None:
        super().__init__()
        self.sizes = sizes
        self.patch_embedding = nn.Linear(3 * sizes.patch**2, sizes.width)
        self.position_embedding = nn.Embedding(sizes.positions**2, sizes.width)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `[M, 3, h, w]` to patches `[M, P, W]`, row by row."""
        patch, side = self.sizes.patch, self.sizes.positions
        cut = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch)).permute(0, 2, 4, 3, 5, 1)
        grid = cut.shape[1:3]
        table = self.position_embedding.weight.unflatten(0, (side, side)).permute(2, 0, 1).unsqueeze(0)
        # Bilinear resizing of bfloat16 is not implemented on every device.
        resized = functional.interpolate(table.float(), grid, mode="bilinear", align_corners=False, antialias=True)
        embedded: Tensor = self.patch_embedding(cut.flatten(3).flatten(1, 2))
        return embedded + resized.squeeze(0).flatten(1).T.to(embedded.dtype)


class VisionTower(nn.Module):
    """SigLIP."""

    def __init__(self, sizes: Eagle) -> None:
        super().__init__()
        config = SiglipVisionConfig(
            hidden_size=sizes.width,
            intermediate_size=sizes.mlp,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            patch_size=sizes.patch,
            image_size=sizes.patch * sizes.positions,
            hidden_act="gelu_pytorch_tanh",
            layer_norm_eps=1e-6,
            vision_use_head=False,
        )
        whole = SiglipVisionModel(config)
        model = getattr(whole, "vision_model", whole)
        self.embeddings = PatchEmbeddings(sizes)
        self.encoder, self.post_layernorm = model.encoder, model.post_layernorm

    def forward(self, images: Tensor) -> Tensor:
        """Map images `[M, 3, h, w]` to patches `[M, P, W]`."""
        patches: Tensor = self.post_layernorm(self.encoder(inputs_embeds=self.embeddings(images)).last_hidden_state)
        return patches


def projection(sizes: Eagle) -> nn.Sequential:
    """Return the layers that map joined patches to tokens."""
    wide, width = sizes.width * sizes.merge**2, sizes.text["hidden_size"]
    return nn.Sequential(nn.LayerNorm(wide, eps=1e-5), nn.Linear(wide, width), nn.GELU(), nn.Linear(width, width))


def join_patches(patches: Tensor, grid: tuple[int, int], merge: int) -> Tensor:
    """Join squares of patches `[M, P, W]`, which come row by row: `[M, Q, W*merge^2]`, with the channel first."""
    planes = patches.unflatten(1, grid).permute(0, 3, 1, 2)
    return functional.pixel_unshuffle(planes, merge).flatten(2).transpose(1, 2)


def text_rotation(length: int, head_dim: int, base: float, device: torch.device) -> Rotation:
    """Return cosines and sines `[1, L, d]` of tokens that follow each other."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    angles = torch.arange(length, dtype=torch.float32, device=device).unsqueeze(1) / base ** (steps / head_dim)
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(0)
    return angles.cos(), angles.sin()
