"""Batches as dictionaries of columns, their minibatches and micro-batches.

Each minibatch makes one optimiser step. It goes through the model in micro-batches, which fit into memory and whose
gradients add up to its own. A loss that compares whole episodes needs all chunks of an episode in one part.

Shapes: `M` chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodyrl.engine.exchange import ADDRESS
from embodyrl.models.policy import PolicyObservation

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Columns = dict[str, Any]
"""Tensors `[M, ...]` by name, and dictionaries of them."""

Drawn = Sequence[tuple[Tensor, float]]
"""Minibatches: the row numbers of their chunks, and their share of the batch."""


ON_HOST = frozenset({"task_index", ADDRESS})
"""Columns that stay on the CPU: task descriptions and rows of large columns are chosen with them, and reading them from
a GPU would wait for the work of the micro-batches before."""


def to_columns(batch: TensorDictBase | Columns, device: torch.device, on_host: frozenset[str] = ON_HOST) -> Columns:
    """Return a batch as plain dictionaries, from which taking rows costs a tenth of what it costs a TensorDict. All
    tensors but those of `on_host` are on the device."""
    items: Iterable[tuple[str, Any]] = batch.items()
    return {
        name: column.to("cpu" if name in on_host else device)
        if isinstance(column, Tensor)
        else to_columns(column, device, on_host)
        for name, column in items
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


def numbered(columns: Columns) -> Columns:
    """Return the columns with one more, `number`, so that results of shuffled parts find their row again."""
    return columns | {"number": torch.arange(length(columns), device=columns["version"].device)}


def observation_from(columns: Columns, task_descriptions: Sequence[str]) -> PolicyObservation:
    """Return the observations in a batch's columns, as `Policy.preprocess` takes them."""
    return PolicyObservation(
        images=columns.get("images"),
        proprio=columns.get("proprio"),
        task_descriptions=[task_descriptions[index] for index in columns["task_index"].tolist()],
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
