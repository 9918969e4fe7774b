"""The shared-memory segment through which observations, actions and results travel, and what lies where in it.

Shapes: `B` simulator slots of the whole run, `C` actions in a chunk, `D` action dims, `S` proprio dims, `V` cameras,
`H, W` pixels. Row `b` of every array belongs to slot `b` and is written by one side at a time: by the parent while the
slot is idle, by the slot's worker while it is busy. The segment is a memfd: it has no name, so nothing is left behind
however a run ends.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.types import SimulatorSpec

_ALIGNMENT = 64
NEXT_FIELDS = ("start_state", "seed", "group")
"""Integer fields of an EpisodeSpec; each has an array `next_<field>`. The task travels as an index, `next_task`."""


@dataclass(frozen=True)
class Field:
    """One array of the segment."""

    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Layout:
    """All arrays of a segment, by name."""

    fields: Mapping[str, Field]

    @property
    def num_bytes(self) -> int:
        """Size of the segment in bytes."""
        return max(field.offset + field.num_bytes for field in self.fields.values())


def pack(arrays: Mapping[str, tuple[tuple[int, ...], str]]) -> Layout:
    """Lay arrays `name -> (shape, dtype)` out one after the other, each on a cache line of its own."""
    fields: dict[str, Field] = {}
    offset = 0
    for name, (shape, dtype) in arrays.items():
        fields[name] = Field(shape, dtype, offset)
        offset += -(-fields[name].num_bytes // _ALIGNMENT) * _ALIGNMENT
    return Layout(fields)


def layout(spec: SimulatorSpec, num_slots: int, chunk_size: int) -> Layout:
    """The arrays for `num_slots` (B) slots of this simulator and chunks of `chunk_size` (C) actions.

    `images`, `proprio` and `task` (index of the task whose sentence is shown) are the current observation; `final_*`
    are the last one of an episode after which the slot was reset at once. `has_next` and `next_*` say which episode to
    start.
    """
    observation: dict[str, tuple[tuple[int, ...], str]] = {"task": ((num_slots,), "int64")}
    if spec.proprio_dim:
        observation["proprio"] = ((num_slots, spec.proprio_dim), "float32")
    if spec.cameras:
        observation["images"] = ((num_slots, len(spec.cameras), *spec.image_size, 3), "uint8")
    return pack(
        {
            "actions": ((num_slots, chunk_size, spec.action_dim), "float32"),
            "rewards": ((num_slots, chunk_size), "float32"),
            "success": ((num_slots, chunk_size), "bool"),
            "terminated": ((num_slots,), "bool"),
            "truncated": ((num_slots,), "bool"),
            "steps": ((num_slots,), "int32"),
            "has_next": ((num_slots,), "bool"),
            **{f"next_{name}": ((num_slots,), "int64") for name in ("task", *NEXT_FIELDS)},
            **observation,
            **{f"final_{name}": array for name, array in observation.items()},
        }
    )


class Segment:
    """A mapped segment: `segment[name]` is the array of that name.

    Args:
        fd: file descriptor of the memory; the segment owns it from now on.
        layout: what lies where.
    """

    def __init__(self, fd: int, layout: Layout) -> None:
        self.fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        self.layout = layout
        self._arrays: dict[str, NDArray[Any]] = {}
        memory = mmap.mmap(fd, layout.num_bytes)
        for name, field in layout.fields.items():
            array = np.frombuffer(memory, field.dtype, field.num_bytes // np.dtype(field.dtype).itemsize, field.offset)
            self._arrays[name] = array.reshape(field.shape)

    @classmethod
    def create(cls, layout: Layout) -> Segment:
        """A new segment, all zero."""
        fd = os.memfd_create("embodyrl-envs", os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.num_bytes)
        return cls(fd, layout)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def part(self, slots: range) -> dict[str, NDArray[Any]]:
        """Views of the rows of these slots, by name."""
        return {name: array[slots.start : slots.stop] for name, array in self._arrays.items()}

    def close(self) -> None:
        """Let go of the memory; it is freed when the last view and the last process have. Harmless when repeated."""
        self._arrays = {}
        self._close_fd()
