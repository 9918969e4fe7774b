"""Metrics of an update. Shapes: `M` chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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


def summarize(history: Sequence[Step], ranks: Ranks, version: int) -> dict[str, Tensor]:
    """Return the metrics of `T` steps, `[T]` each and the same on all ranks: means over the entries that count, the
    largest ratio, and the largest distance from 1 of a ratio of a chunk that `version` of the policy chose
    (`ratio_error`). Steps that were not made have no `grad_norm`."""
    # Steps of the same shape are computed together: an operation on a few hundred numbers takes as long to prepare as
    # to make. All steps travel in one exchange between ranks, whatever their shapes are there.
    alike: dict[torch.Size, list[int]] = {}
    for number, step in enumerate(history):
        alike.setdefault(joined([total.log_ratio for total in step.totals]).shape, []).append(number)
    found = [_sums([history[number] for number in numbers], version) for numbers in alike.values()]
    order = torch.tensor([number for numbers in alike.values() for number in numbers]).argsort()
    every = torch.stack(ranks.gather(torch.cat(found)[order.to(found[0].device)]))
    # Sums and counts travel, because means of parts of different size do not average.
    count, value_loss, chunks, *logged = every[..., :-2].sum(0).unbind(-1)
    names = [*history[0].totals[0].entries, "ratio", "approx_kl"]
    metrics = {name: total / count.clamp(min=1.0) for name, total in zip(names, logged, strict=True)}
    metrics["ratio_max"], metrics["ratio_error"] = every[..., -2:].amax(0).unbind(-1)
    if history[0].totals[0].value_losses is not None:
        metrics["value_loss"] = value_loss / chunks
    norms = [step.grad_norm for step in history if step.grad_norm is not None]
    return metrics | {"grad_norm": torch.stack(norms)} if norms else metrics


def _sums(steps: Sequence[Step], version: int) -> Tensor:
    """Return what this rank adds to the metrics of `T` steps of the same shape, `[T, ...]`: the number of entries that
    count, the sum and the number of value losses, sums of all logged numbers, and the largest ratio and error."""

    def stacked(numbers: Callable[[Total], Tensor]) -> Tensor:
        return torch.stack([joined([numbers(total) for total in step.totals]) for step in steps])

    valid, log_ratio = stacked(lambda total: total.valid), stacked(lambda total: total.log_ratio)
    names = list(steps[0].totals[0].entries)
    columns = {name: stacked(functools.partial(_entry, name)) for name in names}
    columns |= {"ratio": log_ratio.exp(), "approx_kl": approx_kl(log_ratio)}
    is_new = (stacked(lambda total: total.version) == version).view(*log_ratio.shape[:2], *[1] * (log_ratio.dim() - 2))
    error = torch.where(is_new, (columns["ratio"] - 1.0).abs(), 0.0)
    largest = [torch.where(valid, column, 0.0).flatten(1).amax(1) for column in (columns["ratio"], error)]
    weights = valid.to(torch.float32)
    sums = (torch.stack(list(columns.values()), dim=1) * weights.unsqueeze(1)).flatten(2).sum(2)
    errors = [[each.value_losses for each in step.totals if each.value_losses is not None] for step in steps]
    losses = torch.stack([joined(each).sum() if each else sums.new_zeros(()) for each in errors])
    chunks = sums.new_tensor([sum(map(len, each)) for each in errors])
    counts = torch.stack([weights.flatten(1).sum(1), losses, chunks], dim=1)
    return torch.cat([counts, sums, torch.stack(largest, dim=1)], dim=1)


def _entry(name: str, total: Total) -> Tensor:
    return total.entries[name]


def metrics_of(history: Sequence[Step], ranks: Ranks, version: int) -> dict[str, float]:
    """Return the metrics of an update: means over its steps, and the largest `ratio_max`.

    Args:
        history: its steps.
        ranks: those of the run.
        version: of the policy that the update started from.
    """
    if not history:
        return {}
    metrics = summarize(history, ranks, version)
    # No step had been made before the first, so the policy was still the one that chose the chunks.
    first = {"ratio_error_first_minibatch": metrics.pop("ratio_error")[:1]}
    return _means(metrics | first)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the first dimension; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def mean_metrics(history: Sequence[Metrics]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it, as `train/<name>`; of `ratio_max` the largest."""
    names = dict.fromkeys(name for row in history for name in row)
    # Stacked on the device first: one transfer per metric, not one per step.
    return _means({name: torch.stack([row[name] for row in history if name in row]) for name in names})


def _means(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    return {
        f"train/{name}": float(column.max() if name == "ratio_max" else column.mean())
        for name, column in metrics.items()
    }
