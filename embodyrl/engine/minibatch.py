"""Batches as dictionaries of columns, their minibatches and micro-batches, and the metrics of these.

Each minibatch makes one optimiser step. It goes through the model in micro-batches, which fit into memory and whose
gradients add up to its own. A loss that compares whole episodes needs all chunks of an episode in one part.

Shapes: `M` chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.data.layout import Batch
from embodyrl.engine.exchange import ADDRESS
from embodyrl.engine.parallel import Ranks
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


def action_weights(batch: Batch) -> NDArray[np.float32]:
    """Return the weights `[M, C]` of demonstrated actions: 0 for repeated ones, and a mean of 1 over the minibatch."""
    if batch.repeated is None:
        return np.ones(batch.actions.shape[:2], np.float32)
    counts = ~batch.repeated
    weights: NDArray[np.float32] = np.divide(counts, counts.mean(), dtype=np.float32)
    return weights


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


# ---- metrics


Metrics = dict[str, Tensor]
"""Detached scalars by name."""


@dataclass(kw_only=True)
class Total:
    """Loss and logged numbers of a minibatch or of a part of it; losses of parts add up to that of the minibatch."""

    loss: Tensor
    """Scalar."""
    log_ratio: Tensor
    """log(pi / pi_old) at the level of the log-probs, detached."""
    entries: dict[str, Tensor]
    """Further numbers to log, detached, at the same level."""
    valid: Tensor
    """bool, the entries that count."""
    version: Tensor
    """`[M]`, the version of the policy that chose each chunk."""
    value_losses: Tensor | None = None
    """`[M]`, detached."""


def nothing_of(total: Total) -> Total:
    """Return a result of the same shape of which nothing counts; see `Ranks.scatter`."""
    return Total(
        loss=torch.zeros_like(total.loss),
        log_ratio=total.log_ratio,
        entries=total.entries,
        valid=torch.zeros_like(total.valid),
        version=total.version,
        value_losses=None if total.value_losses is None else total.value_losses[:0],
    )


@dataclass(kw_only=True)
class Step:
    """An optimiser step.

    Its metrics are computed at the end of the update. Between two backward passes the same operations take three times
    as long on a CPU, because matrix products have displaced them from its caches.
    """

    totals: Sequence[Total]
    """Of this rank's parts of the minibatch."""
    loss: Tensor
    """Of the minibatch; the same on all ranks."""
    grad_norm: Tensor | None = None
    """Norm of the gradients before clipping; None before the step is made."""


def approx_kl(log_ratio: Tensor) -> Tensor:
    """Estimate KL(pi_old || pi) of every entry by r - 1 - log r, which is never negative (Schulman 2020, k3)."""
    return log_ratio.exp() - 1.0 - log_ratio


def mean_kl(step: Step, ranks: Ranks) -> Tensor:
    """Return the mean of `approx_kl` over the entries that count; the same on all ranks."""
    valid = joined([total.valid for total in step.totals])
    found = approx_kl(joined([total.log_ratio for total in step.totals]))
    total, count = ranks.sum(torch.stack([torch.where(valid, found, 0.0).sum(), valid.sum()])).unbind()
    return total / count.clamp(min=1.0)


def summarize(step: Step, ranks: Ranks, version: int) -> Metrics:
    """Return the metrics of a step, the same on all ranks: means over the entries that count, the largest ratio, and
    the largest distance from 1 of a ratio of a chunk that `version` of the policy chose (`ratio_error`)."""
    totals = step.totals
    valid, log_ratio = (joined([getattr(total, name) for total in totals]) for name in ("valid", "log_ratio"))
    columns = {name: joined([total.entries[name] for total in totals]) for name in totals[0].entries}
    columns |= {"ratio": log_ratio.exp(), "approx_kl": approx_kl(log_ratio)}
    is_new = (joined([total.version for total in totals]) == version).view(-1, *[1] * (log_ratio.dim() - 1))
    error = torch.where(is_new, (columns["ratio"] - 1.0).abs(), 0.0)
    # Everything is packed into one vector: one exchange between ranks, and no `.item()` that would make the CPU wait
    # for the GPU here. Sums and counts travel, because means of parts of different size do not average.
    largest = torch.stack([torch.where(valid, column, 0.0).max() for column in (columns["ratio"], error)])
    weights = valid.to(torch.float32)
    sums = (torch.stack(list(columns.values())) * weights).flatten(1).sum(1)
    errors = torch.cat([sums.new_zeros(0) if each.value_losses is None else each.value_losses for each in totals])
    numbers = torch.stack([weights.sum(), errors.sum(), errors.new_full((), len(errors))])
    every = torch.stack(ranks.gather(torch.cat([numbers, sums, largest])))
    count, value_loss, chunks, *logged = every[:, :-2].sum(0).unbind()
    metrics = {name: total / count.clamp(min=1.0) for name, total in zip(columns, logged, strict=True)}
    metrics["ratio_max"], metrics["ratio_error"] = every[:, -2:].amax(0).unbind()
    if totals[0].value_losses is not None:
        metrics["value_loss"] = value_loss / chunks
    return metrics if step.grad_norm is None else metrics | {"grad_norm": step.grad_norm}


def metrics_of(history: Sequence[Step], ranks: Ranks, version: int) -> dict[str, float]:
    """Return the metrics of an update.

    Args:
        history: its steps.
        ranks: those of the run.
        version: of the policy that the update started from.
    """
    metrics = [summarize(step, ranks, version) for step in history]
    for number, each in enumerate(metrics):
        error = each.pop("ratio_error")
        if number == 0:  # no step had been made, so the policy was still the one that chose the chunks
            each["ratio_error_first_minibatch"] = error
    return mean_metrics(metrics)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the first dimension; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def mean_metrics(history: Sequence[Metrics]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it, as `train/<name>`; of `ratio_max` the largest."""
    names = dict.fromkeys(name for row in history for name in row)
    # Stacked on the device first: one transfer per metric, not one per step.
    found = {name: torch.stack([row[name] for row in history if name in row]) for name in names}
    return {
        f"train/{name}": float(column.max() if name == "ratio_max" else column.mean()) for name, column in found.items()
    }
