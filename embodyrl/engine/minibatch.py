"""Batches as dictionaries of columns, their minibatches and micro-batches.

Each minibatch makes one optimiser step. It goes through the model in micro-batches, which fit into memory and whose
gradients add up to its own. A loss that compares whole episodes needs all chunks of an episode in one part.

Shapes: `M` chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from embodyrl.engine.exchange import ADDRESS, Exchange
from embodyrl.engine.large import LEARNED_FROM
from embodyrl.models.policy import PolicyObservation
from embodyrl.tracking.clock import Clock, Phase

Columns = dict[str, Any]
"""Tensors `[M, ...]` by name, and dictionaries of them."""

Drawn = Sequence[tuple[Tensor, float]]
"""Minibatches: the row numbers of their chunks, and their share of the batch."""

ON_HOST = frozenset({"task_index", ADDRESS})
"""Columns that stay on the CPU: task descriptions and rows of large columns are chosen with them, and reading them from
a GPU would wait for the work of the micro-batches before."""


def mapped(columns: Mapping[str, Any], function: Callable[[Tensor], Tensor]) -> Columns:
    """Return a function of every tensor, in dictionaries of the same names."""
    return {
        name: function(column) if isinstance(column, Tensor) else mapped(column, function)
        for name, column in columns.items()
    }


def to_columns(batch: Mapping[str, Any], device: torch.device, on_host: frozenset[str] = ON_HOST) -> Columns:
    """Return a batch of which all tensors but those of `on_host` are on the device."""
    return {
        name: column.to("cpu" if name in on_host else device)
        if isinstance(column, Tensor)
        else to_columns(column, device, on_host)
        for name, column in batch.items()
    }


def rows(columns: Columns, which: Tensor | slice) -> Columns:
    """Return some rows of every column.

    Args:
        columns: of a batch.
        which: row numbers, int64, on the CPU; or a range of rows, whose columns share the memory of the given ones.
    """
    # `index_select` copies rows as blocks of memory, several times faster than an index in brackets. Row numbers are
    # queued to a GPU without waiting for it.
    return {
        name: rows(column, which)
        if isinstance(column, dict)
        else (
            column[which]
            if isinstance(which, slice)
            else column.index_select(0, which.to(column.device, non_blocking=True))
        )
        for name, column in columns.items()
    }


def length(columns: Columns) -> int:
    """Return `M`, the number of chunks."""
    return len(columns["task_index"])


def observation_from(columns: Columns, task_descriptions: Sequence[str]) -> PolicyObservation:
    """Return the observations in a batch's columns, as `Policy.preprocess` takes them."""
    return PolicyObservation(
        images=columns.get("images"),
        proprio=columns.get("proprio"),
        task_descriptions=[task_descriptions[index] for index in columns["task_index"].tolist()],
        better=columns.get("better"),
    )


def draw_minibatches(
    sequence: Tensor, count: int, whole: bool, generator: torch.Generator
) -> Iterator[tuple[Tensor, float]]:
    """Yield the row numbers of each minibatch of an epoch, on the CPU, and the minibatch's share of the batch.

    Args:
        sequence: `[M]`, number of the episode that each chunk belongs to.
        count: of minibatches, at most.
        whole: draw episode by episode, instead of chunk by chunk.
        generator: on the CPU.
    """
    # All on the CPU, where a GPU is waited for once: its numbers of rows depend on values, and its generator would
    # shuffle the same seed differently.
    unit = torch.unique(sequence.cpu(), return_inverse=True)[1] if whole else torch.arange(len(sequence))
    units = int(unit.max()) + 1
    order = torch.randperm(units, generator=generator)
    for chosen in order.tensor_split(min(count, units)):
        # The share counts units, not rows: episodes differ in length, and `token_weights` has weighed their rows.
        index = torch.nonzero(torch.isin(unit, chosen)).squeeze(1) if whole else chosen
        yield index, len(chosen) / units


def nested(leaves: Mapping[str, Tensor]) -> Columns:
    """Return columns of which some are called `trace/sample` as dictionaries of columns."""
    columns: Columns = {}
    for name, column in leaves.items():
        outer, _, inner = name.partition("/")
        columns[outer] = columns.get(outer, {}) | {inner: column} if inner else column
    return columns


def merged(one: Columns, other: Columns) -> Columns:
    """Return the columns of both, nested ones too."""
    both = {name: one[name] | other[name] for name in one.keys() & other.keys() if isinstance(one[name], dict)}
    return one | other | both


def absent(names: Iterable[str], columns: Columns) -> list[str]:
    """Return the names of columns, nested ones too, that are not among these."""
    there = {name for name, column in columns.items() if not isinstance(column, dict)}
    there |= {f"{name}/{inner}" for name, column in columns.items() if isinstance(column, dict) for inner in column}
    return [name for name in names if name not in there]


def split_minibatch(minibatch: Columns, size: int | None, whole: bool) -> Iterator[Columns]:
    """Yield the micro-batches of a minibatch, in its order.

    Args:
        minibatch: its columns.
        size: chunks in a micro-batch at most; None: all.
        whole: do not cut episodes; one that is longer than `size` is a micro-batch of its own.
    """
    if size is None or size >= length(minibatch):
        yield minibatch
    elif not whole:
        for start in range(0, length(minibatch), size):
            yield rows(minibatch, slice(start, start + size))
    else:
        _, member, lengths = torch.unique(minibatch["sequence"].cpu(), return_inverse=True, return_counts=True)
        for episodes in pack(lengths.tolist(), size):
            yield rows(minibatch, torch.nonzero(torch.isin(member, torch.tensor(episodes))).squeeze(1))


def pack(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield the numbers of the episodes of each micro-batch: as many as fit, in their order.

    Args:
        lengths: chunks of each episode.
        size: chunks of a micro-batch at most.
    """
    taken: list[int] = []
    used = 0
    for number, steps in enumerate(lengths):
        if taken and used + steps > size:
            yield taken
            taken, used = [], 0
        taken.append(number)
        used += steps
    if taken:
        yield taken


class MicroBatches:
    """Cuts minibatches into parts that fit into memory, and brings large columns of other ranks to those who need them.

    Args:
        exchange: of large columns; knows the ranks.
        clock: waiting for other ranks counts as `sync`.
        device: of the columns.
        on_host: columns that stay on the CPU.
        size: most chunks of a part; None: a minibatch is one part.
    """

    def __init__(
        self, exchange: Exchange, clock: Clock, device: torch.device, on_host: frozenset[str], size: int | None
    ) -> None:
        self._exchange, self._ranks, self._clock = exchange, exchange.ranks, clock
        self._device, self._on_host = device, on_host
        self.size = size

    def of(self, minibatch: Columns, *, whole: bool, most: int | None = None) -> Iterator[tuple[Columns, bool]]:
        """Yield this rank's parts of a minibatch, and whether each counts; see `Ranks.scatter`.

        Args:
            minibatch: its columns `[M, ...]`, the same on all ranks.
            whole: do not cut episodes.
            most: most chunks of a part where no `size` is set.
        """
        size = self._ranks.part_size(length(minibatch), self.size or most)
        parts = list(split_minibatch(minibatch, size, whole))
        if ADDRESS not in minibatch:
            yield from self._ranks.scatter(parts)
            return
        # Large columns come for several parts at a time, at most a minibatch: each exchange waits for the slowest rank.
        dealt = [
            # Of a part that does not count, a row is enough.
            [(part if counts else rows(part, slice(0, 1)), counts) for part, counts in self._ranks.scatter(parts, rank)]
            for rank in range(self._ranks.size)
        ]
        at_once = math.ceil((most or length(minibatch)) / (size * self._ranks.size))
        for start in range(0, len(dealt[0]), at_once):
            yield from self._fetched([each[start : start + at_once] for each in dealt])

    def fetches(self, columns: Columns, name: str) -> bool:
        """Return whether a column lies with the ranks that collected it."""
        return ADDRESS in columns and name in self._exchange.names

    def whole(self, columns: Columns) -> Columns:
        """Return the columns of a batch with the large ones, on every rank."""
        if "inputs" in columns or ADDRESS not in columns:
            return columns
        return next(self._fetched([[(columns, True)]] * self._ranks.size))[0]

    def _fetched(self, dealt: Sequence[Sequence[tuple[Columns, bool]]]) -> Iterator[tuple[Columns, bool]]:
        """Yield this rank's parts with their large columns, given the parts of every rank."""
        own = dealt[self._ranks.rank]
        learned = (name for name in self._exchange.names if name.partition("/")[0] in LEARNED_FROM)
        names = absent(learned, own[0][0])
        addresses = [torch.cat([part[ADDRESS] for part, _ in parts]) for parts in dealt]
        with self._clock.measure(Phase.sync):
            fetched = self._exchange.fetch(addresses, names)
        end = 0
        for part, counts in own:
            start, end = end, end + length(part)
            large = nested({name: column[start:end] for name, column in fetched.items()})
            yield merged(part, to_columns(large, self._device, self._on_host)), counts
