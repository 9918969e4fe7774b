"""What an update reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodyrl.engine.parallel import Ranks

Metrics = dict[str, Tensor]
"""Detached scalars by name."""


@dataclass(kw_only=True)
class Total:
    """What is descended, of a minibatch or of a part of it: those of parts add up to that of the whole."""

    loss: Tensor
    """Scalar."""
    entries: dict[str, Tensor]
    """What to log of every entry, detached, at the level of the log-probs."""
    valid: Tensor
    """Which entries count."""
    value_losses: Tensor | None = None
    """`[M]`, detached."""


def nothing_of(total: Total) -> Total:
    """The same shape of a result, of which nothing counts."""
    return Total(
        loss=torch.zeros_like(total.loss),
        entries=total.entries,
        valid=torch.zeros_like(total.valid),
        value_losses=None if total.value_losses is None else total.value_losses[:0],
    )


def summarize(totals: Sequence[Total], ranks: Ranks) -> tuple[Tensor, Metrics]:
    """Loss and metrics of a minibatch, of which each rank has some parts: means over the entries that count, and the
    largest ratio and error of one. The same on all ranks."""
    valid = joined([total.valid for total in totals])
    columns = {name: joined([total.entries[name] for total in totals]) for name in totals[0].entries}
    largest = torch.stack([torch.where(valid, columns[name], 0.0).max() for name in ("ratio", "ratio_error")])
    del columns["ratio_error"]
    weights = valid.to(torch.float32)
    sums = (torch.stack(list(columns.values())) * weights).flatten(1).sum(1)
    loss = torch.stack([total.loss for total in totals]).sum()
    errors = torch.cat([loss.new_zeros(0) if each.value_losses is None else each.value_losses for each in totals])
    numbers = torch.stack([loss, weights.sum(), errors.sum(), errors.new_tensor(len(errors))])
    every = torch.stack(ranks.gather(torch.cat([numbers, sums, largest])))
    loss, count, error, decisions, *logged = every[:, :-2].sum(0).unbind()
    metrics = {name: total / count.clamp(min=1.0) for name, total in zip(columns, logged, strict=True)}
    metrics["ratio_max"], metrics["ratio_error"] = every[:, -2:].amax(0).unbind()
    if totals[0].value_losses is not None:
        metrics["value_loss"] = error / decisions
    return loss, metrics


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One after the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def mean_metrics(history: Sequence[Metrics]) -> dict[str, float]:
    """Mean of each metric over the rows that have it, under `train/`; of `ratio_max` the largest."""
    names = dict.fromkeys(name for row in history for name in row)
    found = {name: torch.stack([row[name] for row in history if name in row]) for name in names}
    return {
        f"train/{name}": float(column.max() if name == "ratio_max" else column.mean()) for name, column in found.items()
    }
