"""Arguments and results of an EnvManager, written to shared memory and read from it.

Shapes: `B` slots of a call, `C` actions in a chunk, `D` action dims, `S` proprio dims, `V` cameras, `H, W` pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodyrl.envs.manager.memory import IMAGES, NEXT_FIELDS, Segment
from embodyrl.envs.manager.pool import Selection
from embodyrl.envs.types import ChunkResult, EpisodeSpec, Observation


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
    drawing_s: float
    """Seconds of these spent drawing images."""

    @property
    def drawing(self) -> float:
        """Share of drawing, 0 .. 1."""
        return min(self.drawing_s / self.busy_s, 1.0) if self.busy_s > 0 else 0.0


class NotFinite(NamedTuple):
    """A number that no simulator should return."""

    row: int
    field: str
    """Of the record: `rewards`, `proprio` or `final_proprio`."""
    column: int
    value: float


class Writer:
    """Writes rows of the segment, for slots that are idle.

    Args:
        memory: the segment.
        tasks: names by index.
    """

    def __init__(self, memory: Segment, tasks: list[str]) -> None:
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
        for name in NEXT_FIELDS:
            self._memory[f"next_{name}"][slot] = getattr(episode, name)


class Reader:
    """Reads rows of the segment.

    Args:
        memory: the segment.
        task_descriptions: task descriptions by index.
    """

    def __init__(self, memory: Segment, task_descriptions: list[str]) -> None:
        self._memory = memory
        self._task_descriptions = task_descriptions
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
            task_descriptions=[self._task_descriptions[task] for task in records["task_index"].tolist()],
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
        tasks = [
            self._task_descriptions[task]
            for task in np.where(was_reset, records["final_task_index"], records["task_index"]).tolist()
        ]
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
