"""Replay: past decisions, from which an update draws at random.

Each slot has a ring of moments: an observation, and mostly the decision that was made there. The moment after a
decision in the ring is what followed it, so that no observation is kept twice. Only where no decision follows does an
observation take a place of its own: the last one of an episode that the time limit cut off, and the one at which a
rollout ended, until the next rollout decides there. After a termination nothing follows.

Shapes: `K` chunks and `B` slots of a rollout, `C` actions in a chunk, `D` action dims, `S` proprio dims, `M` decisions.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodyrl.config.replay import REMAINING, SOLVED
from embodyrl.engine.minibatch import Columns
from embodyrl.engine.parallel import Ranks
from embodyrl.errors import RunError
from embodyrl.files import link_or_copy, require_room, reserve
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.episodes import Rollout
from embodyrl.rollout.interventions import Source
from embodyrl.rollout.replay_fields import MIB, Field, held_in_memory, row_bytes
from embodyrl.seeding import derive_seed
from embodyrl.tracking.intervals import outcomes

if TYPE_CHECKING:  # needs pyarrow, and only runs on demonstrations need it
    from embodyrl.data.transitions import Transitions

COUNTERS = "counters.json"
GENERATOR = "generator"
COUNTED = ("ends", "awaits", "episodes", "solved", "length")
"""Counters of slots."""
ROUNDING = 1e-6
"""A product that is this close below a whole number of steps counts as that."""
FAULT = 2**17
"""Most bytes beside an entry that come into memory with it when it is read from a file: the system maps pages around
it, too."""
SOURCE = "source"
"""Column that says who decided."""
NONE = np.zeros(0, np.int64)
NEWEST = 30
"""Episodes whose success is shown."""


class ReplayError(RunError):
    """Raised when a replay has no room, or is that of another run."""


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """Decisions drawn from a replay; those of them that this rank holds."""

    columns: Columns
    """`[M, ...]`: what was observed, such as `proprio`, and after the decision `next_proprio`; what was decided, such
    as `actions [M, C, D]`; `rewards [M, C]`, `success [M, C]`, `steps`, `terminated`, `truncated`; where some have been
    demonstrated also `labels [M, C, D]`, what a demonstrator would execute, and `labelled`, whether there is one."""
    places: Tensor
    """int64 `[M]`, their places in the minibatch, which decide the noise that goes with them."""
    size: int
    """Decisions of the whole minibatch, on all ranks."""
    demonstrated: Tensor | None = None
    """bool `[M]`, whether a decision is one of the demonstrations; None: none is."""


@dataclass(frozen=True)
class Segment:
    """A file of a checkpoint with some moments; later checkpoints have it too, as long as any of them is kept."""

    name: str
    ends: tuple[int, ...]
    """Moments that each slot had had when it was written."""


@dataclass(frozen=True, kw_only=True)
class ReplayState:
    """State of a replay in a checkpoint: only what is new is written; the rest is in files of the one before."""

    counters: dict[str, Any]
    """JSON; `segments` names all files, the newest last."""
    generator: Tensor
    moments: Mapping[str, Tensor]
    """Contents of the newest file."""

    def save(self, folder: Path, before: Path | None) -> None:
        """Write into an existing folder.

        Args:
            folder: for the files.
            before: folder of the state before.
        """
        (folder / COUNTERS).write_text(json.dumps(self.counters) + "\n")
        *earlier, newest = self.counters["segments"]
        for name in earlier:
            assert before is not None, "the first state is whole"
            link_or_copy(before / name, folder / name)
        moments = {name: column.contiguous() for name, column in self.moments.items()}
        save_file(moments | {GENERATOR: self.generator}, folder / newest)

    @classmethod
    def load(cls, folder: Path) -> ReplayState:
        """Read what `save` wrote, but for the moments, which `Replay.restore` reads."""
        counters = json.loads((folder / COUNTERS).read_text())
        with safe_open(folder / counters["segments"][-1], framework="pt") as file:
            generator = file.get_tensor(GENERATOR)
        return cls(counters=counters, generator=generator, moments={})


class Replay:
    """The newest decisions of a run's slots; each rank holds those of its own.

    All ranks know which decisions there are, so that they draw the same minibatches.

    Args:
        capacity: decisions of all slots together; each slot has room for its share, rounded down.
        slots: of the run.
        own: those of this rank.
        fields: see `replay_fields`.
        start_after: decisions from which on the policy acts and learns.
        seed: the run's seed.
        memory: most bytes that are held in memory by all ranks together; columns beyond go to unnamed files.
        folder: for these files.
        only: bool column of the decisions that count and are drawn; None: all of them.

    Raises:
        ReplayError: there is no room for the file.
    """

    def __init__(
        self,
        capacity: int,
        *,
        slots: int,
        own: range,
        fields: Mapping[str, Field],
        start_after: int,
        seed: int,
        memory: int,
        folder: Path,
        only: str | None = None,
    ) -> None:
        self.fields, self.own, self._only = fields, own, only
        self._observed = [name for name, field in fields.items() if field.observed]
        self.rows = capacity // slots
        """Places in the ring of a slot."""
        self._generator = torch.Generator().manual_seed(derive_seed(seed, "replay"))
        self._files: list[mmap.mmap] = []
        here = held_in_memory(fields, capacity=capacity, memory=memory)
        away = {name: field for name, field in fields.items() if name not in here}
        size = row_bytes(away) * len(own) * self.rows
        try:
            if away:
                require_room(folder, size)
            self._columns = {
                name: self._room((len(own), self.rows, *field.shape), field.dtype, folder if name in away else None)
                for name, field in fields.items()
            }
        except OSError as error:
            raise ReplayError(
                f"the replay takes {size / MIB:,.0f} MiB in {folder}, for which there is no room ({error.strerror}): "
                "lower algorithm.off_policy.replay.capacity"
            ) from error
        self._entry_pages = sum((field.nbytes + FAULT) * (1 + field.observed) for field in away.values())
        """Most bytes of files that come into memory with a decision."""
        self._most_pages = (memory - capacity * (row_bytes(fields) - row_bytes(away))) * len(own) // slots
        """Bytes of files that may be in memory."""
        self._pages = 0
        """Most that are there now."""
        self._decided = np.zeros((slots, self.rows), np.bool_)
        """Places with a decision, whose successor is there if it needs one."""
        self._ends = np.zeros(slots, np.int64)
        """Moments that each slot has had; the next one goes to this number modulo `rows`."""
        self._saved = np.zeros(slots, np.int64)
        """The same when the state was last taken."""
        self._awaits = np.full(slots, -1, np.int64)
        """Episode that continues at the newest moment of each slot, which has no decision yet; -1: none."""
        self._episodes = np.full(slots, -1, np.int64)
        """Episode of each slot's newest decision."""
        self._solved = np.zeros(slots, np.bool_)
        """Whether that episode was solved before now."""
        self._length = np.zeros(slots, np.int64)
        """Decisions of that episode so far."""
        self._taught = np.zeros((slots, self.rows), np.bool_)
        """Places whose decision an expert executed."""
        self._live = np.zeros(0, np.int64)
        self._segments: list[Segment] = []
        self._next_segment = 0
        self.added = 0
        """Decisions that were ever added."""
        self.start_after = start_after
        """Decisions from which on the policy acts and learns."""
        self._newest = 0
        """Decisions of the newest rollout."""
        self._asking = 0
        """Decisions added since there are enough, which ask for steps."""
        self._taken = 0
        """Steps that were made for them."""
        self._outcomes: deque[bool | None] = deque(maxlen=NEWEST)
        """Success of the newest episodes, which tells whether it is known at all."""
        self.ended = {"episodes": 0, "successes": 0}
        """Episodes that have ended, and those of them that were solved."""
        self.is_refilled = False
        """Whether the run continues without the decisions that it had: its policy then acts until there are enough."""

    def _room(self, shape: tuple[int, ...], dtype: type[np.generic], folder: Path | None) -> NDArray[Any]:
        """Return zeros, in memory or in an unnamed file."""
        if folder is None or not prod(shape):
            return np.zeros(shape, dtype)
        size = prod(shape) * np.dtype(dtype).itemsize
        with tempfile.TemporaryFile(dir=folder) as file:
            reserve(file.fileno(), size)
            self._files.append(mmap.mmap(file.fileno(), size))
        return np.frombuffer(self._files[-1], dtype).reshape(shape)

    def __len__(self) -> int:
        """Return the number of decisions that can be drawn."""
        return len(self._live)

    @property
    def has_begun(self) -> bool:
        """Whether there are enough decisions to act and learn by."""
        return self.added >= self.start_after

    def describe(self) -> str:
        """Return its size and place, for people. Columns that are small stay in memory if others do not."""
        size = self._decided.size * row_bytes(self.fields) / MIB
        place = "in the run's folder" if self._files else "in memory"
        return (
            f"room for {self._decided.size:,} chunks, {size:,.1f} MiB {place}; learning begins after "
            f"{self.start_after:,}"
        )

    def metrics(self) -> dict[str, float]:
        """Return what is in the replay, and what has come of its episodes."""
        solved = outcomes(self._outcomes)
        # Where no success is known, none is no number.
        ended = {
            f"replay/{name}": float(number) for name, number in self.ended.items() if name != "successes" or solved
        }
        here = {"replay/decisions": float(len(self)), "replay/fill": len(self) / self._decided.size}
        labelled = {"replay/interventions": float(len(self._interventions()))} if SOURCE in self.fields else {}
        return here | labelled | ended

    def take_updates(self, updates_per_step: float) -> int:
        """Return the whole gradient steps that are due for the decisions of the newest rollout, and what was left
        before; none before there are enough decisions."""
        if not self.has_begun:
            return 0
        # Counted over the whole run and rounded once: fractions of a step are not lost between rollouts.
        self._asking += self._newest
        steps = math.floor(updates_per_step * self._asking + ROUNDING) - self._taken
        self._taken += steps
        return steps

    @property
    def taken(self) -> int:
        """Steps that were made for its decisions."""
        return self._taken

    def seen(self, name: str) -> Tensor | None:
        """Return an observed column of this rank's decisions, `[M, ...]`; a copy. None if there is none."""
        if name not in self._columns:
            return None
        here = self._decided[self.own.start : self.own.stop]
        return torch.from_numpy(self._columns[name][here])

    def own_of(self, batch: TrajectoryBatch, name: str) -> Tensor | None:
        """Return an observed column of the valid decisions of a rollout in this rank's slots, `[M, ...]`; None if there
        is none."""
        if name not in self._columns:
            return None
        own = slice(self.own.start, self.own.stop)
        return _column(batch, name)[:, own][batch["valid"][:, own]]

    # ---- adding

    def add(self, rollout: Rollout) -> None:
        """Add the valid decisions of a rollout of all slots, whose episodes are continuous."""
        batch = rollout.batch
        given = {"valid", "episode", *self.fields} - {REMAINING, SOLVED}
        columns = {name: _column(batch, name).numpy() for name in given}
        columns["counts"] = columns["valid"] if self._only is None else columns["valid"] & columns[self._only]
        valid, last = columns["valid"], batch.size[0] - 1
        executed = np.arange(columns["success"].shape[2]) < columns["steps"][..., None]
        observed = self._by_place(rollout)
        self._newest = int(columns["counts"].sum())
        self.added += self._newest
        self._outcomes.extend(episode.success for episode in rollout.finished)
        self.ended["episodes"] += len(rollout.finished)
        self.ended["successes"] += sum(bool(episode.success) for episode in rollout.finished)
        # Row by row, since the moments of a slot go into its ring in the order in which they happened.
        for row in range(batch.size[0]):
            slots = np.flatnonzero(valid[row])
            entry = {name: column[row, slots] for name, column in columns.items()}
            self._begin(slots, entry["episode"])
            self._length[slots] += 1
            # Solved once is solved: a reward for success comes at the first time alone.
            entry["success"] = _first(entry["success"] & executed[row, slots]) & ~self._solved[slots, None]
            self._solved[slots] |= entry["success"].any(1)
            # Where it is asked what comes of the episode, nothing is drawn of one that goes on.
            self._write(slots, entry, decided=entry["counts"] & (REMAINING not in self.fields))
            if REMAINING in self.fields:
                self._finish(slots[entry["terminated"] | entry["truncated"]])
            # What follows is the next row, or nothing, or an observation without a decision.
            goes_on = ~entry["terminated"] & ~entry["truncated"] if row == last else np.zeros(len(slots), np.bool_)
            self._awaits[slots[goes_on]] = entry["episode"][goes_on]
            alone = slots[goes_on | entry["truncated"] & ~entry["terminated"]]
            here = {name: column[row, alone] for name, column in observed.items()}
            self._write(alone, here, decided=np.zeros(len(alone), np.bool_))
        self._live = np.flatnonzero(self._decided)
        self._leave_memory()

    def _note_pages(self, entries: int) -> None:
        """Note that so many entries of all columns are about to be read or written."""
        self._pages += entries * self._entry_pages
        if self._pages > self._most_pages:
            self._leave_memory()
            self._pages = entries * self._entry_pages

    def _leave_memory(self) -> None:
        """Let what was read and written in files leave the memory of the process, not the page cache of the system."""
        for file in self._files:
            file.madvise(mmap.MADV_DONTNEED)
        self._pages = 0

    def _by_place(self, rollout: Rollout) -> dict[str, NDArray[Any]]:
        """Return the observations that follow chunks and are in no row, at the row and slot of the chunk: `[K, B,
        ...]`, those of this rank at least, and zeros elsewhere."""
        fields, following = {name: self.fields[name] for name in self._observed}, rollout.following
        found = {name: np.zeros((*rollout.batch.size, *each.shape), each.dtype) for name, each in fields.items()}
        if following is not None:
            for name, column in found.items():
                column[following.rows, following.slots] = following.columns[name]
        return found

    def _begin(self, slots: NDArray[np.int64], episodes: NDArray[np.int64]) -> None:
        """Prepare for decisions of these slots, in these episodes: at a moment that awaits one, or at a new one."""
        new = episodes != self._episodes[slots]
        self._solved[slots[new]], self._length[slots[new]] = False, 0
        self._episodes[slots] = episodes
        goes_on = self._awaits[slots] == episodes
        self._ends[slots[goes_on]] -= 1
        self._saved = np.minimum(self._saved, self._ends)
        self._awaits[slots] = -1

    def _finish(self, slots: NDArray[np.int64]) -> None:
        """Note in all decisions of the episodes that have just ended in these slots what came of them."""
        for slot in slots:
            count = min(self._length[slot], self.rows)
            places = np.arange(self._ends[slot] - count, self._ends[slot]) % self.rows
            self._decided[slot, places] = True
            self._saved[slot] = min(self._saved[slot], self._ends[slot] - count)
            if slot in self.own:
                own = slot - self.own.start
                steps = self._columns["steps"][own, places].astype(np.int32)
                self._columns[REMAINING][own, places] = steps[::-1].cumsum()[::-1]
                self._columns[SOLVED][own, places] = self._solved[slot]

    def _write(
        self, slots: NDArray[np.int64], entry: Mapping[str, NDArray[Any]], *, decided: NDArray[np.bool_]
    ) -> None:
        """Write a moment of each of some slots, on the rank that has the slot; all ranks know of it, and whether its
        decision may be drawn."""
        places = self._ends[slots] % self.rows
        self._decided[slots, places] = decided
        if SOURCE in self.fields:
            self._taught[slots, places] = decided & (entry[SOURCE] == Source.expert) if SOURCE in entry else False
        here = (slots >= self.own.start) & (slots < self.own.stop)
        own = slots[here] - self.own.start
        self._note_pages(len(own))
        for name, column in self._columns.items():
            if name in entry:
                column[own, places[here]] = entry[name][here]
        self._ends[slots] += 1

    # ---- drawing

    def minibatches(self, count: int, size: int, beside: DemonstrationSampler | None = None) -> Iterator[Minibatch]:
        """Draw minibatches of `size` decisions, with replacement; yields this rank's decisions of each.

        Args:
            count: number of minibatches, the last ones of those due so far.
            size: decisions of each.
            beside: demonstrations that are a share of every minibatch, at its first places.
        """
        labelled = self._interventions() if beside is not None and beside.interventions_join else NONE
        for number in range(self._taken - count, self._taken):
            demonstrated = 0 if beside is None else beside.count(number, size)
            # All ranks draw the same decisions, and each reads those that it holds.
            columns, where = self._own_of(self._live[self._draw(len(self._live), size - demonstrated)])
            where += demonstrated
            if beside is not None and demonstrated:
                known = len(beside.demonstrations)
                drawn = self._draw(known + len(labelled), demonstrated)
                recorded = np.flatnonzero(drawn < known)
                # Every rank has all demonstrations; they are dealt in turn.
                dealt = recorded[recorded % (len(self._decided) // len(self.own)) == self.own.start // len(self.own)]
                shown, places = beside.demonstrations.take(drawn[dealt]), dealt
                if len(labelled):
                    others = np.flatnonzero(drawn >= known)
                    also, held = self._own_of(labelled[drawn[others] - known])
                    shown, places = joined(shown, also), np.concatenate([places, others[held]])
                columns, where = joined(shown, columns), np.concatenate([places, where])
            yield Minibatch(
                columns={name: torch.from_numpy(column) for name, column in columns.items()},
                places=torch.from_numpy(where),
                size=size,
                demonstrated=torch.from_numpy(where < demonstrated),
            )

    def _interventions(self) -> NDArray[np.int64]:
        """Return the places of decisions that an expert executed and that can be drawn."""
        return np.flatnonzero(self._decided & self._taught)

    def _own_of(self, drawn: NDArray[np.int64]) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
        """Return the columns of those decisions that this rank holds, and their numbers among the ones drawn."""
        slots, places = np.divmod(drawn, self.rows)
        held = np.flatnonzero((slots >= self.own.start) & (slots < self.own.stop))
        return self._take(slots[held] - self.own.start, places[held]), held

    def _draw(self, most: int, count: int) -> NDArray[np.int64]:
        """Draw `count` numbers below `most`, the same on all ranks."""
        if not count:
            return np.zeros(0, np.int64)
        return np.asarray(torch.randint(most, (count,), generator=self._generator).numpy())

    def _take(self, slots: NDArray[np.int64], places: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the columns of this rank's decisions at places of its slots."""
        self._note_pages(len(slots))
        columns = {name: column[slots, places] for name, column in self._columns.items()}
        # After a termination nothing follows, and whatever is there has the factor 0; but it must be a number.
        following = np.where(columns["terminated"], places, (places + 1) % self.rows)
        columns |= {f"next_{name}": self._columns[name][slots, following] for name in self._observed}
        columns["steps"] = columns["steps"].astype(np.int64)
        return columns

    # ---- checkpoints

    def state(self, ranks: Ranks, *, whole: bool) -> ReplayState | None:
        """Return what a checkpoint keeps, on the first rank; None on the others. All ranks must call it.

        Args:
            ranks: those of the run.
            whole: all moments, not only those since the last state, whose files are gone.
        """
        if whole:
            self._saved[:] = 0
            self._segments = []
        own = self._moments_since(np.maximum(self._saved, self._ends - self.rows))
        moments = {name: torch.cat(ranks.gather_rows(column)) for name, column in own.items()}
        self._saved = self._ends.copy()
        kept = [each for each in self._segments if (self._ends - self.rows < each.ends).any()]
        self._segments = [*kept, Segment(f"moments_{self._next_segment:06d}.safetensors", tuple(self._ends.tolist()))]
        self._next_segment += 1
        if not ranks.is_first:
            return None
        return ReplayState(
            counters={
                **{name: getattr(self, f"_{name}").tolist() for name in COUNTED},
                "added": self.added,
                "newest": self._newest,
                "asking": self._asking,
                "taken": self._taken,
                "outcomes": list(self._outcomes),
                "ended": dict(self.ended),
                "is_refilled": self.is_refilled,
                "segments": [each.name for each in self._segments],
                "segment_ends": [each.ends for each in self._segments],
            },
            generator=self._generator.get_state(),
            moments=moments,
        )

    def _moments_since(self, first: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return a copy of this rank's moments from number `first` of each slot on, by column; with `slot`, `number`
        and `decided`."""
        counts = [int(self._ends[slot] - first[slot]) for slot in self.own]
        slots = np.repeat(np.array(self.own), counts)
        numbers = np.concatenate([np.arange(first[slot], self._ends[slot]) for slot in self.own])
        at = slots - self.own.start, numbers % self.rows
        found = {"slot": slots, "number": numbers, "decided": self._decided[slots, numbers % self.rows]}
        found |= {name: column[at] for name, column in self._columns.items()}
        return {name: torch.from_numpy(each) for name, each in found.items()}

    def restore(self, state: ReplayState, folder: Path) -> None:
        """Continue from a state whose files are in a folder; each rank reads the moments of its slots.

        Raises:
            ReplayError: the state is that of another run.
        """
        counters = state.counters
        slots, found = len(self._decided), len(counters["ends"])
        if found != slots:
            raise ReplayError(f"the replay is that of another run: it has {found} slots, this run has {slots}")
        for name in COUNTED:
            getattr(self, f"_{name}")[:] = counters.get(name, 0)  # earlier versions had no length
        self.added, self._newest = counters["added"], counters["newest"]
        self._asking, self._taken = counters["asking"], counters["taken"]
        self._outcomes.extend(counters["outcomes"])
        self.ended = dict(counters["ended"])
        self.is_refilled = bool(counters.get("is_refilled", False))  # earlier versions had no such replay
        self._generator.set_state(state.generator)
        for name in counters["segments"]:  # the oldest first: what was written twice, was written last
            self._read(folder / Path(name).name)
        self._live = np.flatnonzero(self._decided)
        # The next checkpoint links these files, and adds what is new.
        self._saved = self._ends.copy()
        pairs = zip(counters["segments"], counters["segment_ends"], strict=True)
        self._segments = [Segment(name, tuple(ends)) for name, ends in pairs]
        self._next_segment = 1 + int(re.findall(r"\d+", counters["segments"][-1])[0])

    def _read(self, path: Path) -> None:
        """Read the moments of a file that are still in the rings."""
        moments = {name: column.numpy() for name, column in load_file(path).items()}
        shapes = {name: moments[name].shape[1:] if name in moments else None for name in self.fields}
        if wrong := [name for name, each in self.fields.items() if shapes[name] != each.shape]:
            raise ReplayError(
                f"the replay is that of another run: {', '.join(f'{name} is {shapes[name]}' for name in wrong)}, "
                f"expected {', '.join(str(self.fields[name].shape) for name in wrong)}"
            )
        slots, numbers = moments["slot"], moments["number"]
        kept = (numbers >= self._ends[slots] - self.rows) & (numbers < self._ends[slots])
        slots, places = slots[kept], numbers[kept] % self.rows
        self._decided[slots, places] = moments["decided"][kept]
        if SOURCE in self.fields:
            self._taught[slots, places] = moments["decided"][kept] & (moments[SOURCE][kept] == Source.expert)
        here = (slots >= self.own.start) & (slots < self.own.stop)
        for name, column in self._columns.items():
            column[slots[here] - self.own.start, places[here]] = moments[name][kept][here]


@dataclass(frozen=True, kw_only=True)
class DemonstrationSampler:
    """Demonstrations that are in every minibatch."""

    demonstrations: Transitions
    share: float
    """Of a minibatch, 0 .. 1."""
    interventions_join: bool = False
    """Whether decisions of the replay that an expert executed are among them, each as likely as a recorded one, as in
    HIL-SERL (Luo et al. 2024, arXiv:2410.21845). They are drawn with all others, too."""

    def count(self, number: int, size: int) -> int:
        """Return how many decisions of a minibatch are demonstrations, such that the share is exact over any number of
        minibatches.

        Args:
            number: of the minibatch, counted from the beginning of the run.
            size: of every minibatch.
        """
        before, after = (math.floor(each * size * self.share + ROUNDING) for each in (number, number + 1))
        return after - before


def joined(demonstrated: Mapping[str, NDArray[Any]], played: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the columns of demonstrated decisions, followed by those of others, which nobody has demonstrated unless
    they say so."""
    filled = {
        name: np.zeros((len(played["steps"]), *each.shape[1:]), each.dtype) for name, each in demonstrated.items()
    }
    return {name: np.concatenate([each, (filled | dict(played))[name]]) for name, each in demonstrated.items()}


def _column(batch: TrajectoryBatch, name: str) -> Tensor:
    """Return a column of a batch, or of its traces of decisions."""
    column: Tensor = batch[name] if name in batch else batch.data["trace"][name]
    return column


def _first(success: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return only the first True of each row `[M, C]`."""
    first: NDArray[np.bool_] = success & (success.cumsum(1) == 1)
    return first
