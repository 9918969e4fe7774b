"""LoRA: instead of a layer's weights W, two narrow matrices learn that are added to them, W + alpha / rank * B A.

Hu et al. (2021), arXiv:2106.09685, eq. 3, by the package peft. Layers that a model's `parallel_plan` calls adaptable
get adapters, its heads learn in full, and all other weights are frozen, without gradients and optimiser state.

A run with adapters saves adapters and heads; the other weights do not change. A saved policy's folder holds
`adapter/` in peft's layout (which `model.adapter` and peft itself read), `heads.safetensors`, and, only where the model
started from random weights, those, in the model's public layout.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodyrl.config.schema import LoraConfig, ModelConfig
from embodyrl.errors import did_you_mean
from embodyrl.hub import name_of
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.steering import SteeredPolicy
from embodyrl.models.policy import Policy
from embodyrl.models.saved import ADAPTER_FOLDER, BASE_FILE, HEADS_FILE
from embodyrl.models.weights import fill
from embodyrl.seeding import derive_seed

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""In front of every name in peft's files: where PeftModel keeps the model."""
_NAME = "default"
"""peft's name for the only adapter."""


def add_adapters(policy: Policy, config: LoraConfig, seed: int) -> None:
    """Put adapters around a policy's layers and freeze everything else but its heads.

    The policy's outputs stay the same: B starts at 0.

    Args:
        policy: changed in place.
        config: rank (1 or more), alpha, targets.
        seed: of A's random numbers.

    Raises:
        PolicyError: the policy has no layers for adapters, or none that the targets name.
    """
    plan = policy.parallel_plan()
    layers = choose_layers(policy, config.targets)
    heads = [each for name in plan.heads for each in policy.get_submodule(name).parameters() if each.requires_grad]
    policy.requires_grad_(False)
    root = f"{plan.root}." if plan.root else ""
    with torch.random.fork_rng(devices=[]), _without_bitsandbytes():
        from embodyrl.models.libraries import load_peft

        peft = load_peft()
        settings = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=[layer.removeprefix(root) for layer in layers],
            bias="none",
        )
        torch.manual_seed(derive_seed(seed, "adapters"))
        peft.inject_adapter_in_model(settings, policy.get_submodule(plan.root))
    for parameter in heads:  # peft freezes all but adapters below the root, where heads may be too
        parameter.requires_grad_(True)
    # Adapters learn, so they are float32 even on weights in 16 bits.
    for layer in adapted_layers(policy).values():
        layer.lora_A.float()
        layer.lora_B.float()


@contextmanager
def _without_bitsandbytes() -> Iterator[None]:
    """Let bitsandbytes seem not to be installed for the length of a block, unless it is imported already.

    peft imports it for quantised layers, which no policy has; it takes seconds, and warns where there is no GPU.
    """
    name = "bitsandbytes"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # Python's way to say that there is no such module
    try:
        yield
    finally:
        del sys.modules[name]


def choose_layers(policy: Policy, targets: list[str]) -> list[str]:
    """Return the layers that get adapters: those that the policy calls adaptable, that are not frozen, and whose
    names end in one of `targets` (none: those that it adapts by default).

    Raises:
        PolicyError: there are none.
    """
    plan = policy.parallel_plan()
    adaptable = plan.adaptable if targets else plan.adapted or plan.adaptable
    learning = [name for name in adaptable if policy.get_parameter(f"{name}.weight").requires_grad]
    if not learning:
        raise PolicyError(
            f"engine.lora: model {policy.name!r} has no layers that an adapter could change: set engine.lora.rank=0"
        )
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in learning):
            endings = sorted({name.rpartition(".")[2] for name in learning})
            raise PolicyError(
                f"engine.lora.targets: no layer of model {policy.name!r} that learns ends in {target!r}",
                did_you_mean(target, endings, otherwise=f"layers end in {', '.join(endings)}"),
            )
    return [name for name in learning if not targets or any(f".{name}".endswith(f".{target}") for target in targets)]


def adapted_layers(policy: nn.Module) -> dict[str, Any]:
    """Return the layers with adapters by name (peft's LoraLayer, recognised without importing peft)."""
    return {name: module for name, module in policy.named_modules() if hasattr(module, "lora_A")}


def cast_once(policy: nn.Module) -> None:
    """Let adapters take their input as it comes, in a policy that computes under autocast only.

    peft converts it to the adapters' float32 first, which autocast turns back into 16 bits for the matrix product: the
    same numbers, and two copies of the input for every layer.
    """
    for layer in adapted_layers(policy).values():
        layer.cast_input_dtype_enabled = False


@contextmanager
def without_adapters(policy: nn.Module) -> Iterator[None]:
    """Remove the adapters from a policy for the length of a block, so that its parameters have their public names."""
    layers = adapted_layers(policy)
    for name, layer in layers.items():
        policy.set_submodule(name, layer.get_base_layer())
    try:
        yield
    finally:
        for name, layer in layers.items():
            policy.set_submodule(name, layer)


def merge(policy: nn.Module) -> None:
    """Merge the adapters into the weights permanently; the policy then saves in its public layout."""
    for name, layer in adapted_layers(policy).items():
        layer.merge(safe_merge=True)
        policy.set_submodule(name, layer.get_base_layer())


def save_policy(policy: Policy, folder: Path, config: ModelConfig, before: Path | None = None) -> None:
    """Write a policy into an existing folder, with adapters or without; `before` is the folder that this run has saved
    it in before."""
    if adapted_layers(policy):
        save_adapted(policy, folder, config)
    elif isinstance(policy, SteeredPolicy):
        policy.save(folder, config, before)
    else:
        policy.save(folder, config)


def load_weights_into(policy: Policy, folder: Path) -> None:
    """Read what `save_policy` wrote, into a policy like the one that was saved.

    Raises:
        PolicyError: files are missing or damaged, or do not fit.
    """
    if adapted_layers(policy):
        load_adapted(policy, folder)
    elif (folder / BASE_FILE).is_file():
        raise PolicyError(f"{folder} holds adapters, but engine.lora.rank is 0: set the rank that the run had")
    else:
        policy.load(folder)


def save_adapted(policy: Policy, folder: Path, config: ModelConfig) -> None:
    """Write a policy with adapters into an existing folder; see the module's docstring."""
    if config.checkpoint is None:
        with without_adapters(policy):
            policy.save(folder, config)
    save_adapter(policy, folder / ADAPTER_FOLDER, config.checkpoint)
    save_file(policy.head_tensors(), folder / HEADS_FILE)
    origin = None if config.checkpoint is None else name_of(config.checkpoint)
    base = {
        "checkpoint": config.checkpoint if origin is None else str(origin),
        "adapter": getattr(config, "adapter", None),
    }
    options = dataclasses.asdict(policy.options_to_save(config))
    description = {"base": base, "options": options, "spec": dataclasses.asdict(policy.spec)}
    (folder / BASE_FILE).write_text(json.dumps(description, indent=2) + "\n")


def load_adapted(policy: Policy, folder: Path) -> None:
    """Read what `save_adapted` wrote into a policy that was built from the same config and has adapters.

    Raises:
        PolicyError: files are missing or damaged, or do not fit.
    """
    if not (folder / BASE_FILE).is_file():
        raise PolicyError(f"{folder} holds no {BASE_FILE}: it is not the policy of a run with engine.lora.rank > 0")
    if json.loads((folder / BASE_FILE).read_text())["base"]["checkpoint"] is None:
        with without_adapters(policy):
            policy.load(folder)
    fill(policy.head_tensors(), _read(folder / HEADS_FILE), folder / HEADS_FILE)
    load_adapter(policy, folder / ADAPTER_FOLDER)


def save_adapter(policy: Policy, folder: Path, base: str | None) -> None:
    """Write only the adapters, in peft's layout.

    Args:
        policy: has adapters.
        folder: created if it does not exist.
        base: folder or name of the adapted model, for the reader.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter_tensors(policy), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    layers = adapted_layers(policy)
    layer = next(iter(layers.values()))
    origin = None if base is None else name_of(base)
    description = {
        "peft_type": "LORA",
        "base_model_name_or_path": base if origin is None else origin.repo,
        "revision": None if origin is None else origin.revision,
        "r": layer.r[_NAME],
        "lora_alpha": layer.lora_alpha[_NAME],
        "target_modules": sorted(_in_public(policy, layers)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": None,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(description, indent=2) + "\n")


def load_adapter(policy: Policy, folder: Path) -> None:
    """Read what `save_adapter` wrote.

    Raises:
        PolicyError: files are missing or damaged, or the adapters are others.
    """
    fill(adapter_tensors(policy), _read(folder / WEIGHTS_FILE), folder / WEIGHTS_FILE)


def adapter_tensors(policy: Policy) -> dict[str, Tensor]:
    """Return the adapters' matrices by their names in peft's files; they share memory with the policy."""
    layers = adapted_layers(policy)
    return {
        f"{PREFIX}{name}.{part}.weight": getattr(layer, part)[_NAME].weight.detach()
        for name, layer in zip(_in_public(policy, layers), layers.values(), strict=True)
        for part in ("lora_A", "lora_B")
    }


def _in_public(policy: Policy, names: Iterable[str]) -> list[str]:
    """Return the names of layers in the public checkpoint's model."""
    root = policy.parallel_plan().root  # once: a plan reads all modules of a model
    return [name.removeprefix(f"{root}.") if root else name for name in names]


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise PolicyError(f"{path} is missing: give the `policy` folder of a checkpoint of a run with adapters")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise PolicyError(f"{path} is damaged ({error}): use another checkpoint of the run") from error
