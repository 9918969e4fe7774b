"""LoRA adapters, added to the weights of a checkpoint: W + scale * B A (Hu et al., 2021).

Read from the layout that the package peft writes; the package itself is not needed for that.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from embodyrl.models.errors import PolicyError
from embodyrl.models.saved import ADAPTER_FOLDER, HEADS_FILE

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


@torch.no_grad()
def add_adapter(network: nn.Module, folder: Path) -> None:
    """Add an adapter to a network's linear layers.

    Raises:
        PolicyError: the folder holds no adapter, or the adapter changes something that the network does not have.
    """
    tensors, scale = _read(folder)
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
    """The file of what learned in full beside an adapter of ours: with it where it was exported, above it in a
    checkpoint. Adapters from elsewhere have none."""
    places = [folder, folder.parent] if folder.name == ADAPTER_FOLDER else [folder]
    return next((place / HEADS_FILE for place in places if (place / HEADS_FILE).is_file()), None)


def _read(folder: Path) -> tuple[dict[str, Tensor], float]:
    """Tensors by name in the network, and what their products are multiplied by."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise PolicyError(f"{folder} holds no {name}: give the folder of a LoRA adapter")
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        tensors = load_file(folder / WEIGHTS_FILE)
    except (ValueError, SafetensorError) as error:
        raise PolicyError(f"the LoRA adapter in {folder} is damaged ({error}): download it again") from error
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("rank_pattern"):
        raise PolicyError(f"{folder / CONFIG_FILE}: only plain LoRA adapters are supported")
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}, scale
