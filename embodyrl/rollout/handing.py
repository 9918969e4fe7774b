"""Rollouts for other processes of this machine: collected in memory that they map, so that nothing is copied.

The memory has no name (a memfd), so that nothing is left behind however the processes end.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.errors import RunError
from embodyrl.rollout.batch import TrajectoryBatch, leaves, type_name
from embodyrl.rollout.episodes import FinishedEpisode, Rollout

_NAME = "embodyrl-rollout"


class HandingError(RunError):
    """Raised when the memory of a rollout cannot be mapped."""


@dataclass(frozen=True, kw_only=True)
class Handed:
    """A rollout in shared memory, as plain data that JSON can hold."""

    address: str
    """Path at which processes of the same user on the same machine find the memory, while its owner holds it."""
    size: Sequence[int]
    """`[K, B]`."""
    columns: Mapping[str, Sequence[Any]]
    """Type, shape and offset of each column, by its name in `leaves`."""
    task_descriptions: Sequence[str]
    finished: Sequence[Mapping[str, Any]]
    """Fields of each `FinishedEpisode`."""
    env_steps: int


class SharedColumns:
    """Memory for the columns of one rollout. Close it once the others have mapped it."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self._end = 0
        self._offsets: dict[int, int] = {}
        """Offset of each column by its address in this process."""

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return room for a column; see `collector.Zeros`."""
        kind = np.dtype(dtype)
        num_bytes = max(1, prod(shape) * kind.itemsize)
        offset, self._end = self._end, self._end + -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._fd, self._end)
        room = np.frombuffer(mmap.mmap(self._fd, num_bytes, offset=offset), kind, prod(shape)).reshape(shape)
        self._offsets[room.ctypes.data] = offset
        return room

    def hand_over(self, rollout: Rollout) -> Handed:
        """Return what others need to map a rollout; columns that are elsewhere are copied here first."""
        batch = rollout.batch
        return Handed(
            address=f"/proc/{os.getpid()}/fd/{self._fd}",
            size=list(batch.size),
            columns={
                name: [type_name(leaf.dtype), list(leaf.shape), self._offset(leaf)]
                for name, leaf in leaves(batch).items()
            },
            task_descriptions=list(batch.task_descriptions),
            finished=[dataclasses.asdict(episode) for episode in rollout.finished],
            env_steps=rollout.env_steps,
        )

    def _offset(self, leaf: Tensor) -> int:
        """Return where a column is, whose rows are the first ones of what was allocated."""
        column = leaf.numpy()
        if column.ctypes.data not in self._offsets:
            room = self.zeros(column.shape, column.dtype)
            room[...] = column
            column = room
        return self._offsets[column.ctypes.data]

    def close(self) -> None:
        """Release the memory; it is freed once nobody maps it any more. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def take_over(handed: Handed) -> Rollout:
    """Map a rollout that another process has handed over. What is changed in it changes only here.

    Raises:
        HandingError: the process that collected it has ended, or the address is not that of a rollout.
    """
    try:
        fd = os.open(handed.address, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise HandingError(f"the rollout at {handed.address} is gone with its process: {error.strerror}") from error
    try:
        if _NAME not in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise HandingError(f"{handed.address} is not the memory of a rollout")
        columns = {name: _mapped(fd, *place) for name, place in handed.columns.items()}
    finally:
        os.close(fd)
    return Rollout(
        batch=TrajectoryBatch.from_leaves(columns, torch.Size(handed.size), handed.task_descriptions),
        finished=[FinishedEpisode(**episode) for episode in handed.finished],
        env_steps=handed.env_steps,
    )


def _mapped(fd: int, kind: str, shape: Sequence[int], offset: int) -> Tensor:
    """Return a column in a memory."""
    dtype: torch.dtype = getattr(torch, kind)
    if not prod(shape):
        return torch.empty(*shape, dtype=dtype)
    # ACCESS_COPY: pages are shared until they are written to.
    memory = mmap.mmap(fd, prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY, offset=offset)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
