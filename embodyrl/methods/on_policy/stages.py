"""Stages of methods that learn from their newest rollout. Each reads and writes the columns of the batch that its
docstring names.

Shapes: `K` chunks, `B` slots (with whole episodes: episodes), `C` actions of a chunk, `M` valid chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodyrl.algorithms.advantages import advantages_by, explained_variance, normalize
from embodyrl.algorithms.columns import (
    Bound,
    OutputError,
    chunk_rewards,
    expand_to_level,
    function_name,
    in_chunks,
    in_time,
    logprobs_at_level,
    require_finite,
    require_output,
    valid_at,
)
from embodyrl.algorithms.losses import sequence_numbers, token_weights
from embodyrl.algorithms.options import EncodingRewardConfig
from embodyrl.algorithms.rewards import groups_by, rewards_by
from embodyrl.config.schema import Bootstrap, DiscountPer, RewardLevel
from embodyrl.engine.exchange import ADDRESS, Exchange
from embodyrl.engine.large import APART
from embodyrl.engine.parallel import Ranks
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.methods.on_policy.learner import OnPolicyLearner
from embodyrl.methods.stages import batch_of, collect, executed_in, free_simulators
from embodyrl.pipelines.pipeline import Iteration
from embodyrl.rollout.batch import TrajectoryBatch, concat, type_name
from embodyrl.rollout.spread import bring_large, is_here, rows_here


def learner_of(iteration: Iteration) -> OnPolicyLearner:
    """Return the method of a run that learns from its newest rollout."""
    assert isinstance(iteration.learner, OnPolicyLearner), "its algorithm is registered with another learner"
    return iteration.learner


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


def shape_rewards(iteration: Iteration) -> None:
    """Compute the rewards to learn from by `algorithm.reward`. Reads steps, valid, and those of observations,
    task_index, actions, rewards, success, terminated, truncated, episode and group that the reward function names;
    writes `shaped_rewards` `[K, B, C]`."""
    learner, batch = learner_of(iteration), batch_of(iteration)
    settings = learner.algorithm
    reward, encode = learner.reward, learner.encoder
    executed = executed_in(batch)
    exchange = iteration.engine.exchange
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


def episode_embeddings(
    batch: TrajectoryBatch, encode: Callable[..., Tensor], settings: EncodingRewardConfig, exchange: Exchange
) -> Tensor:
    """Return a vector for every slot's episode, `[B, E]`, from frames spread evenly over its chunks; 0 for an episode
    that was lost. Where images lie with several ranks, each encodes the episodes that it has collected."""
    embeddings: dict[int, Tensor] = {}
    for slot in range(batch.size[1]):
        decided = torch.nonzero(batch["valid"][:, slot]).squeeze(1)
        if not len(decided) or not is_here(batch, exchange, int(decided[0]), slot):
            continue
        frames = decided[torch.linspace(0, len(decided) - 1, settings.frames).round().long()]
        images = rows_here(batch, exchange, "images", frames, slot)
        proprio = batch["proprio"][frames, slot] if "proprio" in batch else None
        embeddings[slot] = _embedding(encode, encode(images, proprio, dim=settings.dim), embeddings)
    return joined_embeddings(embeddings, batch.size[1], settings.dim, exchange.ranks)


def _embedding(encode: Callable[..., Tensor], vector: object, others: Mapping[int, Tensor]) -> Tensor:
    """Return the vector of an episode, after checking that it is one, as long as those before and finite."""
    what = f"encoder {function_name(encode)} returned an embedding"
    if not isinstance(vector, Tensor) or vector.dim() != 1:
        found = f"of shape {tuple(vector.shape)}" if isinstance(vector, Tensor) else f"as {type(vector).__name__}"
        raise OutputError(f"{what} {found}, expected a torch tensor [E]: return one vector for the episode")
    like = next(iter(others.values()), vector)
    require_output(what, vector, like, "as many numbers for every episode")
    require_finite(what, vector, torch.ones_like(vector, dtype=torch.bool), {})
    return vector


def joined_embeddings(own: Mapping[int, Tensor], slots: int, usual: int, ranks: Ranks) -> Tensor:
    """Return the vectors of all slots `[B, E]`, of which each rank has its own; 0 where none has one.

    Args:
        own: by slot.
        slots: `B`.
        usual: `E` if there is no vector.
        ranks: those of the run.
    """
    example = next(iter(own.values()), None)
    known = ranks.gather_values(None if example is None else [len(example), type_name(example.dtype)])
    size, kind = next((each for each in known if each is not None), (usual, "float32"))
    found = torch.zeros(slots, size, dtype=getattr(torch, kind))
    for slot, vector in own.items():
        found[slot] = vector
    return ranks.sum(found) if ranks.size > 1 else found


def estimate_advantages(iteration: Iteration) -> None:
    """Estimate advantages by `algorithm.advantage`. Reads shaped_rewards, terminated, truncated, steps, valid, and with
    a critic values and next_values; writes `advantages` and `returns`, float32 `[K, B]`, or `[K, B, C]` with
    `algorithm.reward_level: action`."""
    learner, batch = learner_of(iteration), batch_of(iteration)
    settings = learner.algorithm
    of_actions = settings.reward_level is RewardLevel.action
    steps = steps_of_actions(batch, settings) if of_actions else steps_of_chunks(batch, settings)
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
    if not has_gradient(batch, learner.algorithm):
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


def has_gradient(batch: TrajectoryBatch, settings: OnPolicyConfig) -> bool:
    """Return whether a batch has a gradient. It has none if a filter left nothing of it, or if every advantage is 0
    (all episodes of each group ended alike) and no other term of the loss is in use."""
    other_terms = "values" in batch or settings.kl_coef > 0 or settings.entropy_coef > 0
    return bool(batch["valid"].any()) and (other_terms or bool(batch["advantages"].any()))


def steps_of_chunks(batch: TrajectoryBatch, settings: OnPolicyConfig) -> dict[str, Tensor]:
    """Return columns `[K, B]` for an advantage estimator: a chunk's rewards are summed, in float64."""
    per_action = settings.discount_per is DiscountPer.action
    columns = {name: batch[name] for name in ("values", "terminated", "valid") if name in batch} | {
        "rewards": chunk_rewards(batch["shaped_rewards"].double(), settings.gamma if per_action else 1.0),
        "ended": batch["terminated"] | batch["truncated"],
        "discounts": settings.gamma ** (batch["steps"].float() if per_action else batch["valid"].float()),
    }
    if "next_values" in batch:
        # `bootstrap: none` takes a time limit for an end of the task, as many published implementations do.
        cut_off = batch["truncated"] & (settings.bootstrap is Bootstrap.none)
        columns["next_values"] = batch["next_values"].masked_fill(cut_off, 0.0)
    return columns


def steps_of_actions(batch: TrajectoryBatch, settings: OnPolicyConfig) -> dict[str, Tensor]:
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


def chunks_to_learn_from(batch: TrajectoryBatch, settings: OnPolicyConfig, num_chunks: int) -> TensorDictBase:
    """Return the valid chunks `[M]` of a batch, with the columns that `OnPolicyLearner.update` takes.

    Args:
        batch: with advantages.
        settings: of the method.
        num_chunks: longest episode [chunks].
    """
    level, chunk_size = settings.logprob_level, batch["rewards"].shape[2]
    per_action = batch["logprobs"].shape[2] // chunk_size
    executed = executed_in(batch)
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
    for name, column in columns.items():
        chunks[name] = column.flatten(0, 1)
    chunks = chunks[taken]
    # Weights are made over the whole batch, before it is cut into minibatches (see `algorithms.losses`).
    longest = num_chunks * int(chunks["valid"][0].numel()) if len(taken) else 1
    chunks["weights"] = token_weights(chunks["valid"], chunks["sequence"], settings.aggregation, longest)
    return chunks
