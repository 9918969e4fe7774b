"""The shared-memory segment through which observations, actions and results travel, and its layout.

Shapes: `B` slots of the whole run, `C` actions in a chunk, `D` action dims, `S` proprio dims, `V` cameras, `H, W`
pixels. Row `b` of every array belongs to slot `b` and is written by one side at a time: by the parent while the slot is
idle, by the slot's worker while it is busy. That is why no lock is needed. The segment is a memfd: it has no name, so
nothing is left over however a run ends.
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
"""Integer fields of an EpisodeSpec; each has an array `next_<field>`. The task travels as `next_task_index`."""


IMAGES = ("images_0", "images_1")
"""The two buffers for a slot's images: while one holds the last observation, the next is drawn into the other."""

Array = tuple[tuple[int, ...], "np.dtype[Any]"]
"""Shape and type of one array."""


@dataclass(frozen=True)
class Field:
    """One array of the segment."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """All arrays of a segment, by name."""

    fields: Mapping[str, Field]

    @property
    def num_bytes(self) -> int:
        """Size of the segment in bytes."""
        return max(field.offset + field.num_bytes for field in self.fields.values())


def pack(arrays: Mapping[str, Array]) -> Layout:
    """Lay arrays `name -> (shape, dtype)` out one after the other, each on a cache line of its own."""
    fields: dict[str, Field] = {}
    offset = 0
    for name, (shape, dtype) in arrays.items():
        fields[name] = Field(shape, dtype, offset)
        offset += _rounded_up(fields[name].num_bytes)
    return Layout(fields)


def layout(spec: SimulatorSpec, num_slots: int, chunk_size: int, *, every_step: bool = False) -> Layout:
    """Lay out the arrays for `num_slots` (B) slots of this simulator and chunks of `chunk_size` (C) actions.

    - `record`: see `record_type`.
    - `images_0`, `images_1`: take turns; `bank` is the number of the one that holds the next observation.
    - `final_images`: the last observation of an episode after which the slot was reset at once.
    - `step_*`: the observations after every action, if those are kept.
    - `stepping`: mask of the slots for which a process' doorbell is rung.
    - `has_next`, `next_*`: the episode to start.
    - `work`: seconds that a process has worked and, of these, drawn, in the row of its first slot. A row fills a cache
      line, because another process writes the next row.
    """
    arrays: dict[str, Array] = {
        "actions": ((num_slots, chunk_size, spec.action_dim), np.dtype("float32")),
        "record": ((num_slots,), record_type(spec, chunk_size)),
        "work": ((num_slots, _ALIGNMENT // 8), np.dtype("float64")),
        "bank": ((num_slots,), np.dtype("int8")),
        "stepping": ((num_slots,), np.dtype("bool")),
        "has_next": ((num_slots,), np.dtype("bool")),
        **{f"next_{name}": ((num_slots,), np.dtype("int64")) for name in ("task_index", *NEXT_FIELDS)},
    }
    if spec.cameras:
        images = (len(spec.cameras), *spec.image_size, 3)
        arrays |= {name: ((num_slots, *images), np.dtype("uint8")) for name in (*IMAGES, "final_images")}
        if every_step:
            arrays["step_images"] = ((num_slots, chunk_size, *images), np.dtype("uint8"))
    if spec.proprio_dim and every_step:
        arrays["step_proprio"] = ((num_slots, chunk_size, spec.proprio_dim), np.dtype("float32"))
    return pack(arrays)


def record_type(spec: SimulatorSpec, chunk_size: int) -> np.dtype[Any]:
    """Return the record of one slot's small results, side by side so that one copy fetches them all.

    `task_index` is that of the task description shown, `final_*` belong to the last observation of an episode after
    which the slot was reset at once. `numbers` overlaps all the float32 fields, so that one test finds a number that is
    not finite. The record fills whole cache lines: neighbours may be written by other processes.
    """
    proprio = {name: (spec.proprio_dim,) for name in ("proprio", "final_proprio") if spec.proprio_dim}
    floats = {"rewards": (chunk_size,), **proprio}
    fields: list[tuple[str, Any]] = [(name, ("float32", shape)) for name, shape in floats.items()]
    fields += [
        ("task_index", "int64"),
        ("final_task_index", "int64"),
        ("steps", "int32"),
        ("success", ("bool", (chunk_size,))),
    ]
    fields += [("terminated", "bool"), ("truncated", "bool")]
    # Floats come first, so that `numbers` can span them from offset 0. numpy aligns records to the largest field only,
    # hence the offsets by our own count.
    offsets: list[int] = []
    end = 0
    for _, kind in fields:
        dtype = np.dtype(kind)
        offsets.append(-(-end // dtype.base.alignment) * dtype.base.alignment)
        end = offsets[-1] + dtype.itemsize
    numbers = ("float32", (sum(shape[0] for shape in floats.values()),))
    return np.dtype(
        {
            "names": ["numbers", *(name for name, _ in fields)],
            "formats": [numbers, *(kind for _, kind in fields)],
            "offsets": [0, *offsets],
            "itemsize": _rounded_up(end),
        }
    )


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Segment:
    """A mapped segment: `segment[name]` is the array of that name, or that field of the records.

    Args:
        fd: file descriptor of the memory; the segment owns it from now on.
        layout: of its arrays.
    """

    def __init__(self, fd: int, layout: Layout) -> None:
        self.fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        self.layout = layout
        self._arrays: dict[str, NDArray[Any]] = {}
        # The arrays hold the mapping, so it lives as long as any view of it, also after `close`.
        memory = mmap.mmap(fd, layout.num_bytes)
        for name, field in layout.fields.items():
            array = np.frombuffer(memory, field.dtype, field.num_bytes // field.dtype.itemsize, field.offset)
            self._arrays[name] = array.reshape(field.shape)
            self._arrays |= {part: array[part] for part in field.dtype.names or ()}

    @classmethod
    def create(cls, layout: Layout) -> Segment:
        """Create a segment of zeros."""
        fd = os.memfd_create("embodyrl-envs", os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.num_bytes)
        return cls(fd, layout)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def part(self, slots: range) -> dict[str, NDArray[Any]]:
        """Return views of the rows of these slots, by name."""
        return {name: array[slots.start : slots.stop] for name, array in self._arrays.items()}

    def close(self) -> None:
        """Release the memory; it is freed once the last view and the last process have released it. May be called
        again."""
        self._arrays = {}
        self._close_fd()
