"""The stage that filters groups: dynamic sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.algorithms.columns import (
    Bound,
)
from embodyrl.algorithms.rewards import groups_by
from embodyrl.methods.on_policy.stages import learner_of
from embodyrl.methods.stages import batch_of, collect, executed_in
from embodyrl.pipelines.pipeline import Iteration
from embodyrl.rollout.batch import TrajectoryBatch, concat


def filter_groups(iteration: Iteration) -> None:
    """Keep the groups that `algorithm.filter` finds worth learning from: dynamic sampling (Yu et al. 2025,
    arXiv:2503.14476, section 3.2).

    It collects again until there are as many groups as a rollout has, or `algorithm.max_collections` is reached, or
    nothing is kept and no episode has succeeded: a policy that never succeeds would fail every further collection too.
    Groups beyond what is needed wait for the next iteration.

    Reads rewards, success, steps, valid; the batch has other slots afterwards, and `filter/` metrics count them.
    """
    config, learner, waiting = iteration.config, learner_of(iteration), iteration.collector.surplus
    size, limit = config.rollout.group_size, learner.algorithm.max_collections
    wanted, kept = config.env.num_envs * config.rollout.episodes_per_slot, [] if waiting is None else [waiting]
    succeeded = False
    while True:
        collected = batch_of(iteration)
        kept.append(informative_groups(collected, learner.filter, size))
        succeeded = succeeded or bool((collected["success"] & executed_in(collected)).any())
        slots = sum(batch.size[1] for batch in kept)
        if not slots:
            _warn_of_no_group(iteration, succeeded)
        if slots >= wanted or len(iteration.rollouts) >= limit or not (slots or succeeded):
            break
        collect(iteration)
    # Collections end after different numbers of chunks; the padding is invalid, so nothing is learned from it.
    longest = max(batch.size[0] for batch in kept)
    batch = concat([each.pad(longest, "K") for each in kept], "B")
    iteration.batch, surplus = batch.split([min(wanted, batch.size[1]), max(batch.size[1] - wanted, 0)], "B")
    iteration.collector.surplus = surplus if surplus.size[1] else None
    iteration.collector.forget_batch(iteration.batch)
    iteration.metrics |= {
        "filter/collections": float(len(iteration.rollouts)),
        "filter/groups_collected": float(len(iteration.rollouts) * wanted // size),
        "filter/groups_kept": float(sum(each.size[1] for each in kept[-len(iteration.rollouts) :]) // size),
        "filter/groups_learned": float(iteration.batch.size[1] // size),
        "filter/groups_waiting": float(surplus.size[1] // size),
    }


def _warn_of_no_group(iteration: Iteration, succeeded: bool) -> None:
    """Warn that the filter has kept no group so far; each kind of warning is shown once in a run."""
    algorithm = learner_of(iteration).algorithm
    settings, limit = algorithm.filter, algorithm.max_collections
    if succeeded:
        again = f"it collects up to {limit} times per iteration" if limit > 1 else "the iteration learns nothing"
        return iteration.warn(
            "filter_keeps_nothing",
            f"algorithm.filter={settings.name} keeps no group of a collection, because the episodes of each end alike; "
            f"{again}: choose other tasks, or a filter and reward that distinguish episodes "
            f"(algorithm.filter.name=none, algorithm.reward=dense)",
        )
    iteration.warn(
        "filter_without_success",
        f"no episode succeeded, and algorithm.filter={settings.name} keeps no group: such an iteration stops after "
        f"one collection and learns nothing. Start from a policy that sometimes succeeds (model.checkpoint), choose "
        f"easier tasks, or learn from a reward that distinguishes failures (algorithm.filter.name=none, "
        f"algorithm.reward=dense)",
    )


def informative_groups(batch: TrajectoryBatch, keeps: Bound[Tensor], size: int) -> TrajectoryBatch:
    """Return the slots of the groups that a filter keeps; `size` slots are a group."""
    executed = executed_in(batch)
    outcomes = {
        "success": (batch["success"] & executed).any(2).any(0),
        # Summed in float64: rewards that come in another order must not make equal episodes differ.
        "total_reward": (batch["rewards"].double() * executed).sum((0, 2)).float(),
        "played": batch["valid"].any(0),
    }
    of_groups = {name: column.view(-1, size) for name, column in outcomes.items()}
    return batch.take(torch.nonzero(groups_by(keeps, of_groups).repeat_interleave(size)).squeeze(1), "B")
