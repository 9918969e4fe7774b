"""Stages of methods that learn from their newest rollout. Each reads and writes the columns of the batch that its
docstring names.

Shapes: `K` chunks, `B` slots (with whole episodes: episodes), `C` actions of a chunk, `M` valid chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodyrl.algorithms.advantages import advantages_by, explained_variance, normalize
from embodyrl.algorithms.aggregation import sequence_numbers, token_weights
from embodyrl.algorithms.columns import (
    chunk_rewards,
    expand_to_level,
    function_name,
    in_chunks,
    in_time,
    logprobs_at_level,
    require_finite,
    valid_at,
)
from embodyrl.algorithms.options import EncodingRewardConfig
from embodyrl.algorithms.rewards import rewards_by
from embodyrl.config.schema import Bootstrap, DiscountPer, RewardLevel
from embodyrl.engine.exchange import ADDRESS
from embodyrl.engine.large import APART
from embodyrl.engine.minibatch import Columns, rows
from embodyrl.methods.on_policy.config import NewestConfig
from embodyrl.methods.on_policy.embeddings import episode_embeddings
from embodyrl.methods.on_policy.learner import NewestLearner
from embodyrl.methods.stages import batch_of, chosen_in, executed_in, free_simulators
from embodyrl.pipelines.pipeline import Iteration
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.spread import bring_large


def learner_of(iteration: Iteration) -> NewestLearner:
    """Return the method of a run that learns from its newest rollout."""
    assert isinstance(iteration.learner, NewestLearner), "its algorithm is registered with another learner"
    return iteration.learner


def shape_rewards(iteration: Iteration) -> None:
    """Compute the rewards to learn from by `algorithm.reward`. Reads steps, valid, and those of observations,
    task_index, actions, rewards, success, terminated, truncated, episode and group that the reward function names;
    writes `shaped_rewards` `[K, B, C]`."""
    learner, batch = learner_of(iteration), batch_of(iteration)
    settings = learner.algorithm
    reward, encode = learner.reward, learner.encoder
    executed = executed_in(batch)
    exchange = iteration.engine.exchange
    # Images may lie with the ranks that collected them; they come only for a reward that asks for them.
    named = [name for name in APART if reward.takes(name)]
    whole = bring_large(batch, exchange, [True] * exchange.ranks.size, named) if named else batch
    columns = {name: whole[name] for name in whole.columns()} | {"executed": executed}
    if reward.takes("embeddings"):
        assert encode is not None and isinstance(settings.reward, EncodingRewardConfig), "the config rules ask for it"
        columns["embeddings"] = episode_embeddings(batch, encode, settings.reward, exchange)
    rewards = rewards_by(reward, columns)
    # All of them, also those of actions that were not executed: 0 * NaN is NaN.
    what, everything = f"reward {function_name(reward.function)} returned rewards", torch.ones_like(executed)
    require_finite(what, rewards, everything, reward.given(columns))
    shaped = (rewards - settings.time_penalty) * executed
    batch["shaped_rewards"] = shaped
    iteration.metrics["rollout/shaped_reward_per_step"] = float(shaped.sum() / executed.sum().clamp(min=1))


def estimate_advantages(iteration: Iteration) -> None:
    """Estimate advantages by `algorithm.advantage`. Reads shaped_rewards, terminated, truncated, steps, valid, and with
    a critic values and next_values; writes `advantages` and `returns`, float32 `[K, B]`, or `[K, B, C]` with
    `algorithm.reward_level: action`."""
    learner, batch = learner_of(iteration), batch_of(iteration)
    settings = learner.algorithm
    of_actions = settings.compared_levels[1] is RewardLevel.action
    steps = steps_of_actions(batch, settings) if of_actions else steps_of_chunks(batch, settings)
    # Before the estimator, so that the returns that a critic learns have the same scale as the advantages.
    steps["rewards"] = steps["rewards"] * settings.reward_scale
    columns: dict[str, Any] = steps | {"group_size": iteration.config.rollout.group_size}
    advantages, returns = (column.float() for column in advantages_by(learner.advantage, columns))
    valid = steps["valid"]
    # Before normalisation, which changes what the advantages are, not how good the critic was.
    if "values" in batch and bool(valid.any()):
        iteration.metrics["train/explained_variance"] = explained_variance(batch["values"][valid], returns[valid])
    if settings.normalize_advantages:
        advantages = normalize(advantages, valid)
    for name, column in (("advantages", advantages), ("returns", returns)):
        batch[name] = in_chunks(column, batch["rewards"].shape[2]) if of_actions else column


def update(iteration: Iteration) -> None:
    """Learn from the batch; adds `train/` metrics. Reads task_index, trace, logprobs, steps, valid, episode, version,
    advantages, the observations, and with a critic values and returns. A batch without a gradient makes no step. With
    `env.offload` the simulators are ended meanwhile; `memory/` metrics report what offloading frees, `traffic/` metrics
    what came from other ranks."""
    batch = batch_of(iteration)
    free_simulators(iteration)
    # A step with gradient 0 would still move the weights: by momentum and by weight decay.
    learner = learner_of(iteration)
    if not has_gradient(batch, learner):
        iteration.metrics["train/epochs"] = 0.0
        return
    chunks = chunks_to_learn_from(batch, learner.algorithm, iteration.config.rollout.num_chunks)
    exchange = iteration.engine.exchange
    before = exchange.received
    with iteration.engine.train_mode():
        iteration.metrics |= learner.update(chunks, batch.task_descriptions)
    if ADDRESS in batch:
        iteration.metrics["traffic/fetched_mib"] = (exchange.received - before) / 2**20
    iteration.metrics |= iteration.engine.memory_metrics()


def has_gradient(batch: TrajectoryBatch, learner: NewestLearner) -> bool:
    """Return whether a batch has a gradient. It has none if a filter left nothing of it, or if every advantage is 0
    (all episodes of each group ended alike) and no other term of the loss is in use."""
    return bool(batch["valid"].any()) and (learner.learns_without_advantages(batch) or bool(batch["advantages"].any()))


def steps_of_chunks(batch: TrajectoryBatch, settings: NewestConfig) -> dict[str, Tensor]:
    """Return columns `[K, B]` for an advantage estimator: a chunk's rewards are summed, in float64."""
    per_action = settings.discount_per is DiscountPer.action
    columns = {name: batch[name] for name in ("values", "terminated", "valid") if name in batch} | {
        "rewards": chunk_rewards(batch["shaped_rewards"].double(), settings.gamma if per_action else 1.0),
        "ended": batch["terminated"] | batch["truncated"],
        # A chunk that ended early discounts what follows by the actions that it executed.
        "discounts": settings.gamma ** (batch["steps"].float() if per_action else batch["valid"].float()),
    }
    if "next_values" in batch:
        # `bootstrap: none` takes a time limit for an end of the task, as many published implementations do.
        cut_off = batch["truncated"] & (settings.bootstrap is Bootstrap.none)
        columns["next_values"] = batch["next_values"].masked_fill(cut_off, 0.0)
    return columns


def steps_of_actions(batch: TrajectoryBatch, settings: NewestConfig) -> dict[str, Tensor]:
    """Return columns `[K*C, B]` for an advantage estimator: every action is a step of its own; rewards are float64."""
    executed = executed_in(batch)
    # The last executed action of each chunk: the episode ends in it, and a discount per chunk is charged to it.
    last = executed & (executed.cumsum(2) == batch["steps"].unsqueeze(2))
    discounted = executed if settings.discount_per is DiscountPer.action else last
    ended = last & (batch["terminated"] | batch["truncated"]).unsqueeze(2)
    return {
        "rewards": in_time(batch["shaped_rewards"].double()),
        "valid": in_time(executed),
        "ended": in_time(ended),
        "discounts": settings.gamma ** in_time(discounted).float(),
    }


def chunks_to_learn_from(batch: TrajectoryBatch, settings: NewestConfig, num_chunks: int) -> Columns:
    """Return the valid chunks `[M]` of a batch, with the columns that `NewestLearner.update` takes.

    Args:
        batch: with advantages.
        settings: of the method.
        num_chunks: longest episode [chunks].
    """
    level, executed = settings.compared_levels[0], chosen_in(batch)
    per_action = batch["logprobs"].shape[2] // executed.shape[2]
    observed = [name for name in ("proprio", "images", "trace", ADDRESS) if name in batch]
    critic = ["returns"] if "values" in batch else []
    chunks = batch.decisions("task_index", "version", "valid", *observed, *critic)
    columns = {
        "executed": executed,
        "old_logprobs": logprobs_at_level(level, batch["logprobs"], executed),
        "advantages": expand_to_level(level, batch["advantages"], executed, per_action),
        "valid": valid_at(level, executed, per_action),
        "sequence": sequence_numbers(batch["episode"]),
    }
    if critic:
        columns["old_values"] = batch["values"]
    # Padding and lost episodes leave the batch here, so that minibatches hold only chunks that count.
    taken = torch.nonzero(batch["valid"].flatten()).squeeze(1)
    chunks = rows(chunks | {name: column.flatten(0, 1) for name, column in columns.items()}, taken)
    # Weights are made over the whole batch, before it is cut into minibatches (see `algorithms.aggregation`).
    longest = num_chunks * int(chunks["valid"][0].numel()) if len(taken) else 1
    chunks["weights"] = token_weights(chunks["valid"], chunks["sequence"], settings.aggregation, longest)
    return chunks
