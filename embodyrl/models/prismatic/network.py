"""The network that OpenVLA and OpenVLA-OFT share: vision towers, projector, Llama.

Parameter names are those of the public checkpoints, except that timm calls LayerScale's weight `gamma`, see
`checkpoint_name`. Shapes: `B` samples, `P` patches, `F` vision features, `L` tokens, `E` width of the language model.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.libraries import LlamaConfig, LlamaForCausalLM, LlamaRotaryEmbedding, timm
from embodyrl.models.prismatic.architecture import Architecture
from embodyrl.models.weights import Naming


def checkpoint_name(name: str) -> str:
    """The name that a parameter has in public checkpoints."""
    return re.sub(r"\.(ls\d)\.gamma$", r".\1.scale_factor", name)


def parameter_name(name: str) -> str:
    """The inverse of `checkpoint_name`."""
    return re.sub(r"\.(ls\d)\.scale_factor$", r".\1.gamma", name)


NAMING = Naming(public=checkpoint_name, own=parameter_name)


class VisionBackbone(nn.Module):
    """One or two vision transformers that look at the same picture."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.channels = architecture.channels
        self.featurizer = _build_tower(architecture, 0)
        self.fused_featurizer = _build_tower(architecture, 1) if len(architecture.towers) == 2 else None

    @property
    def towers(self) -> list[Any]:
        """The transformers, in the order of the channels."""
        return [self.featurizer] if self.fused_featurizer is None else [self.featurizer, self.fused_featurizer]

    @property
    def width(self) -> int:
        """`F`."""
        return sum(tower.embed_dim for tower in self.towers)

    @property
    def patches(self) -> int:
        """`P`."""
        count: int = self.towers[0].patch_embed.num_patches
        return count

    def freeze(self, *, everything: bool) -> None:
        """Learn no weights of the towers, or none of those that do not touch the features: what follows the second to
        last block."""
        for tower in self.towers:
            used = ("patch_embed.", "pos_embed", "cls_token", "reg_token", "norm_pre.", "blocks.")
            last = f"blocks.{len(tower.blocks) - 1}."
            for name, parameter in tower.named_parameters():
                parameter.requires_grad_(not everything and name.startswith(used) and not name.startswith(last))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Patch features `[B, n*P, F]` of `pixel_values [B, n*channels, H, W]`, picture after picture."""
        batch = len(pixel_values)
        pictures = pixel_values.unflatten(1, (-1, self.channels)).flatten(0, 1)
        parts = pictures.split(3, dim=1)
        features = [_second_to_last(tower, part) for tower, part in zip(self.towers, parts, strict=True)]
        return torch.cat(features, dim=2).unflatten(0, (batch, -1)).flatten(1, 2)


def _build_tower(architecture: Architecture, index: int) -> nn.Module:
    activation = architecture.activations[index]
    arguments: dict[str, Any] = {} if activation is None else {"act_layer": activation}
    tower: nn.Module = timm.create_model(
        architecture.towers[index],
        pretrained=False,
        num_classes=0,
        img_size=architecture.image_sizes[index],
        **arguments,
    )
    return tower


def _second_to_last(tower: Any, pictures: Tensor) -> Tensor:
    """Output `[B, P, F]` of the second to last block, without final norm, class and register tokens."""
    (features,) = tower.forward_intermediates(
        pictures,
        indices=[len(tower.blocks) - 2],
        norm=False,
        output_fmt="NLC",
        intermediates_only=True,
        stop_early=True,
    )
    return features


class Projector(nn.Module):
    """From vision features to the language model's embeddings; two or three layers with GELU between them."""

    def __init__(self, width: int, embedding: int, deep: bool) -> None:
        super().__init__()
        hidden = 4 * width if deep else embedding
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, embedding)
        self.fc3 = nn.Linear(embedding, embedding) if deep else None

    def forward(self, features: Tensor) -> Tensor:
        """Embeddings `[B, P, E]` of features `[B, P, F]`."""
        projected = self.fc2(functional.gelu(self.fc1(features)))
        return projected if self.fc3 is None else self.fc3(functional.gelu(projected))


class PrismaticNetwork(nn.Module):
    """Vision towers, projector and language model."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.vision_backbone = VisionBackbone(architecture)
        config = LlamaConfig(**architecture.text)
        self.projector = Projector(self.vision_backbone.width, config.hidden_size, architecture.deep_projector)
        self.language_model = LlamaForCausalLM(config)

    @classmethod
    def on_meta(cls, architecture: Architecture) -> PrismaticNetwork:
        """The network without memory for its parameters, which are to be assigned."""
        with torch.device("meta"):
            network = cls(architecture)
        # Not a parameter, so no checkpoint brings it.
        network.language_model.model.rotary_emb = LlamaRotaryEmbedding(network.language_model.config)
        return network

    @classmethod
    def with_random_weights(cls, architecture: Architecture) -> PrismaticNetwork:
        """The network as it is before any training."""
        network = cls(architecture)
        for name, parameter in network.vision_backbone.named_parameters():
            if name.endswith(".gamma"):  # timm's tiny values suit fine-tuning; from nothing, blocks would not matter
                nn.init.ones_(parameter)
        return network

    @property
    def width(self) -> int:
        """`E`."""
        size: int = self.language_model.config.hidden_size
        return size

    def embed_pictures(self, pixel_values: Tensor) -> Tensor:
        """Embeddings `[B, n*P, E]` of `pixel_values [B, n*channels, H, W]`."""
        embedded: Tensor = self.projector(self.vision_backbone(pixel_values))
        return embedded

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embeddings `[B, L, E]` of token ids `[B, L]`."""
        embedded: Tensor = self.language_model.model.embed_tokens(tokens)
        return embedded

    def action_logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., bins]` of the action tokens alone, for hidden states `[..., E]`; in float32."""
        first, bins = self.architecture.first_action_token, self.architecture.bins
        return functional.linear(hidden, self.language_model.lm_head.weight[first : first + bins]).float()
