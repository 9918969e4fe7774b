"""Read and write sharded safetensors, shard by shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.models.errors import PolicyError
from embodyrl.models.saved import (
    INDEX_FILE,
    SINGLE_FILE,
    WeightLayout,
    open_shard,
    parse_json,
    shard_files,
    weight_shapes,
)
from embodyrl.models.vla.config import WeightType

DTYPES = {WeightType.float32: torch.float32, WeightType.bfloat16: torch.bfloat16}
FORMAT: Mapping[str, str] = {"format": "pt"}
"""Metadata of most public files."""
SHARD_BYTES = 5 * 10**9
_NAMED = 8
"""Wrong names that an error lists at most."""


@dataclass(frozen=True)
class Naming:
    """Mapping between a network's parameter names and those of public checkpoints."""

    public: Callable[[str], str]
    """From a name in the network to the name in a file that is written."""
    own: Callable[[str], str | None]
    """From a name in a file to the name in the network; None: the network does not use the tensor."""


def read_weights(
    network: nn.Module, folder: Path, naming: Naming, *, alike: tuple[str, ...] = ()
) -> dict[str, torch.dtype]:
    """Read a checkpoint into a network, whose parameters may be on the meta device, in the parameters' types.

    A parameter on the meta device is replaced by the tensor that was read; others are overwritten. So at most one
    tensor is in memory twice.

    Args:
        network: see above.
        folder: of the checkpoint.
        naming: names in its files.
        alike: parameters that are equal where the files hold one of them; each gets a copy of its own.

    Returns:
        The types in the files, by the network's names.

    Raises:
        PolicyError: files are missing or damaged, or names or shapes differ (each is named).
    """
    own = dict(network.named_parameters())
    shapes = weight_shapes(folder)
    found = {name: shape for public, shape in shapes.items() if (name := naming.own(public)) is not None}
    held = [name for name in alike if name in found]
    copies = [name for name in alike if name not in found] if held else []
    found |= {name: found[held[0]] for name in copies}
    if faults := differences(shapes_of(own), found, naming.public):
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise PolicyError(f"weights in {folder} do not fit: {'; '.join(faults[:_NAMED])}{more}")
    types: dict[str, torch.dtype] = {}
    for path in shard_files(folder):
        for public, tensor in _tensors(path):
            if (name := naming.own(public)) is not None:
                for each in (name, *(copies if held and name == held[0] else ())):
                    types[each] = tensor.dtype
                    _assign(network, each, tensor if each == name else tensor.clone())
    return types


def read_metadata(folder: Path) -> Mapping[str, str] | None:
    """Return the metadata of a checkpoint's first file of weights, None if it has none; raises what `read_weights`
    does."""
    with open_shard(shard_files(folder)[0], "pt") as shard:
        found: Mapping[str, str] | None = shard.metadata()
    return found


def _tensors(path: Path, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield a file's tensors with their names; `names`: only these, None: all."""
    with open_shard(path, "pt") as shard:
        for name in shard.keys():  # noqa: SIM118 - not a mapping
            if names is None or name in names:
                yield name, shard.get_tensor(name)


def read_named(folder: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Return some tensors of a checkpoint, by their names in its files; raises what `read_weights` does."""
    return {name: tensor for path in shard_files(folder) for name, tensor in _tensors(path, names)}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file.

    Raises:
        PolicyError: the file is no safetensors file, or incomplete.
    """
    with open_shard(path, "pt") as shard:
        return {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - not a mapping


def differences(
    own: Mapping[str, Sequence[int]],
    found: Mapping[str, Sequence[int]],
    shown: Callable[[str], str] = str,
    kind: type[list[int] | tuple[int, ...]] = list,
) -> list[str]:
    """Return in which names and shapes tensors that were found differ from a module's own.

    Args:
        own: shapes of its own, by name.
        found: shapes of what was found.
        shown: name that is shown for a name.
        kind: type that shapes are shown as.
    """
    faults = [f"missing {shown(name)}" for name in sorted(own.keys() - found.keys())]
    faults += [f"unexpected {shown(name)}" for name in sorted(found.keys() - own.keys())]
    faults += [
        f"{shown(name)} has shape {kind(found[name])}, expected {kind(own[name])}"
        for name in sorted(own.keys() & found.keys())
        if tuple(found[name]) != tuple(own[name])
    ]
    return faults


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Sequence[int]]:
    """Return the shapes of tensors by name."""
    return {name: tensor.shape for name, tensor in tensors.items()}


def _assign(network: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    module = network.get_submodule(path)
    parameter = module.get_parameter(attribute)
    if parameter.is_meta:
        fresh = nn.Parameter(tensor.to(parameter.dtype), requires_grad=parameter.requires_grad)
        setattr(module, attribute, fresh)
    else:
        parameter.data.copy_(tensor)


def write_single_file(
    network: nn.Module,
    folder: Path,
    naming: Naming,
    *,
    types: Mapping[str, torch.dtype] = MappingProxyType({}),
    others: Mapping[str, Tensor] = MappingProxyType({}),
    metadata: Mapping[str, str] | None = FORMAT,
    without: Collection[str] = (),
) -> None:
    """Write a network's parameters to one file in the public layout.

    Args:
        network: its parameters are written in their own types.
        folder: that the file is written into.
        naming: names in the file.
        types: smaller types to write parameters in where that loses nothing, by the network's names.
        others: further tensors, by their names in the file.
        metadata: of the file, see `read_metadata`.
        without: parameters that are not written, by the network's names.
    """
    tensors = {
        naming.public(name): _without_loss(parameter.detach(), types.get(name)).contiguous()
        for name, parameter in network.named_parameters()
        if name not in without
    }
    save_file(tensors | dict(others), folder / SINGLE_FILE, metadata=None if metadata is None else dict(metadata))


def write_as_read(
    network: nn.Module,
    folder: Path,
    naming: Naming,
    layout: WeightLayout,
    *,
    types: Mapping[str, torch.dtype] = MappingProxyType({}),
    others: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write a network's parameters to the same files, under the same names, that they were read from.

    Args:
        network: its parameters are written.
        folder: that the files are written into.
        naming: names in the files; several of them may mean one parameter.
        layout: of the files.
        types, others: see `write_single_file`.
    """
    parameters = dict(network.named_parameters())
    total = 0
    for file, names in layout.shapes.items():
        tensors: dict[str, Tensor] = {}
        for public in names:
            name = naming.own(public)
            tensor = others[public] if name is None else _without_loss(parameters[name].detach(), types.get(name))
            tensors[public] = tensor.contiguous()
            total += tensor.nbytes
        kept = [tensor for name, tensor in tensors.items() if naming.own(name) is not None]
        if len({tensor.data_ptr() for tensor in kept}) != len(kept):  # two names of one tensor, which is refused
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        save_file(tensors, folder / file, metadata=layout.metadata[file])
    if layout.index is not None:
        index = parse_json(layout.index, INDEX_FILE)
        sizes = index.get("metadata")
        if isinstance(sizes, dict) and sizes.get("total_size", total) != total:
            sizes["total_size"] = total
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        else:
            (folder / INDEX_FILE).write_bytes(layout.index)


def _without_loss(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the tensor in a type if it can hold all of its numbers, else as it is."""
    if dtype is None or dtype is tensor.dtype:
        return tensor
    smaller = tensor.to(dtype)
    return smaller if torch.equal(smaller.to(tensor.dtype), tensor) else tensor


def write_weights(network: nn.Module, folder: Path, naming: Naming) -> None:
    """Write a network's parameters in shards in the public layout, in their own types."""
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, parameter in network.named_parameters():
        if parameter.nbytes > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][naming.public(name)] = parameter.detach()
        room -= parameter.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in shard.items()}
        save_file(tensors, folder / file, metadata=dict(FORMAT))
        weight_map |= dict.fromkeys(shard, file)
    total = sum(parameter.nbytes for parameter in network.parameters())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def load_strictly(module: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Load tensors into a module.

    Raises:
        PolicyError: names or shapes differ (each is named).
    """
    if faults := differences(shapes_of(module.state_dict()), shapes_of(tensors)):
        raise PolicyError(f"the checkpoint's {name} does not fit: {'; '.join(faults)}")
    module.load_state_dict(dict(tensors))


def fill(own: dict[str, Tensor], found: dict[str, Tensor], path: Path) -> None:
    """Copy tensors into others of the same names and shapes.

    Raises:
        PolicyError: names or shapes differ (the first is named).
    """
    shapes = [{name: list(shape) for name, shape in shapes_of(some).items()} for some in (own, found)]
    odd = [name for name in sorted(own.keys() | found.keys()) if shapes[0].get(name) != shapes[1].get(name)]
    if odd:
        rest = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        expected, got = (each.get(odd[0], "nothing") for each in shapes)
        raise PolicyError(f"{path} does not fit: {odd[0]} is {got}, the policy has {expected}{rest}")
    with torch.no_grad():
        for name, tensor in found.items():
            own[name].copy_(tensor)


def write_heads(heads: Mapping[str, nn.Module], path: Path) -> None:
    """Write parts that public checkpoints do not contain, by name, to a file of their own."""
    tensors = {
        f"{name}.{key}": value.contiguous() for name, head in heads.items() for key, value in head.state_dict().items()
    }
    save_file(tensors, path)


def read_heads(heads: Mapping[str, nn.Module], path: Path) -> None:
    """Read the file of `write_heads`, if it is there; a head that is not in it keeps its weights.

    Raises:
        PolicyError: names or shapes of weights differ (each is named).
    """
    if not path.is_file():
        return
    tensors = read_tensors(path)
    for name, head in heads.items():
        start = f"{name}."
        own = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
        if own:
            load_strictly(head, own, name)
