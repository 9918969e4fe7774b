"""From the columns of a batch `[K, B]` to what estimators and the engine take."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodyrl.algorithms.levels import decision_rewards, entries_at, executed_actions, in_time, spread_to, valid_at
from embodyrl.algorithms.losses import entry_weights, sequence_numbers
from embodyrl.config.schema import AlgorithmConfig, Bootstrap, Config, DiscountPer
from embodyrl.rollout.batch import TrajectoryBatch


def executed_in(batch: TrajectoryBatch) -> Tensor:
    """Which actions were executed, bool `[K, B, C]`."""
    return executed_actions(batch["steps"], batch["valid"], batch["rewards"].shape[2])


def steps_of_decisions(batch: TrajectoryBatch, settings: AlgorithmConfig) -> dict[str, Tensor]:
    """Columns `[K, B]` for an advantage estimator: a chunk's rewards are summed, in float64."""
    per_action = settings.discount_per is DiscountPer.action
    columns = {name: batch[name] for name in ("values", "terminated", "valid") if name in batch} | {
        "rewards": decision_rewards(batch["shaped_rewards"].double(), settings.gamma if per_action else 1.0),
        "ended": batch["terminated"] | batch["truncated"],
        "discounts": settings.gamma ** (batch["steps"].float() if per_action else batch["valid"].float()),
    }
    if "next_values" in batch:
        cut_off = batch["truncated"] & (settings.bootstrap is Bootstrap.none)
        columns["next_values"] = batch["next_values"].masked_fill(cut_off, 0.0)
    return columns


def steps_of_actions(batch: TrajectoryBatch, settings: AlgorithmConfig) -> dict[str, Tensor]:
    """Columns `[K*C, B]` for an advantage estimator: every action is a step of its own; rewards are float64."""
    executed = executed_in(batch)
    last = executed & (executed.cumsum(2) == batch["steps"].unsqueeze(2))
    discounted = executed if settings.discount_per is DiscountPer.action else last
    ended = last & (batch["terminated"] | batch["truncated"]).unsqueeze(2)
    return {
        "rewards": in_time(batch["shaped_rewards"].double()),
        "valid": in_time(executed),
        "ended": in_time(ended),
        "discounts": settings.gamma ** in_time(discounted).float(),
    }


def decisions_to_learn_from(batch: TrajectoryBatch, config: Config) -> TensorDictBase:
    """The valid decisions `[M]` of a batch, with the columns that `HybridEngine.update` takes."""
    level, chunk_size = config.algorithm.logprob_level, batch["rewards"].shape[2]
    per_action = batch["logprobs"].shape[2] // chunk_size
    executed = executed_in(batch)
    observed = [name for name in ("proprio", "images") if name in batch]
    critic = ["returns"] if "values" in batch else []
    decisions = batch.decisions("task", "trace", "version", "valid", *observed, *critic)
    columns = {
        "executed": executed,
        "old_logprobs": entries_at(level, batch["logprobs"], executed),
        "advantages": spread_to(level, batch["advantages"], executed, per_action),
        "valid": valid_at(level, executed, per_action),
        "sequence": sequence_numbers(batch["episode"]),
    }
    if critic:
        columns["old_values"] = batch["values"]
    taken = torch.nonzero(batch["valid"].flatten()).squeeze(1)
    for name, column in columns.items():
        decisions[name] = column.flatten(0, 1)
    decisions = decisions[taken]
    longest = config.rollout.chunks * int(decisions["valid"][0].numel()) if len(taken) else 1
    decisions["weights"] = entry_weights(
        decisions["valid"], decisions["sequence"], config.algorithm.aggregation, longest
    )
    return decisions
