"""The network that OpenVLA and OpenVLA-OFT share: vision towers, projector, Llama; the critic; and weights in separate
files: heads, and LoRA adapters, W + scale * B A (Hu et al., 2021).

Parameter names are those of the public checkpoints, except that timm calls LayerScale's weight `gamma`, see
`checkpoint_name`. Adapters are read from the layout that the package peft writes; the package itself is not needed for
that. Shapes: `B` samples, `P` patches, `F` vision features, `L` tokens, `E` width of the language model.
"""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.models.errors import PolicyError
from embodyrl.models.libraries import LlamaConfig, LlamaForCausalLM, LlamaRotaryEmbedding, timm
from embodyrl.models.prismatic.checkpoint import head_file
from embodyrl.models.prismatic.config import Architecture
from embodyrl.models.saved import ADAPTER_FOLDER, HEADS_FILE, read_json
from embodyrl.models.vla.folder import CONFIG, described_by, first_not_finite
from embodyrl.models.weights import Naming, read_tensors

# ---------------------------------------------------------------------------------------------------------- the network


def checkpoint_name(name: str) -> str:
    """Return the name of a parameter in public checkpoints."""
    return re.sub(r"\.(ls\d)\.gamma$", r".\1.scale_factor", name)


def parameter_name(name: str) -> str:
    """Return the inverse of `checkpoint_name`."""
    return re.sub(r"\.(ls\d)\.scale_factor$", r".\1.gamma", name)


NAMING = Naming(public=checkpoint_name, own=parameter_name)


class VisionBackbone(nn.Module):
    """One or two vision transformers on the same image; their features are concatenated."""

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
        """Freeze the towers, or only the weights that do not affect the features: those after the second to last
        block."""
        for tower in self.towers:
            used = ("patch_embed.", "pos_embed", "cls_token", "reg_token", "norm_pre.", "blocks.")
            last = f"blocks.{len(tower.blocks) - 1}."
            for name, parameter in tower.named_parameters():
                parameter.requires_grad_(not everything and name.startswith(used) and not name.startswith(last))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return patch features `[B, n*P, F]` of `n` images, `pixel_values [B, n*channels, H, W]`."""
        batch = len(pixel_values)
        images = torch.unflatten(pixel_values, 1, (-1, self.channels)).flatten(0, 1)
        parts = torch.split(images, 3, dim=1)
        features = [_second_to_last(tower, part) for tower, part in zip(self.towers, parts, strict=True)]
        return torch.unflatten(torch.cat(features, dim=2), 0, (batch, -1)).flatten(1, 2)


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


def _second_to_last(tower: Any, images: Tensor) -> Tensor:
    """Return the output `[B, P, F]` of the second to last block, without final norm, class and register tokens."""
    features: Tensor
    (features,) = tower.forward_intermediates(
        images,
        indices=[len(tower.blocks) - 2],
        norm=False,
        output_fmt="NLC",
        intermediates_only=True,
        stop_early=True,
    )
    return features


class Projector(nn.Module):
    """Maps vision features to the language model's embeddings: two or three layers with GELU between them."""

    def __init__(self, width: int, embedding: int, deep: bool) -> None:
        super().__init__()
        hidden = 4 * width if deep else embedding
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, embedding)
        self.fc3 = nn.Linear(embedding, embedding) if deep else None

    def forward(self, features: Tensor) -> Tensor:
        """Return embeddings `[B, P, E]` of features `[B, P, F]`."""
        projected: Tensor = self.fc2(functional.gelu(self.fc1(features)))
        if self.fc3 is not None:
            projected = self.fc3(functional.gelu(projected))
        return projected


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
        """Build the network with parameters on the meta device."""
        with torch.device("meta"), described_by(CONFIG):
            network = cls(architecture)
        # Not a parameter, so no checkpoint contains it.
        network.language_model.model.rotary_emb = LlamaRotaryEmbedding(network.language_model.config)
        return network

    @classmethod
    def with_random_weights(cls, architecture: Architecture) -> PrismaticNetwork:
        """Build the network with random weights."""
        network = cls(architecture)
        # LayerScale: timm's tiny initial values suit fine-tuning; with random weights, blocks would have no effect.
        for name, parameter in network.vision_backbone.named_parameters():
            if name.endswith(".gamma"):
                nn.init.ones_(parameter)
        return network

    @property
    def width(self) -> int:
        """`E`."""
        size: int = self.language_model.config.hidden_size
        return size

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Return embeddings `[B, n*P, E]` of `pixel_values [B, n*channels, H, W]`."""
        embedded: Tensor = self.projector(self.vision_backbone(pixel_values))
        return embedded

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return embeddings `[B, L, E]` of token ids `[B, L]`."""
        embedded: Tensor = self.language_model.model.embed_tokens(tokens)
        return embedded

    def action_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `[..., bins]` of the action tokens only, for hidden states `[..., E]`."""
        first, bins = self.architecture.first_action_token, self.architecture.bins
        return functional.linear(hidden, self.language_model.lm_head.weight[first : first + bins]).float()


# ----------------------------------------------------------------------------------------------------------- the critic


class ValueHead(nn.Module):
    """The critic: two hidden layers with GELU, always in float32. Initial values are nearly zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        last = nn.Linear(128, 1, bias=False)
        nn.init.normal_(last.weight, std=0.02)
        self.mlp = nn.Sequential(nn.Linear(width, 512), nn.GELU(), nn.Linear(512, 128), nn.GELU(), last)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values `[B]` of hidden states `[B, E]`."""
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.mlp(hidden.float()).squeeze(-1)
        return values


# ------------------------------------------------------------------------------------------ heads in files of their own

HEAD_PREFIX = "module."
"""Prefix of every name, because the public training code saves heads inside DistributedDataParallel."""


def read_head(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors of a head by name; only tensors are read from the file.

    Raises:
        PolicyError: the file does not exist, is damaged, or contains anything else.
    """
    path = head_file(folder, name)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise PolicyError(f"{path} is damaged or holds more than tensors", "download it again") from error
    if not isinstance(content, dict) or not all(isinstance(each, Tensor) for each in content.values()):
        raise PolicyError(f"{path} holds no tensors by name", "download it again")
    return {str(key).removeprefix(HEAD_PREFIX): value for key, value in content.items()}


def write_head(head: nn.Module, folder: Path, name: str) -> None:
    """Write a head in the public layout."""
    tensors = {HEAD_PREFIX + key: value.detach().cpu().clone() for key, value in head.state_dict().items()}
    torch.save(tensors, folder / f"{name}--latest_checkpoint.pt")


# ------------------------------------------------------------------------------------------------------------- adapters

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


@torch.no_grad()
def add_adapter(network: nn.Module, folder: Path) -> None:
    """Add an adapter to the weights of a network's linear layers.

    Raises:
        PolicyError: the folder contains no adapter, or the network lacks a layer that it changes.
    """
    tensors, scale = _read_adapter(folder)
    layers = {name.removesuffix(suffix) for name in tensors for suffix in (DOWN, UP) if name.endswith(suffix)}
    expected = {name + suffix for name in layers for suffix in (DOWN, UP)}
    odd = sorted(expected ^ tensors.keys())
    if odd:
        raise PolicyError(f"{folder}: only pairs of lora_A and lora_B are supported, found {', '.join(odd[:4])}")
    modules = dict(network.named_modules())
    unknown = sorted(name for name in layers if not hasattr(modules.get(name), "weight"))
    if unknown:
        raise PolicyError(f"{folder} changes layers that the model does not have: {', '.join(unknown[:4])}")
    for name in sorted(layers):
        weight: Tensor = modules[name].weight
        change = (tensors[name + UP].float() @ tensors[name + DOWN].float()).reshape(-1, *weight.shape[1:])
        if change.shape != weight.shape:
            raise PolicyError(f"{folder}: {name} is {list(change.shape)}, the model has {list(weight.shape)}")
        weight.copy_(weight.float() + scale * change.to(weight.device))


def heads_beside(folder: Path) -> Path | None:
    """Return the file of weights that were trained in full beside an adapter: in its folder if it was exported, in the
    parent folder in a checkpoint. None for adapters from elsewhere."""
    places = [folder, folder.parent] if folder.name == ADAPTER_FOLDER else [folder]
    return next((place / HEADS_FILE for place in places if (place / HEADS_FILE).is_file()), None)


def _read_adapter(folder: Path) -> tuple[dict[str, Tensor], float]:
    """Return tensors by name in the network, and the scale of their products."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise PolicyError(f"{folder} holds no {name}", "give the folder of a LoRA adapter")
    config, tensors = read_json(folder / ADAPTER_CONFIG), read_tensors(folder / ADAPTER_WEIGHTS)
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("rank_pattern"):
        raise PolicyError(f"{folder / ADAPTER_CONFIG}: only plain LoRA adapters are supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if rank is None or alpha is None or first_not_finite([rank, alpha]) is not None or rank <= 0:
        raise PolicyError(
            f"{folder / ADAPTER_CONFIG}: r and lora_alpha are {rank!r:.30} and {alpha!r:.30}, numbers were expected",
            "download it again",
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}, scale
