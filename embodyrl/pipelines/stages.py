"""What the nodes of the built-in graphs do."""

from __future__ import annotations

import numpy as np

from embodyrl.algorithms.advantages import explained_variance, normalize
from embodyrl.algorithms.call import call_with
from embodyrl.algorithms.levels import decision_logprobs, decision_rewards
from embodyrl.config.schema import Bootstrap, DiscountPer
from embodyrl.pipelines.graph import Iteration
from embodyrl.registry import ADVANTAGES
from embodyrl.rollout.batch import BatchError, TrajectoryBatch


def collect(iteration: Iteration) -> None:
    """Run the policy in the simulators; writes the batch and `env/` metrics of the episodes that ended."""
    rollout = iteration.collector.collect()
    iteration.batch = rollout.batch
    metrics = {
        "env/steps": float(rollout.env_steps),
        "env/episodes": float(len(rollout.finished)),
        "rollout/reward_per_step": float(rollout.batch["rewards"].sum()) / rollout.env_steps,
    }
    if rollout.finished:
        metrics["env/return"] = float(np.mean([each.total_reward for each in rollout.finished]))
        metrics["env/success_once"] = float(np.mean([each.success for each in rollout.finished]))
        metrics["env/episode_length"] = float(np.mean([each.length for each in rollout.finished]))
    iteration.metrics |= metrics


def estimate_advantages(iteration: Iteration) -> None:
    """Reward of each decision -> `advantages` and `returns`, by the estimator that the config names."""
    settings = iteration.config.algorithm
    batch = _batch(iteration)
    per_action = settings.discount_per is DiscountPer.action
    ended = batch["terminated"] | batch["truncated"]
    available = {name: batch[name] for name in ("values", "terminated", "valid") if name in batch} | {
        "rewards": decision_rewards(batch["rewards"], settings.gamma if per_action else 1.0) * settings.reward_scale,
        "ended": ended,
        "discounts": settings.gamma ** (batch["steps"].float() if per_action else batch["valid"].float()),
        "group_size": iteration.config.rollout.group_size,
        "gae_lambda": settings.gae_lambda,
    }
    if "next_values" in batch:
        cut_off = batch["truncated"] & (settings.bootstrap is Bootstrap.none)
        available["next_values"] = batch["next_values"].masked_fill(cut_off, 0.0)
    advantages, returns = call_with(ADVANTAGES.load(settings.advantage), available)
    if "values" in batch:
        valid = batch["valid"]
        iteration.metrics["train/explained_variance"] = explained_variance(batch["values"][valid], returns[valid])
    batch["advantages"] = normalize(advantages, batch["valid"]) if settings.normalize_advantages else advantages
    batch["returns"] = returns


def update(iteration: Iteration) -> None:
    """Learn from the batch; adds `train/` metrics."""
    batch = _batch(iteration)
    names = ["trace", "task", "advantages", "returns", "valid"]
    names += [name for name in ("proprio", "images") if name in batch]
    decisions = batch.decisions(*names)
    decisions["old_logprobs"] = decision_logprobs(batch["logprobs"]).reshape(-1)
    if "values" in batch:
        decisions["old_values"] = batch["values"].reshape(-1)
    iteration.metrics |= iteration.engine.update(decisions[decisions["valid"]], batch.sentences)


def _batch(iteration: Iteration) -> TrajectoryBatch:
    if iteration.batch is None:
        raise BatchError("no node has collected a batch yet: a graph starts with a node that does")
    return iteration.batch
