"""What an update reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


def summarize(totals: Sequence[Total]) -> Metrics:
    """Metrics of a minibatch: means over the entries that count, and the largest ratio."""
    valid = torch.cat([total.valid for total in totals])
    columns = {name: torch.cat([total.entries[name] for total in totals]) for name in totals[0].entries}
    stacked = torch.stack(list(columns.values()))
    means = masked_means(stacked, valid)
    metrics = dict(zip(columns, means.unbind(), strict=True))
    if "ratio" in columns:
        metrics["ratio_max"] = torch.where(valid, columns["ratio"], 0.0).max()
    errors = [total.value_losses for total in totals if total.value_losses is not None]
    if errors:
        metrics["value_loss"] = torch.cat(errors).mean()
    return metrics


def masked_means(columns: Tensor, valid: Tensor) -> Tensor:
    """Mean of each column `[R, M, ...]` over valid entries `[M, ...]`; 0 if there are none."""
    weights = valid.to(columns.dtype)
    return (columns * weights).flatten(1).sum(1) / weights.sum().clamp(min=1.0)


def mean_metrics(history: Sequence[Metrics]) -> dict[str, float]:
    """Mean of each metric over the rows that have it, under `train/`; of `ratio_max` the largest."""
    names = dict.fromkeys(name for row in history for name in row)
    found = {name: torch.stack([row[name] for row in history if name in row]) for name in names}
    return {
        f"train/{name}": float(column.max() if name == "ratio_max" else column.mean()) for name, column in found.items()
    }
