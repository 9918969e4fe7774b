"""Rollouts for other processes: collected in memory that those of this machine map, so that nothing is copied, and
that those of other machines read.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.placement.transport.lending import MemoryClient, MemoryServer, RemoteMemory
from embodyrl.placement.transport.segment import MemoryGone, Segment
from embodyrl.rollout.batch import TrajectoryBatch, leaves, type_name
from embodyrl.rollout.episodes import FinalObservations, FinishedEpisode, Rollout
from embodyrl.rollout.spread import is_large

_SEGMENT = "rollout"
FOLLOWING = "following/"


@dataclass(frozen=True, kw_only=True)
class SharedRollout:
    """A rollout in shared memory, as plain data that JSON can hold."""

    address: str
    """Path at which processes of the same user on the same machine find the memory, while its owner holds it."""
    machine: str
    """Name of that machine in the plan."""
    lent: Mapping[str, Any] | None
    """Fields of the `RemoteMemory` for other machines; None: there are none."""
    size: Sequence[int]
    """`[K, B]`."""
    columns: Mapping[str, Sequence[Any]]
    """Type, shape and offset of each column, by its name in `leaves`; those of what followed chunks by `FOLLOWING` and
    their name."""
    task_descriptions: Sequence[str]
    finished: Sequence[Mapping[str, Any]]
    """Fields of each `FinishedEpisode`."""
    env_steps: int


class SharedColumns:
    """Memory for the columns of one rollout. Close it once the others have mapped or read it.

    Args:
        machine: name of this one.
        server: lends the memory to other machines; None: there are none.
    """

    def __init__(self, machine: str = "", server: MemoryServer | None = None) -> None:
        self._machine = machine
        self._server = server
        self._lent: RemoteMemory | None = None
        self._segment = Segment.create(_SEGMENT)
        self._end = 0
        self._offsets: dict[int, int] = {}
        """Offset of each column by its address in this process."""

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return room for a column; see `collector.Zeros`."""
        kind = np.dtype(dtype)
        num_bytes = max(1, prod(shape) * kind.itemsize)
        offset, self._end = self._end, self._end + -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._segment.resize(self._end)
        room = np.frombuffer(self._segment.map(num_bytes, offset), kind, prod(shape)).reshape(shape)
        self._offsets[room.ctypes.data] = offset
        return room

    def share(self, rollout: Rollout) -> SharedRollout:
        """Return what others need to map a rollout; columns that are elsewhere are copied here first."""
        batch = rollout.batch
        following = {} if rollout.following is None else rollout.following.leaves()
        every = leaves(batch) | {f"{FOLLOWING}{name}": leaf for name, leaf in following.items()}
        columns = {name: [type_name(leaf.dtype), list(leaf.shape), self._offset(leaf)] for name, leaf in every.items()}
        if self._server is not None:
            self._lent = self._server.lend(self._segment.fd)
        return SharedRollout(
            address=self._segment.address,
            machine=self._machine,
            lent=None if self._lent is None else dataclasses.asdict(self._lent),
            size=list(batch.size),
            columns=columns,
            task_descriptions=list(batch.task_descriptions),
            finished=[dataclasses.asdict(episode) for episode in rollout.finished],
            env_steps=rollout.env_steps,
        )

    def _offset(self, leaf: Tensor) -> int:
        """Return where a column is, whose rows are the first ones of what was allocated."""
        place = leaf.data_ptr()
        if place not in self._offsets:
            content = leaf.contiguous().flatten().view(torch.uint8).numpy()  # numpy does not know every type
            room = self.zeros(content.shape, content.dtype)
            room[...] = content
            place = room.ctypes.data
        return self._offsets[place]

    def close(self) -> None:
        """Release the memory; it is freed once nobody maps it any more. May be called again."""
        if self._server is not None and self._lent is not None:
            self._server.withdraw(self._lent)
        self._segment.close()


def map_rollout(
    shared: SharedRollout, machine: str = "", *, share: range | None = None, timeout_s: float = 60.0
) -> Rollout:
    """Return a rollout that another process has shared: mapped, or read if it is on another machine. What is
    changed in it changes only here.

    Args:
        shared: the rollout.
        machine: name of this one.
        share: slots whose large columns are needed; from another machine no others are read. None: all.
        timeout_s: longest time for another machine to answer [s].

    Raises:
        MemoryGone: the process that collected it has ended, or the address is not that of a rollout.
        LineError: the same on another machine.
    """
    if shared.machine == machine or shared.lent is None:
        columns = _map_all(shared)
    else:
        columns = _read_all(shared, share, timeout_s)
    names = [name for name in columns if name.startswith(FOLLOWING)]
    following = {name.removeprefix(FOLLOWING): columns.pop(name) for name in names}
    return Rollout(
        batch=TrajectoryBatch.from_leaves(columns, torch.Size(shared.size), shared.task_descriptions),
        finished=[FinishedEpisode(**episode) for episode in shared.finished],
        env_steps=shared.env_steps,
        following=FinalObservations.from_leaves(following),
    )


def _map_all(shared: SharedRollout) -> dict[str, Tensor]:
    """Map the columns of a rollout of this machine."""
    try:
        segment = Segment.open(shared.address, _SEGMENT)
    except OSError as error:
        raise MemoryGone(f"the rollout at {shared.address} is gone with its process: {error.strerror}") from error
    except ValueError as error:
        raise MemoryGone(f"{shared.address} is not the memory of a rollout") from error
    with closing(segment):
        return {name: _mapped(segment, *place) for name, place in shared.columns.items()}


def _read_all(shared: SharedRollout, share: range | None, timeout_s: float) -> dict[str, Tensor]:
    """Read the columns of a rollout of another machine `[K, B, ...]`; of large ones only the slots `share`."""
    assert shared.lent is not None
    # What is not read takes no memory.
    columns = {
        name: torch.zeros(*shape, dtype=getattr(torch, kind)) for name, (kind, shape, _) in shared.columns.items()
    }
    starts: list[int] = []
    rooms: list[memoryview] = []
    for name, column in columns.items():
        if not column.numel():
            continue
        content, offset = column.flatten().view(torch.uint8).numpy().data, shared.columns[name][2]
        wanted, inside = column.nbytes, [0]
        if share is not None and len(share) < shared.size[1] and is_large(name, column):
            row, slot = column[0].nbytes, column[0, 0].nbytes
            wanted = len(share) * slot
            inside = [step * row + share.start * slot for step in range(len(column)) if wanted]
        starts += [offset + start for start in inside]
        rooms += [content[start : start + wanted] for start in inside]
    lent = RemoteMemory.from_plain(shared.lent)
    with MemoryClient(lent.line, timeout_s=timeout_s) as client:
        client.read(lent, starts, rooms)  # all at once: a question for each column would cost a latency each
    return columns


def _mapped(segment: Segment, kind: str, shape: Sequence[int], offset: int) -> Tensor:
    """Return a column in a memory."""
    dtype: torch.dtype = getattr(torch, kind)
    if not prod(shape):
        return torch.empty(*shape, dtype=dtype)
    memory = segment.map(prod(shape) * dtype.itemsize, offset, copied=True)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
