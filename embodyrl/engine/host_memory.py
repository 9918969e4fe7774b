"""Where tensors are while the device that computes has no room for them."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path

import psutil
import torch
from torch import Tensor

from embodyrl.errors import RunError, UserError

_IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are memory."""


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
        """A tensor of the shape, strides and type of `like`, whose numbers lie `offset` bytes into the block."""
        flat = torch.frombuffer(self._block, dtype=like.dtype, count=extent(like), offset=offset)
        return flat.as_strided(like.shape, like.stride())

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's numbers lie in this block."""
        return self.start <= tensor.data_ptr() < self.start + len(self._block)

    @abstractmethod
    def settle(self) -> None:
        """Finish copying, and give the memory that it left back to other processes."""


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
            try:  # a hole that the full disk cannot fill later would kill the process
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                raise RunError(
                    f"engine.offload needs {num_bytes / 2**20:.0f} MiB on the disk of {folder}: {error.strerror}"
                ) from error
            super().__init__(mmap.mmap(file.fileno(), num_bytes))

    def settle(self) -> None:
        """See `HostMemory.settle`; the C library gives memory back only when told."""
        self._block.madvise(mmap.MADV_DONTNEED)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def pin(owner: object, start: int, num_bytes: int) -> None:
    """Let the GPU read and write memory of this process by itself, for as long as its owner lives.

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
    """Memory for what leaves a device; `folder` is where a file may be."""
    return PinnedMemory(num_bytes) if device.type == "cuda" else FileMemory(num_bytes, folder)


def refuse_memory_disk(folder: Path) -> None:
    """Object to a folder whose files are memory: nothing would be freed.

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
    """Numbers from a tensor's first to its last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def memory_in_use(device: torch.device) -> int:
    """Bytes of the device that no other process can have: of this process, or what torch took of the GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(psutil.Process().memory_info().rss)
