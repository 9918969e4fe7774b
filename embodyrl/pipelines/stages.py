"""What the nodes of the built-in graphs do. Each reads and writes columns of the batch, as its text says."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.algorithms.advantages import explained_variance, normalize
from embodyrl.algorithms.call import asks_for, call_with
from embodyrl.algorithms.levels import in_chunks
from embodyrl.config.schema import Config, RewardLevel
from embodyrl.pipelines.iteration import Iteration
from embodyrl.pipelines.preparation import decisions_to_learn_from, executed_in, steps_of_actions, steps_of_decisions
from embodyrl.registry import ADVANTAGES, ENCODERS, FILTERS, REWARDS
from embodyrl.rollout.batch import BatchError, TrajectoryBatch, concat
from embodyrl.rollout.collector import Rollout


def collect(iteration: Iteration) -> None:
    """Run the policy in the simulators. Writes the columns of a rollout, and `env/` metrics of the episodes that
    ended."""
    with iteration.engine.rollout_mode():
        rollout = iteration.collector.collect()
    iteration.rollouts.append(rollout)
    iteration.batch = rollout.batch
    iteration.metrics |= rollout_metrics(iteration.rollouts)


def rollout_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """What an iteration's rollouts came to."""
    env_steps = sum(rollout.env_steps for rollout in rollouts)
    rewards = sum(float(rollout.batch["rewards"].sum()) for rollout in rollouts)
    finished = [episode for rollout in rollouts for episode in rollout.finished]
    metrics = {
        "env/steps": float(env_steps),
        "env/episodes": float(len(finished)),
        "rollout/reward_per_step": rewards / max(env_steps, 1),
    }
    if finished:
        metrics["env/return"] = float(np.mean([each.total_reward for each in finished]))
        metrics["env/success_once"] = float(np.mean([each.success for each in finished]))
        metrics["env/episode_length"] = float(np.mean([each.length for each in finished]))
    return metrics


def filter_groups(iteration: Iteration) -> None:
    """Keep the groups of slots that `algorithm.filter` finds worth learning from, and collect again until there are as
    many as a rollout has, or it was tried often enough. Those left over wait for the next iteration.

    Reads rewards, success, steps, valid; the batch has other slots afterwards, and `filter/` metrics tell how many.
    """
    config, waiting = iteration.config, iteration.collector.surplus
    size, limit = config.rollout.group_size, config.algorithm.filter.max_collections
    wanted, kept = config.env.num_envs * config.rollout.episodes_per_slot, [] if waiting is None else [waiting]
    while True:
        kept.append(informative_groups(_batch(iteration), config))
        enough = sum(batch.size[1] for batch in kept) >= wanted
        if enough or len(iteration.rollouts) >= limit:
            break
        collect(iteration)
    longest = max(batch.size[0] for batch in kept)
    batch = concat([each.pad(longest, "K") for each in kept], "B")
    iteration.batch, surplus = batch.split([min(wanted, batch.size[1]), max(batch.size[1] - wanted, 0)], "B")
    iteration.collector.surplus = surplus if surplus.size[1] else None
    iteration.metrics |= {
        "filter/collections": float(len(iteration.rollouts)),
        "filter/groups_collected": float(len(iteration.rollouts) * wanted // size),
        "filter/groups_kept": float(sum(each.size[1] for each in kept[-len(iteration.rollouts) :]) // size),
        "filter/groups_learned": float(iteration.batch.size[1] // size),
        "filter/groups_waiting": float(surplus.size[1] // size),
    }


def informative_groups(batch: TrajectoryBatch, config: Config) -> TrajectoryBatch:
    """The slots of those groups that the filter keeps."""
    settings, size = config.algorithm.filter, config.rollout.group_size
    executed = executed_in(batch)
    outcomes = {
        "success": (batch["success"] & executed).any(2).any(0),
        "total_reward": (batch["rewards"] * executed).sum((0, 2)),
        "played": batch["valid"].any(0),
    }
    available: dict[str, Any] = {name: column.view(-1, size) for name, column in outcomes.items()}
    available |= {name: getattr(settings, name) for name in SETTINGS_OF_FILTERS}
    keep: Tensor = call_with(FILTERS.load(settings.name), available)
    return batch.take(torch.nonzero(keep.repeat_interleave(size)).squeeze(1), "B")


SETTINGS_OF_FILTERS = ("metric", "accuracy_low", "accuracy_high")


def shape_rewards(iteration: Iteration) -> None:
    """What is learned from, by `algorithm.reward`. Reads steps, valid, and what the reward function names of the
    observations, task, actions, rewards, success, terminated, truncated, episode and group; writes `shaped_rewards`
    `[K, B, C]`."""
    settings, batch = iteration.config.algorithm, _batch(iteration)
    function = REWARDS.load(settings.reward)
    executed = executed_in(batch)
    available: dict[str, Any] = {name: batch[name] for name in batch.columns()} | {
        "executed": executed,
        "scale": settings.srpo.scale,
        "steepness": settings.srpo.steepness,
        "compat": settings.srpo.compat,
    }
    if asks_for(function, "embeddings"):
        available["embeddings"] = episode_embeddings(batch, iteration.config)
    shaped = (call_with(function, available) - settings.time_penalty) * executed
    batch["shaped_rewards"] = shaped
    iteration.metrics["rollout/shaped_reward_per_step"] = float(shaped.sum() / executed.sum().clamp(min=1))


def episode_embeddings(batch: TrajectoryBatch, config: Config) -> Tensor:
    """A vector for every slot's episode `[B, E]`, from frames spread evenly over its decisions; 0 for one that was
    lost."""
    settings = config.algorithm.srpo
    encode = ENCODERS.load(settings.encoder)
    embeddings: list[Tensor | None] = []
    for slot in range(batch.size[1]):
        decided = torch.nonzero(batch["valid"][:, slot]).squeeze(1)
        if not len(decided):
            embeddings.append(None)
            continue
        frames = decided[torch.linspace(0, len(decided) - 1, settings.frames).round().long()]
        images, proprio = (batch[name][frames, slot] if name in batch else None for name in ("images", "proprio"))
        embeddings.append(encode(images, proprio, dim=settings.dim))
    size = next((len(each) for each in embeddings if each is not None), settings.dim)
    known = [torch.zeros(size) if each is None else each for each in embeddings]
    return torch.stack(known) if known else torch.zeros(0, size)


def estimate_advantages(iteration: Iteration) -> None:
    """Advantages by `algorithm.advantage`. Reads shaped_rewards, terminated, truncated, steps, valid, and with a critic
    values and next_values; writes `advantages` and `returns`, `[K, B]` or of every action `[K, B, C]`."""
    settings, batch = iteration.config.algorithm, _batch(iteration)
    of_actions = settings.reward_level is RewardLevel.action
    steps = steps_of_actions(batch, settings) if of_actions else steps_of_decisions(batch, settings)
    steps["rewards"] = steps["rewards"] * settings.reward_scale
    available: dict[str, Any] = steps | {
        "group_size": iteration.config.rollout.group_size,
        "gae_lambda": settings.gae_lambda,
        "mean_level": settings.norm.mean_level,
        "std_level": settings.norm.std_level,
        "leave_one_out": settings.norm.leave_one_out,
        "unbiased": settings.norm.unbiased,
        "eps": settings.norm.eps,
    }
    advantages, returns = call_with(ADVANTAGES.load(settings.advantage), available)
    valid = steps["valid"]
    if "values" in batch and bool(valid.any()):
        iteration.metrics["train/explained_variance"] = explained_variance(batch["values"][valid], returns[valid])
    if settings.normalize_advantages:
        advantages = normalize(advantages, valid)
    for name, column in (("advantages", advantages), ("returns", returns)):
        batch[name] = in_chunks(column, batch["rewards"].shape[2]) if of_actions else column


def update(iteration: Iteration) -> None:
    """Learn from the batch; adds `train/` metrics. Reads task, trace, logprobs, steps, valid, episode, version,
    advantages, the observations, and with a critic values and returns. A batch that teaches nothing changes nothing.
    With `env.offload` the simulators are gone meanwhile; `memory/` metrics say what offloading frees."""
    batch = _batch(iteration)
    if iteration.config.env.offload:
        iteration.metrics["memory/simulators_freed_mib"] = iteration.collector.offload() / 2**20
    if not teaches(batch, iteration.config):
        iteration.metrics["train/passes"] = 0.0
        return
    decisions = decisions_to_learn_from(batch, iteration.config)
    with iteration.engine.train_mode():
        iteration.metrics |= iteration.engine.update(decisions, batch.sentences)
    iteration.metrics |= iteration.engine.offload.metrics()


def teaches(batch: TrajectoryBatch, config: Config) -> bool:
    """Whether a batch has a gradient: not if a filter left nothing of it, nor if every advantage is 0, because all
    episodes of each group ended alike, and no other term of the loss is in use."""
    settings = config.algorithm
    other_terms = "values" in batch or settings.kl_coef > 0 or settings.entropy_coef > 0
    return bool(batch["valid"].any()) and (other_terms or bool(batch["advantages"].any()))


def imitate(iteration: Iteration) -> None:
    """Learn from `data.steps` minibatches of demonstrations, going on where the last iteration left off; adds `train/`
    metrics."""
    if iteration.demonstrations is None:
        raise BatchError("there are no demonstrations to learn from: set data.path")
    steps = iteration.config.data.steps
    batches = iteration.demonstrations.batches(iteration.engine.version * steps, steps)
    with iteration.engine.train_mode():
        iteration.metrics |= iteration.engine.imitate((batch.observation, batch.actions) for batch in batches)
    iteration.metrics |= iteration.engine.offload.metrics()


def _batch(iteration: Iteration) -> TrajectoryBatch:
    if iteration.batch is None:
        raise BatchError("no node has collected a batch yet: a graph starts with a node that does")
    return iteration.batch
