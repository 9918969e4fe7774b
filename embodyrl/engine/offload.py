"""What only learning needs is away from the device while the policy acts (`engine.offload`).

- The optimiser's state (with its full-precision copies of the weights, if it has any) is on the device in training mode
  only. `optimizer` and `all`.
- The weights of the reference policy are on the device only while it scores a batch. `all`, unless it is sharded.

The policy's weights stay: it acts and learns with the same ones. Tensors keep their identity, only their numbers move,
so that no value changes and whoever holds one (optimiser, checkpoint) sees it wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embodyrl.config.schema import Offload
from embodyrl.engine.host_memory import HostMemory, extent, host_memory, memory_in_use
from embodyrl.tracking.clock import Clock, Phase

_ALIGNMENT = 64


class Offloaded:
    """Tensors that are on the device only while they are needed.

    Args:
        tensors: gives them; other ones from time to time (an optimiser makes its state in its first step). Those with
            one number stay where they are.
        device: where they are needed.
        folder: where a file for them may be, if the device is the CPU.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, device: torch.device, folder: Path) -> None:
        self._tensors = tensors
        self._device = device
        self._folder = folder
        self._memory: HostMemory | None = None
        self._places: list[Tensor] = []
        self.freed: int | None = None
        """Bytes that leaving freed on the device the last time, as measured; None if nothing has left yet."""

    def offload(self) -> None:
        """Take them off the device; harmless when they are."""
        tensors = self._movable()
        if not tensors:
            return
        before = memory_in_use(self._device)
        self._reserve(tensors)
        moving = [pair for pair in zip(tensors, self._places, strict=True) if not same_memory(*pair)]
        if self._memory is None or not moving:
            return
        for tensor, place in moving:
            place.copy_(tensor, non_blocking=True)
            tensor.data = place
        self._memory.settle()
        self.freed = before - memory_in_use(self._device)

    def onload(self) -> None:
        """Bring them to the device; harmless when they are there."""
        if self._memory is None:
            return
        for tensor in filter(self._memory.holds, self._movable()):
            here = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            tensor.data = here.copy_(tensor, non_blocking=True)
        self._memory.settle()

    def _movable(self) -> list[Tensor]:
        """The tensors themselves; of a sharded one the part that is here."""
        local = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in self._tensors())
        return [tensor for tensor in local if tensor.numel() > 1]

    def _reserve(self, tensors: list[Tensor]) -> None:
        """Have a place for each of them; the block of memory stays as long as it fits."""
        wanted = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if wanted == [(place.shape, place.stride(), place.dtype) for place in self._places]:
            return
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-extent(tensor) * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self._memory = memory = host_memory(end, self._device, self._folder)
        self._places = [memory.place(*pair) for pair in zip(offsets, tensors, strict=True)]


class EngineOffload:
    """What an engine's setting keeps away from its device, and when.

    Args:
        setting: `engine.offload`.
        policy: learns; its weights stay.
        optimizer: of the policy.
        reference: the reference policy, if there is one.
        device: where the engine computes.
        folder: where files may be, if that is the CPU.
        clock: moving counts as `sync`.
    """

    def __init__(
        self,
        setting: Offload,
        *,
        policy: nn.Module,
        optimizer: torch.optim.Optimizer,
        reference: nn.Module | None,
        device: torch.device,
        folder: Path,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._parts: dict[str, Offloaded] = {}
        weights = {id(parameter) for parameter in policy.parameters()}
        if setting is not Offload.none:
            self._parts["optimizer"] = Offloaded(
                lambda: optimizer_tensors(optimizer, weights), device=device, folder=folder
            )
        # Of a sharded module FSDP holds the memory itself; each rank has only its share of it.
        if setting is Offload.all and reference is not None and not is_sharded(reference):
            self._parts["reference"] = Offloaded(
                lambda: (*reference.parameters(), *reference.buffers()), device=device, folder=folder
            )
        self._here_now: set[str] = set()
        self.put_away()

    def optimizer_here(self) -> AbstractContextManager[None]:
        """Have the optimiser's state on the device for the length of a block."""
        return self._here("optimizer")

    def reference_here(self) -> AbstractContextManager[None]:
        """Have the reference policy on the device for the length of a block."""
        return self._here("reference")

    @contextmanager
    def _here(self, name: str) -> Iterator[None]:
        part = self._parts.get(name)
        if part is None or name in self._here_now:
            yield
            return
        with self._clock.measure(Phase.sync):
            part.onload()
        self._here_now.add(name)
        try:
            yield
        finally:
            self._here_now.remove(name)
            with self._clock.measure(Phase.sync):
                part.offload()

    def put_away(self) -> None:
        """Take everything off the device: at the beginning, and after a checkpoint has brought it there."""
        for part in self._parts.values():
            part.offload()

    def metrics(self) -> dict[str, float]:
        """Memory that the device got back when each part left it the last time [MiB], as measured."""
        return {
            f"memory/{name}_freed_mib": part.freed / 2**20
            for name, part in self._parts.items()
            if part.freed is not None
        }


def is_sharded(module: nn.Module) -> bool:
    """Whether its parameters are spread over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def optimizer_tensors(optimizer: torch.optim.Optimizer, weights: set[int]) -> Iterator[Tensor]:
    """An optimiser's state, and the parameters that it steps if they are copies of its own.

    Args:
        optimizer: any.
        weights: ids of the parameters that the policy computes with.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in weights:
                yield parameter
            yield from (value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor))


def same_memory(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one layout are the same numbers in memory."""
    return left.data_ptr() == right.data_ptr()
