"""The tensors that are sent, and their order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.engine.parallel import is_sharded
from embodyrl.engine.sync.checksum import checksum_of
from embodyrl.engine.sync.errors import ChecksumError, LayoutError

ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor as it travels."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As in torch: `bfloat16`."""
    changes: bool = True
    """Whether learning changes it; the others travel once, or never."""
    sum: int | None = None
    """Of one that never travels: its `checksum_of` at the sender, which the receiver's own has to have."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        kind = getattr(torch, self.dtype, None)
        if not isinstance(kind, torch.dtype):
            raise LayoutError(f"tensor {self.name!r} has the type {self.dtype!r}, which torch does not know")
        return kind

    @property
    def num_bytes(self) -> int:
        """Size, rounded up so that the next one is aligned."""
        size = torch.Size(self.shape).numel() * self.torch_dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT

    def view(self, data: Tensor) -> Tensor:
        """This tensor in its bytes `data`, uint8 `[num_bytes]`."""
        count = torch.Size(self.shape).numel()
        return data[: count * self.torch_dtype.itemsize].view(self.torch_dtype).view(self.shape)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those that are saved; they share memory with the module. Sharded ones are this
    rank's part."""
    return {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor; one that is sharded is gathered, for which all ranks must call this."""
    if not is_sharded(tensor):
        return tensor
    from embodyrl.engine.sharding import gathered

    return gathered(tensor)


def take_part(entries: Iterable[Entry], weights: Mapping[str, Tensor]) -> None:
    """Gather sharded tensors one after the other, on a rank that does not keep them, for the one that packs them."""
    for entry in entries:
        whole(weights[entry.name])


def held_by(module: nn.Module) -> list[Entry]:
    """Return what a module holds. A parameter changes if it requires a gradient; a buffer may always."""
    return [
        Entry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            changes=tensor.requires_grad or not isinstance(tensor, nn.Parameter),
        )
        for name, tensor in module.state_dict(keep_vars=True).items()
    ]


def travelling(sender: Sequence[Entry], receiver: Sequence[Entry]) -> list[Entry]:
    """Return what travels: the sender's tensors in the receiver's types, those that never change in front.

    Raises:
        LayoutError: a tensor is missing or unexpected, or has another shape or a type that cannot be converted without
            loss of meaning; every one of them is named.
    """
    has, wants = {each.name: each for each in sender}, {each.name: each for each in receiver}
    faults = [f"the receiver lacks {name}" for name in has.keys() - wants.keys()]
    faults += [f"the sender lacks {name}" for name in wants.keys() - has.keys()]
    for name in has.keys() & wants.keys():
        ours, theirs = has[name], wants[name]
        if ours.shape != theirs.shape:
            faults.append(f"{name} has shape {ours.shape} at the sender and {theirs.shape} at the receiver")
        kinds = {each.torch_dtype for each in (ours, theirs)}
        if len(kinds) > 1 and not all(kind.is_floating_point for kind in kinds):
            faults.append(f"{name} is {ours.dtype} at the sender and {theirs.dtype} at the receiver")
    if faults:
        raise LayoutError(f"weights of sender and receiver do not fit: {'; '.join(sorted(faults))}")
    entries = [Entry(name=e.name, shape=e.shape, dtype=wants[e.name].dtype, changes=e.changes) for e in sender]
    return sorted(entries, key=lambda each: each.changes)


def check_fit(sent: Sequence[Entry], held: Sequence[Entry]) -> None:
    """Object if what a sender sends is not what a receiver holds, types included.

    Raises:
        LayoutError: names every difference.
    """
    travelling(sent, held)
    types = {each.name: each.dtype for each in held}
    faults = [
        f"{each.name} is sent as {each.dtype} and is {types[each.name]} at the receiver"
        for each in sent
        if each.dtype != types[each.name]
    ]
    if faults:
        raise LayoutError(f"weights of sender and receiver do not fit: {'; '.join(sorted(faults))}")


def to_json(entries: Iterable[Entry]) -> bytes:
    """Return entries as JSON for the other side."""
    return json.dumps([asdict(each) for each in entries]).encode()


def from_json(text: bytes) -> list[Entry]:
    """Return the entries that `to_json` wrote."""
    found: list[dict[str, Any]] = json.loads(text)
    return [Entry(**each | {"shape": tuple(each["shape"])}) for each in found]


def pack(entries: Sequence[Entry], weights: Mapping[str, Tensor], out: Tensor) -> None:
    """Copy tensors into their bytes `out`, uint8, one after the other, converting where types differ. What lies between
    them is 0, so that equal tensors make equal bytes. Of sharded tensors no more than one is whole at a time."""
    start = 0
    for entry in entries:
        data = out[start : start + entry.num_bytes]
        tensor = entry.view(data)
        tensor.copy_(whole(weights[entry.name]))
        data[tensor.nbytes :].zero_()
        start += entry.num_bytes


@torch.no_grad()
def unpack(entries: Sequence[Entry], data: Tensor, weights: Mapping[str, Tensor]) -> None:
    """Copy bytes, as `pack` lays them out, into tensors."""
    start = 0
    for entry in entries:
        weights[entry.name].copy_(entry.view(data[start : start + entry.num_bytes]))
        start += entry.num_bytes


def summed(entries: Iterable[Entry], weights: Mapping[str, Tensor]) -> list[Entry]:
    """Return entries with the sums of their tensors, in the types of the entries."""
    return [replace(each, sum=checksum_of(whole(weights[each.name]).to(each.torch_dtype))) for each in entries]


def check_same(entries: Iterable[Entry], weights: Mapping[str, Tensor]) -> None:
    """Object if a tensor that does not travel is not the sender's.

    Raises:
        ChecksumError: names the first that differs.
    """
    for entry in entries:
        if checksum_of(weights[entry.name]) != entry.sum:
            raise ChecksumError(
                f"the frozen weights of sender and receiver differ, first in {entry.name}: they are not sent, so both "
                "processes must have read the same files; did model.checkpoint or model.adapter change while the run "
                "continued?"
            )


def total_bytes(entries: Iterable[Entry]) -> int:
    """Size of what `pack` writes."""
    return sum(each.num_bytes for each in entries)
