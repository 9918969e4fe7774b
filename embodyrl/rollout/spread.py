"""A batch of several ranks: small columns are on each of them, large ones stay with the rank that collected them.

Such a batch has a column `address` in place of the large ones; `engine.exchange` holds their rows.

Shapes: `K` chunks, `B` slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from embodyrl.engine.exchange import ADDRESS, Exchange
from embodyrl.engine.large import APART, LARGE_ROW
from embodyrl.engine.parallel import Ranks
from embodyrl.rollout.batch import BatchError, TrajectoryBatch, concat, leaves, type_name
from embodyrl.rollout.episodes import FinalObservations, FinishedEpisode, Rollout


def gather_rollouts(own: Rollout, exchange: Exchange, episodes_per_slot: int) -> Rollout:
    """Join the rollouts of all ranks into what a single rank with all slots would have collected.

    Args:
        own: the rollout of this rank.
        exchange: between all ranks; gets the large columns.
        episodes_per_slot: the columns of a batch are the first episodes of all slots, then their second ones, ...

    Raises:
        BatchError: the ranks have different columns.
    """
    ranks = exchange.ranks
    if ranks.size == 1:
        return own
    # The barrier can name a rank that hangs; the exchanges below would only time out.
    ranks.barrier()
    own_header = {
        "chunks": own.batch.size[0],
        "env_steps": own.env_steps,
        "finished": [dataclasses.asdict(episode) for episode in own.finished],
        "columns": {name: [type_name(leaf.dtype), *leaf.shape[1:]] for name, leaf in leaves(own.batch).items()},
    }
    # Headers first: tensors are exchanged without shape and type, so all ranks must agree on them before.
    every = ranks.gather_values(own_header)
    if any(each["columns"] != own_header["columns"] for each in every):
        raise BatchError(f"the ranks have collected different columns: {[each['columns'] for each in every]}")
    small = leave_large(own.batch, exchange).pad(max(each["chunks"] for each in every), "K")
    parts = [
        Rollout(
            batch=batch,
            finished=[FinishedEpisode(**episode) for episode in each["finished"]],
            env_steps=each["env_steps"],
            following=own.following if rank == ranks.rank else None,  # stays where it was collected
        )
        for rank, (batch, each) in enumerate(zip(_gather_batches(small, ranks), every, strict=True))
    ]
    return join_rollouts(parts, episodes_per_slot)


def join_rollouts(parts: Sequence[Rollout], episodes_per_slot: int) -> Rollout:
    """Join rollouts of processes into what one process with all slots would have collected.

    Args:
        parts: in the order of their slots, which each numbers from 0.
        episodes_per_slot: the columns of a batch are the first episodes of all slots, then their second ones, ...
    """
    if len(parts) == 1:
        return parts[0]
    longest = max(part.batch.size[0] for part in parts)
    rounds = [part.batch.pad(longest, "K").chunk(episodes_per_slot, "B") for part in parts]
    finished, first = [], 0
    for part in parts:
        finished += [dataclasses.replace(episode, slot=first + episode.slot) for episode in part.finished]
        first += part.batch.size[1] // episodes_per_slot
    return Rollout(
        batch=concat([batches[index] for index in range(episodes_per_slot) for batches in rounds], "B"),
        finished=sorted(finished, key=lambda episode: (episode.row, episode.slot)),
        env_steps=sum(part.env_steps for part in parts),
        following=FinalObservations.join([part.following for part in parts], [part.batch.size[1] for part in parts]),
    )


def _gather_batches(own: TrajectoryBatch, ranks: Ranks) -> list[TrajectoryBatch]:
    """Gather the batches of all ranks, which have the same size."""
    columns = {name: ranks.gather(leaf) for name, leaf in leaves(own).items()}
    return [
        TrajectoryBatch.from_leaves(
            {name: found[rank] for name, found in columns.items()}, own.size, own.task_descriptions
        )
        for rank in range(ranks.size)
    ]


def leave_large(own: TrajectoryBatch, exchange: Exchange) -> TrajectoryBatch:
    """Put this rank's large columns into the exchange; returns its batch with their addresses, or as it is if it has
    none."""
    columns = leaves(own)
    large = [name for name, leaf in columns.items() if is_large(name, leaf)]
    if not large:
        return own
    address = exchange.put({name: columns.pop(name).flatten(0, 1) for name in large})
    columns[ADDRESS] = address.view(own.size)
    return TrajectoryBatch.from_leaves(columns, own.size, own.task_descriptions)


def is_large(name: str, leaf: Tensor) -> bool:
    """Return whether a column `[K, B, ...]` stays with the rank that collected it."""
    return name.partition("/")[0] in APART and prod(leaf.shape[2:]) * leaf.element_size() > LARGE_ROW


def bring_large(
    batch: TrajectoryBatch, exchange: Exchange, receivers: Sequence[bool], names: Collection[str] | None = None
) -> TrajectoryBatch:
    """Return the batch with its large columns, on the ranks that receive them; with all of them it has no addresses any
    more. Rows that do not count (`valid` is False) are 0. All ranks must call it.

    Args:
        batch: the same on all ranks.
        exchange: holds the columns.
        receivers: by rank; the others get the batch as it is.
        names: of the columns; None: all. One that is in the batch already, because a stage has changed it, stays.
    """
    if ADDRESS not in batch:
        return batch
    columns = leaves(batch)
    absent = [name for name in exchange.names if name not in columns]
    chosen = [name for name in absent if names is None or name.partition("/")[0] in names]
    valid = batch["valid"]
    wanted = batch[ADDRESS][valid]
    found = exchange.fetch([wanted[: len(wanted) * receives] for receives in receivers], chosen)
    if not receivers[exchange.ranks.rank]:
        return batch
    if names is None:
        del columns[ADDRESS]  # nothing is left to be fetched
    for name, rows in found.items():
        columns[name] = rows.new_zeros(*batch.size, *rows.shape[1:])
        columns[name][valid] = rows
    return TrajectoryBatch.from_leaves(columns, batch.size, batch.task_descriptions)


def bring_own(batch: TrajectoryBatch, exchange: Exchange, slots: range) -> TrajectoryBatch:
    """Return the batch with the large columns of some slots, all of which this rank has collected; 0 in others, which
    take no memory. One that is in the batch already stays."""
    if ADDRESS not in batch:
        return batch
    columns, own = leaves(batch), slice(slots.start, slots.stop)
    valid = batch["valid"][:, own]
    absent = [name for name in exchange.names if name not in columns]
    for name, rows in exchange.rows_here(batch[ADDRESS][:, own][valid], absent).items():
        columns[name] = rows.new_zeros(*batch.size, *rows.shape[1:])
        columns[name][:, own][valid] = rows
    return TrajectoryBatch.from_leaves(columns, batch.size, batch.task_descriptions)


def leave_share(batch: TrajectoryBatch, exchange: Exchange, share: range | None = None) -> TrajectoryBatch:
    """Leave each rank a share of the slots of a batch that all of them have whole; returns what all keep. `share` is
    this rank's, if it is not `share_here`."""
    ranks = exchange.ranks
    columns = leaves(batch)
    large = [name for name, leaf in columns.items() if is_large(name, leaf)]
    if ranks.size == 1 or not large:
        return batch
    share = share_here(batch.size[1], ranks) if share is None else share
    own = slice(share.start, share.stop)
    # A copy, so that what the batch is in need not be kept.
    held = {name: columns.pop(name)[:, own].clone().flatten(0, 1) for name in large}
    address = torch.zeros(batch.size, dtype=torch.int64)
    address[:, own] = exchange.put(held).view(batch.size[0], len(share))
    columns[ADDRESS] = ranks.sum(address)  # the others left 0 in this rank's slots
    return TrajectoryBatch.from_leaves(columns, batch.size, batch.task_descriptions)


def share_here(slots: int, ranks: Ranks) -> range:
    """Return the slots of a batch whose large columns this rank gets by `leave_share`."""
    return range(-(-slots * ranks.rank // ranks.size), -(-slots * (ranks.rank + 1) // ranks.size))


def shares_here(sizes: Sequence[int], ranks: Ranks) -> list[range]:
    """Return this rank's share of a batch, `share_here`, as slots of each of the batches that are joined to it and have
    so many slots: a rank gets neighbours, mostly of one process."""
    ends = list(accumulate(sizes))
    share = share_here(ends[-1], ranks)
    return [
        range(min(max(share.start - end + size, 0), size), min(max(share.stop - end + size, 0), size))
        for end, size in zip(ends, sizes, strict=True)
    ]


def leave_out(batch: TrajectoryBatch, names: Collection[str]) -> TrajectoryBatch:
    """Return the batch without some of its `leaves`."""
    columns = {name: leaf for name, leaf in leaves(batch).items() if name not in names}
    return TrajectoryBatch.from_leaves(columns, batch.size, batch.task_descriptions)


def forget_all_but(batches: Sequence[TrajectoryBatch], exchange: Exchange) -> None:
    """Forget the large columns of all rows but those of these batches that count."""
    held = [batch[ADDRESS][batch["valid"]] for batch in batches if ADDRESS in batch]
    exchange.keep(torch.cat(held) if held else torch.zeros(0, dtype=torch.int64))


def is_here(batch: TrajectoryBatch, exchange: Exchange, row: int, slot: int) -> bool:
    """Return whether this rank answers for a row: it holds its large columns, or, if no rank does, it is the first."""
    if ADDRESS in batch:
        return bool(exchange.is_here(batch[ADDRESS][row, slot]))
    return exchange.ranks.is_first


def rows_here(batch: TrajectoryBatch, exchange: Exchange, name: str, rows: Tensor, slot: int) -> Tensor | None:
    """Return rows of a slot in a column, which this rank holds if it is large; None if there is no such column."""
    if name in batch:
        return batch[name][rows, slot]
    if name not in exchange.names or ADDRESS not in batch:
        return None
    return exchange.rows_here(batch[ADDRESS][rows, slot], [name])[name]
