"""Batches by column, and their parts.

A batch is learned from in minibatches, one optimiser step each; a minibatch in micro-batches, which fit into memory
and whose gradients add up to its own. A loss that compares whole episodes needs an episode's decisions in one part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodyrl.envs import Observation

Columns = dict[str, Any]
"""Tensors `[M, ...]` by name, and tables of them."""

Drawn = Sequence[tuple[Tensor, float]]
"""Minibatches: the numbers of their decisions, and their share of the batch."""


def to_columns(batch: TensorDictBase, device: torch.device) -> Columns:
    """A batch as plain dictionaries: taking rows out of those costs a tenth."""
    return {
        name: to_columns(column, device) if isinstance(column, TensorDictBase) else column.to(device)
        for name, column in batch.items()
    }


def rows(columns: Columns, which: Tensor | slice) -> Columns:
    """Some rows of every column."""
    return {
        name: rows(column, which) if isinstance(column, dict) else column[which] for name, column in columns.items()
    }


def length(columns: Columns) -> int:
    """`M`."""
    return len(columns["task"])


def numbered(columns: Columns) -> Columns:
    """The same columns, and one that numbers the rows, so that parts know which they are."""
    return columns | {"number": torch.arange(length(columns), device=columns["task"].device)}


def observation_from(columns: Columns, sentences: Sequence[str]) -> Observation:
    """The observations in a batch's columns `[M]`, as `Policy.preprocess` takes them."""
    return Observation(
        images=columns.get("images"),
        proprio=columns.get("proprio"),
        tasks=[sentences[index] for index in columns["task"].tolist()],
    )


def draw_minibatches(
    sequence: Tensor, count: int, whole: bool, generator: torch.Generator
) -> Iterator[tuple[Tensor, float]]:
    """Numbers of the decisions of each minibatch, and the minibatch's share of the batch.

    Args:
        sequence: `[M]`, number of the episode that each decision belongs to.
        count: of minibatches, at most.
        whole: draw episode by episode, instead of decision by decision.
        generator: on the CPU.
    """
    unit = torch.unique(sequence, return_inverse=True)[1] if whole else torch.arange(len(sequence))
    units = int(unit.max()) + 1
    order = torch.randperm(units, generator=generator).to(sequence.device)
    for chosen in order.tensor_split(min(count, units)):
        index = torch.nonzero(torch.isin(unit, chosen)).squeeze(1) if whole else chosen
        yield index, len(chosen) / units


def split_minibatch(minibatch: Columns, size: int | None, whole: bool) -> Iterator[Columns]:
    """The micro-batches of a minibatch, in its order.

    Args:
        minibatch: its columns.
        size: decisions in a micro-batch at most; None: all.
        whole: do not cut episodes; one that is longer than `size` is a micro-batch of its own.
    """
    if size is None or size >= length(minibatch):
        yield minibatch
    elif not whole:
        for start in range(0, length(minibatch), size):
            yield rows(minibatch, slice(start, start + size))
    else:
        _, member, lengths = torch.unique(minibatch["sequence"], return_inverse=True, return_counts=True)
        for episodes in pack(lengths.tolist(), size):
            numbers = torch.tensor(episodes, device=member.device)
            yield rows(minibatch, torch.nonzero(torch.isin(member, numbers)).squeeze(1))


def pack(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Numbers of the episodes of each micro-batch: as many as fit, in their order."""
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
