"""Offloading of tensors that only learning needs while the policy acts (`engine.offload`).

- The optimiser's state (with its float32 copies of the weights, if it has any) is on the device only in training mode.
  `optimizer` and `all`.
- The weights of the reference policy are on the device only while it scores a batch. `all`, unless it is sharded.

The policy's weights stay: it acts and learns with the same ones. Tensors keep their identity, only their storage moves,
so that no value changes and every holder of a tensor (optimiser, checkpoint) reads it wherever it is.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from embodyrl.config.schema import Offload
from embodyrl.engine.parallel import is_sharded
from embodyrl.errors import RunError, UserError
from embodyrl.files import reserve
from embodyrl.tracking.clock import Clock, Phase

_ALIGNMENT = 64
_IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are memory."""


class Offloaded:
    """Tensors that are on the device only while they are needed.

    Args:
        tensors: returns them; not always the same ones, since an optimiser makes its state in its first step. Tensors
            of one number stay on the device.
        device: where they are needed.
        folder: for a file with their numbers, if the device is the CPU.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, device: torch.device, folder: Path) -> None:
        self._tensors = tensors
        self._device = device
        self._folder = folder
        self._memory: HostMemory | None = None
        self._places: list[Tensor] = []
        self.freed: int | None = None
        """Bytes that the last `offload` freed on the device, as measured; None before the first."""

    def offload(self) -> None:
        """Move the tensors off the device; does nothing if they are."""
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
        """Move the tensors to the device; does nothing if they are there."""
        if self._memory is None:
            return
        for tensor in filter(self._memory.holds, self._movable()):
            here = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            tensor.data = here.copy_(tensor, non_blocking=True)
        self._memory.settle()

    def _movable(self) -> list[Tensor]:
        """Return the tensors to move; of a sharded one this rank's part."""
        local = (tensor._local_tensor if is_sharded(tensor) else tensor for tensor in self._tensors())
        return [tensor for tensor in local if tensor.numel() > 1]

    def _reserve(self, tensors: list[Tensor]) -> None:
        """Reserve host memory for each tensor; the block is kept as long as their layouts stay the same."""
        # Pinning memory and allocating files is slow: once, not in every iteration.
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
    """The parts of an engine that `engine.offload` keeps off the device, and when.

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
        if setting is Offload.all and reference is not None and not any(map(is_sharded, reference.parameters())):
            self._parts["reference"] = Offloaded(
                lambda: (*reference.parameters(), *reference.buffers()), device=device, folder=folder
            )
        self._here_now: set[str] = set()
        self.put_away()

    def optimizer_here(self) -> AbstractContextManager[None]:
        """Hold the optimiser's state on the device for the length of a block."""
        return self._here("optimizer")

    def reference_here(self) -> AbstractContextManager[None]:
        """Hold the reference policy on the device for the length of a block."""
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
        """Move everything off the device: at the start, and after a checkpoint was loaded."""
        for part in self._parts.values():
            part.offload()

    def metrics(self) -> dict[str, float]:
        """Return the memory that the last `offload` of each part freed on the device [MiB], as measured."""
        return {
            f"memory/{name}_freed_mib": part.freed / 2**20
            for name, part in self._parts.items()
            if part.freed is not None
        }


def optimizer_tensors(optimizer: torch.optim.Optimizer, weights: set[int]) -> Iterator[Tensor]:
    """Yield the tensors of an optimiser's state, and the parameters that it steps if they are copies of its own.

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
    """Return whether two tensors of one layout share their memory."""
    return left.data_ptr() == right.data_ptr()


# ---- where tensors are while the device that computes has no room for them


class HostMemory(ABC):
    """A block of memory outside the device that computes.

    Args:
        block: the memory itself.
    """

    def __init__(self, block: mmap.mmap) -> None:
        self._block = block
        self.start = torch.frombuffer(block, dtype=torch.uint8, count=1).data_ptr()
        """Address of its first byte."""

    def place(self, offset: int, like: Tensor) -> Tensor:
        """Return a tensor with shape, strides and type of `like` whose storage starts `offset` bytes into the block."""
        flat = torch.frombuffer(self._block, dtype=like.dtype, count=extent(like), offset=offset)
        return flat.as_strided(like.shape, like.stride())

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor's numbers lie in this block."""
        return self.start <= tensor.data_ptr() < self.start + len(self._block)

    @abstractmethod
    def settle(self) -> None:
        """Finish copying, and return the memory that became free to other processes."""


class PinnedMemory(HostMemory):
    """Memory of this process that the GPU reads and writes by itself (page-locked), for tensors of the GPU.

    The block is pinned in its own size; torch's allocator of pinned memory would round it up to a power of two.

    Args:
        num_bytes: size.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        pin(self, self.start, num_bytes)

    def settle(self) -> None:
        """See `HostMemory.settle`; other processes are simulators on the same GPU."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class FileMemory(HostMemory):
    """An unnamed file, for tensors of the CPU: its pages leave the memory of the process, and the kernel writes them to
    the disk when it needs room. It is gone with the process, however that ends.

    Args:
        num_bytes: size, which the disk must have free.
        folder: on that disk.

    Raises:
        UserError: the folder is kept in memory.
        RunError: the disk is full.
    """

    def __init__(self, num_bytes: int, folder: Path) -> None:
        refuse_memory_disk(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                reserve(file.fileno(), num_bytes)
            except OSError as error:
                raise RunError(
                    f"engine.offload needs {num_bytes / 2**20:.0f} MiB on the disk of {folder}: {error.strerror}"
                ) from error
            super().__init__(mmap.mmap(file.fileno(), num_bytes))

    def settle(self) -> None:
        """See `HostMemory.settle`; the C library returns memory only on request."""
        self._block.madvise(mmap.MADV_DONTNEED)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def pin(owner: object, start: int, num_bytes: int) -> None:
    """Pin memory of this process, which the GPU then reads and writes by itself, for as long as its owner lives.

    Raises:
        RunError: CUDA refuses.
    """
    cuda = torch.cuda.cudart()
    code = int(cuda.cudaHostRegister(start, num_bytes, 1))  # 1: for all devices
    if code:
        raise RunError(
            f"CUDA cannot pin {num_bytes / 2**20:.0f} MiB of this machine's memory (error {code}): raise the limit on "
            f"locked memory (ulimit -l), or set engine.offload=none"
        )
    weakref.finalize(owner, cuda.cudaHostUnregister, start)


def host_memory(num_bytes: int, device: torch.device, folder: Path) -> HostMemory:
    """Return memory for tensors that leave a device; `folder` is for a file, if it needs one."""
    return PinnedMemory(num_bytes) if device.type == "cuda" else FileMemory(num_bytes, folder)


def refuse_memory_disk(folder: Path) -> None:
    """Refuse a folder whose files are kept in memory, where nothing would be freed.

    Raises:
        UserError: it is such a folder.
    """
    place = folder.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if place.is_relative_to(each.mountpoint)]
    if mounts and max(mounts, key=lambda each: len(each.mountpoint)).fstype in _IN_MEMORY:
        raise UserError(
            f"engine.offload on the CPU moves tensors to a file in {folder}, which is itself kept in memory: choose a "
            f"run.dir on a disk, or set engine.offload=none"
        )


def extent(tensor: Tensor) -> int:
    """Return the count of numbers from a tensor's first to its last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def memory_in_use(device: torch.device) -> int:
    """Return the bytes of the device that are taken: of the GPU by torch's allocator, of the CPU by this process."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(psutil.Process().memory_info().rss)
