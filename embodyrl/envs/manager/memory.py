"""The shared-memory segment through which observations, actions and results travel: its layout, the rows
that a call is about, and how the manager writes arguments to them and reads results from them.

Shapes: `B` slots of the whole run, `C` actions in a chunk, `D` action dims, `S` proprio dims, `V` cameras, `H, W`
pixels. Row `b` of every array belongs to slot `b` and is written by one side at a time: by the parent while the slot is
idle, by the slot's worker while it is busy. That is why no lock is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodyrl.envs.perturb.kinds import packed
from embodyrl.envs.perturb.words import with_paraphrases
from embodyrl.envs.types import ChunkResult, EpisodeSpec, Observation, SimulatorSpec
from embodyrl.placement.launcher import Worker
from embodyrl.placement.transport.segment import Segment

_ALIGNMENT = 64
RESULTS = ("rewards", "success", "success_known", "terminated", "truncated", "steps")
"""Fields of a record that are the result of a chunk."""
NEXT_FIELDS = ("start_state", "seed", "group")
"""Integer fields of an EpisodeSpec; each has an array `next_<field>`. The task travels as `next_task_index`, kinds and
levels of perturbation as one number, `next_perturb`."""


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
        **{f"next_{name}": ((num_slots,), np.dtype("int64")) for name in ("task_index", "perturb", *NEXT_FIELDS)},
    }
    if spec.cameras:
        images = (spec.num_images, *spec.image_size, 3)
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
    fields += [("terminated", "bool"), ("truncated", "bool"), ("success_known", "bool")]
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


class SharedArrays:
    """Arrays in a segment: `arrays[name]` is the one of that name, or that field of the records.

    Args:
        segment: owned from now on.
        layout: of its arrays.
    """

    def __init__(self, segment: Segment, layout: Layout) -> None:
        self.segment = segment
        self.layout = layout
        self._arrays: dict[str, NDArray[Any]] = {}
        # The arrays hold the mapping, so it lives as long as any view of it, also after `close`.
        memory = segment.map(layout.num_bytes)
        for name, field in layout.fields.items():
            array = np.frombuffer(memory, field.dtype, field.num_bytes // field.dtype.itemsize, field.offset)
            self._arrays[name] = array.reshape(field.shape)
            self._arrays |= {part: array[part] for part in field.dtype.names or ()}

    @classmethod
    def create(cls, layout: Layout) -> SharedArrays:
        """Create arrays of zeros."""
        return cls(Segment.create("envs", layout.num_bytes), layout)

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
        self.segment.close()


Slots = Sequence[int] | NDArray[np.int64]
"""Numbers of slots, each once, in any order; results come in the same order."""

_MAX_KNOWN = 4096
"""Selections that are remembered at most; ready_batch may meet any subset of the slots."""


class Share(NamedTuple):
    """The part of a call that one process serves."""

    worker: Worker
    slots: list[int]
    """Ascending, as the run numbers them."""
    local: tuple[int, ...]
    """The same slots, numbered within the process."""
    arguments: tuple[int, ...]
    """The slots as a message names them: `local`, or none if it is all slots of the process."""
    served: slice
    """All slots of the process, as the run numbers them."""
    mask: NDArray[np.bool_]
    """The slots as the doorbell names them: a mask of all slots of the process."""


@dataclass(frozen=True)
class Selection:
    """The slots of a call."""

    index: NDArray[np.int64]
    """Slot numbers in the caller's order, `[B]`."""
    numbers: list[int]
    """The same as a list."""
    shares: list[Share]
    """By rank."""
    run: slice | None
    """The same as a slice, if they are consecutive and ascending."""


class Selections:
    """Looks slots up. Calls repeat themselves, so selections are remembered.

    Args:
        workers: the processes, by rank; each serves as many slots as the others.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)
        self._share = len(workers[0].spec.slots)
        self._known: dict[bytes, Selection] = {}

    def worker_of(self, slot: int) -> Worker:
        """Return the process that serves a slot."""
        return self._workers[slot // self._share]

    def find(self, slots: Slots) -> Selection:
        """Return the selection of these slots.

        Raises:
            ValueError: there are none, or one is named twice or does not exist.
        """
        index = np.asarray(slots, np.int64)
        if index.ndim != 1:
            raise ValueError(f"slots must be a list of different slots, got {list(slots)}")
        key = index.tobytes()
        selection = self._known.get(key)
        if selection is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            selection = self._known[key] = self._checked(index.copy())
        return selection

    def _checked(self, index: NDArray[np.int64]) -> Selection:
        numbers = index.tolist()
        count = self._share * len(self._workers)
        if not numbers or len(set(numbers)) != len(numbers):
            raise ValueError(f"slots must be a list of different slots, got {numbers}")
        if min(numbers) < 0 or max(numbers) >= count:
            raise ValueError(f"slots must be within 0..{count - 1}, got {numbers}")
        by_rank: dict[int, list[int]] = {}
        for slot in sorted(numbers):
            by_rank.setdefault(slot // self._share, []).append(slot)
        shares = []
        for rank, slots in by_rank.items():
            local = tuple(slot % self._share for slot in slots)
            arguments = () if len(local) == self._share else local
            served = slice(rank * self._share, (rank + 1) * self._share)
            mask = np.isin(np.arange(self._share), local)
            shares.append(Share(self._workers[rank], slots, local, arguments, served, mask))
        first, end = numbers[0], numbers[0] + len(numbers)
        return Selection(index, numbers, shares, slice(first, end) if numbers == list(range(first, end)) else None)


@dataclass(kw_only=True)
class StepResult(ChunkResult):
    """Result of one chunk in each of `B` slots.

    `observation` is the first one of the next episode where the slot was reset at once. Images may be views of memory
    that simulators draw into again: `EnvManager` states how long they stay valid. Everything else belongs to the
    caller.
    """

    final_observation: Observation
    """At the end of the chunk, before any reset, for the value estimate where a time limit cut the episode off.
    The same object as `observation` when no slot was reset."""
    lost: NDArray[np.bool_]
    """`[B]`: the slot's process died and was replaced, or the slot was not restored bit for bit, so its episode is
    lost: no action of this chunk counts, and its earlier chunks have no end. Its next episode has begun, if one was
    given."""
    step_images: NDArray[np.uint8] | None = None
    """`[B, C, V, H, W, 3]`: after every action, zeros where none was executed; None unless they are kept.
    Valid until the slot's next send."""
    step_proprio: NDArray[np.float32] | None = None
    """`[B, C, S]`: the same for the state observation."""

    @property
    def ended(self) -> NDArray[np.bool_]:
        """`[B]`: the episode ended inside the chunk, for whatever reason."""
        return self.terminated | self.truncated


class Work(NamedTuple):
    """Working time of all processes together."""

    busy_s: float
    """Seconds at work on requests."""
    rendering_s: float
    """Seconds of these spent rendering images."""

    @property
    def rendering(self) -> float:
        """Share of rendering, 0 .. 1."""
        return min(self.rendering_s / self.busy_s, 1.0) if self.busy_s > 0 else 0.0


class NotFinite(NamedTuple):
    """A number that no simulator should return."""

    row: int
    field: str
    """Of the record: `rewards`, `proprio` or `final_proprio`."""
    column: int
    value: float


class Writer:
    """Writes rows of the segment, for slots that are idle."""

    def __init__(self, memory: SharedArrays, tasks: list[str]) -> None:
        self._memory = memory
        self._tasks = tasks
        self._written: list[EpisodeSpec | None] = [None] * len(memory["has_next"])
        """The episode that is written for each slot. Collectors give the same object again until it begins, so most
        calls write nothing."""

    def turn_images(self, chosen: Selection) -> None:
        """Have the next images of these slots drawn into the buffer that does not hold those returned last."""
        self._memory["bank"][chosen.index] ^= 1

    def checked_actions(self, index: NDArray[np.int64], actions: ArrayLike) -> NDArray[np.float32]:
        """Return actions as an array `[B, C, D]`.

        Raises:
            ValueError: they have another shape, or one is not finite.
        """
        chunk = np.asarray(actions, np.float32)
        want = (len(index), *self._memory["actions"].shape[1:])
        if chunk.shape != want:
            raise ValueError(f"actions: got shape {chunk.shape}, want [B, C, D] = {want}")
        if not np.isfinite(chunk).all():
            row, action, dim = np.argwhere(~np.isfinite(chunk))[0]
            raise ValueError(f"actions: env {index[row]}, action {action}, dim {dim} is {chunk[row, action, dim]}")
        return chunk

    def episodes(self, chosen: Selection, episodes: Sequence[EpisodeSpec | None]) -> None:
        """Write the next episode of each of these slots; None: it has none.

        Raises:
            ValueError: a wrong number of episodes, or one of an unknown task.
        """
        if len(episodes) != len(chosen.numbers):
            raise ValueError(f"got {len(episodes)} episodes for {len(chosen.numbers)} envs")
        for slot, episode in zip(chosen.numbers, episodes, strict=True):
            if episode is self._written[slot]:
                continue
            if episode is not None:
                self._episode(slot, episode)
            self._memory["has_next"][slot] = episode is not None
            self._written[slot] = episode

    def _episode(self, slot: int, episode: EpisodeSpec) -> None:
        if episode.task not in self._tasks:
            raise ValueError(f"env {slot}: task {episode.task!r} is not one of {self._tasks}")
        self._memory["next_task_index"][slot] = self._tasks.index(episode.task)
        self._memory["next_perturb"][slot] = packed(episode.perturb)
        for name in NEXT_FIELDS:
            self._memory[f"next_{name}"][slot] = getattr(episode, name)


class TaskDescriptions:
    """Task descriptions and their numbers: those of the tasks, and after them their paraphrases, which are made when
    the first is needed.

    Args:
        own: those of the tasks, in the order of `SimulatorSpec.tasks`.
    """

    def __init__(self, own: Sequence[str]) -> None:
        self._texts = self._own = list(own)
        self._numbers = _numbers(self._own)

    def texts(self, numbers: Sequence[int]) -> list[str]:
        """Return the task descriptions with these numbers."""
        if max(numbers, default=0) >= len(self._own):
            self._complete()
        return [self._texts[number] for number in numbers]

    def numbers(self, texts: Sequence[str]) -> list[int]:
        """Return the numbers of these task descriptions.

        Raises:
            KeyError: one is of no task.
        """
        if not self._numbers.keys() >= set(texts):
            self._complete()
        return [self._numbers[text] for text in texts]

    def _complete(self) -> None:
        if self._texts is self._own:
            self._texts = with_paraphrases(self._own)
            self._numbers = _numbers(self._texts)


def _numbers(texts: Sequence[str]) -> dict[str, int]:
    """Return the numbers of texts; the first of equal ones counts, so that a task keeps its own."""
    return {text: number for number, text in reversed(list(enumerate(texts)))}


class Reader:
    """Reads rows of the segment."""

    def __init__(self, memory: SharedArrays, task_descriptions: list[str]) -> None:
        self._memory = memory
        self._task_descriptions = TaskDescriptions(task_descriptions)
        self._has_proprio, self._has_images = "proprio" in memory, "final_images" in memory
        self._kept = [name for name in ("step_images", "step_proprio") if name in memory]

    def records(self, chosen: Selection) -> NDArray[Any]:
        """Copy the small results of these slots: `[B]` records, see `memory.record_type`."""
        records: NDArray[Any] = self._memory["record"].take(chosen.index)
        return records

    def observation(self, chosen: Selection, records: NDArray[Any]) -> Observation:
        """Return the present observation of these slots."""
        return Observation(
            images=self._images(chosen),
            proprio=records["proprio"] if self._has_proprio else None,
            task_descriptions=self._task_descriptions.texts(records["task_index"].tolist()),
        )

    def final_observation(
        self, chosen: Selection, records: NDArray[Any], now: Observation, was_reset: NDArray[np.bool_]
    ) -> Observation:
        """Return `now`, with the observation from before the reset in the slots that were reset."""
        images = proprio = None
        if now.images is not None:
            images = now.images.copy()
            images[was_reset] = self._memory["final_images"][chosen.index[was_reset]]
        if now.proprio is not None:
            proprio = np.where(was_reset[:, None], records["final_proprio"], now.proprio)
        tasks = self._task_descriptions.texts(
            np.where(was_reset, records["final_task_index"], records["task_index"]).tolist()
        )
        return Observation(images=images, proprio=proprio, task_descriptions=tasks)

    def step_observations(self, chosen: Selection) -> dict[str, NDArray[Any]]:
        """Return `step_images` and `step_proprio`, those of them that are kept."""
        where = chosen.index if chosen.run is None else chosen.run
        return {name: self._memory[name][where] for name in self._kept}

    def _images(self, chosen: Selection) -> NDArray[np.uint8] | None:
        """Return a view if these slots are consecutive and use the same buffer, else a copy."""
        if not self._has_images:
            return None
        banks = self._memory["bank"][chosen.index].tolist()
        if banks.count(banks[0]) < len(banks):
            pairs = zip(banks, chosen.numbers, strict=True)
            return np.stack([self._memory[IMAGES[bank]][slot] for bank, slot in pairs])
        images: NDArray[np.uint8] = self._memory[IMAGES[banks[0]]][chosen.index if chosen.run is None else chosen.run]
        return images


def find_not_finite(records: NDArray[Any]) -> NotFinite | None:
    """Return the first NaN or infinity among the float32 numbers of these records `[B]`; None if all are finite."""
    # One test for all float fields together: this runs for every step and nearly always ends here.
    if np.isfinite(records["numbers"]).all():
        return None
    for name in ("rewards", "final_proprio", "proprio"):
        if name in (records.dtype.names or ()) and not (finite := np.isfinite(records[name])).all():
            row, column = (int(number) for number in np.argwhere(~finite)[0])
            return NotFinite(row, name, column, float(records[name][row, column]))
    raise AssertionError("`numbers` are the rewards and the proprios")
