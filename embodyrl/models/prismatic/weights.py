"""Sharded safetensors, read and written shard by shard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.models.errors import PolicyError
from embodyrl.models.prismatic.files import INDEX_FILE, open_shard, shard_files
from embodyrl.models.prismatic.network import checkpoint_name, parameter_name

SHARD_BYTES = 5 * 10**9
_NAMED = 8
"""How many wrong names an error lists."""


def read_weights(network: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Read a checkpoint into a network, whose parameters may be on the meta device.

    A parameter without memory gets the tensor that was read; one that has memory is overwritten. So no more than one
    tensor is in memory twice.

    Raises:
        PolicyError: files are missing or damaged, or names or shapes differ; they are named.
    """
    own = dict(network.named_parameters())
    found: dict[str, tuple[int, ...]] = {}
    shards = shard_files(folder)
    for path in shards:
        found |= {parameter_name(name): shape for name, shape in _shapes(path)}
    _check_names(own, found, folder)
    for path in shards:
        for name, tensor in _tensors(path):
            _assign(network, parameter_name(name), tensor, dtype)


def _shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with open_shard(path, "pt") as shard:
        for name in shard.keys():  # noqa: SIM118 - not a mapping
            yield name, tuple(shard.get_slice(name).get_shape())


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with open_shard(path, "pt") as shard:
        for name in shard.keys():  # noqa: SIM118 - not a mapping
            yield name, shard.get_tensor(name)


def _check_names(own: Mapping[str, Tensor], found: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    faults = [f"missing {checkpoint_name(name)}" for name in sorted(own.keys() - found.keys())]
    faults += [f"unexpected {checkpoint_name(name)}" for name in sorted(found.keys() - own.keys())]
    faults += [
        f"{checkpoint_name(name)} has shape {list(found[name])}, expected {list(own[name].shape)}"
        for name in sorted(own.keys() & found.keys())
        if found[name] != tuple(own[name].shape)
    ]
    if faults:
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise PolicyError(f"weights in {folder} do not fit: {'; '.join(faults[:_NAMED])}{more}")


def _assign(network: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    path, _, attribute = name.rpartition(".")
    module = network.get_submodule(path)
    parameter = module.get_parameter(attribute)
    if parameter.is_meta:
        fresh = nn.Parameter(tensor.to(dtype), requires_grad=parameter.requires_grad)
        setattr(module, attribute, fresh)
    else:
        parameter.data.copy_(tensor)


def write_weights(network: nn.Module, folder: Path) -> None:
    """Write a network's parameters in the public layout, in the type that they have."""
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, parameter in network.named_parameters():
        if parameter.nbytes > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][checkpoint_name(name)] = parameter.detach()
        room -= parameter.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in shard.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(parameter.nbytes for parameter in network.parameters())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
