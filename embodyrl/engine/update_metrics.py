"""Metrics of an update. Shapes: `M` chunks."""

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
