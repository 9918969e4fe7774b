"""Stages that methods share: collecting.

Shapes: `K` chunks, `B` slots (with whole episodes: episodes), `C` actions of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from embodyrl.algorithms.columns import executed_actions
from embodyrl.algorithms.rewards import disagreement
from embodyrl.errors import RewardError, UserError
from embodyrl.pipelines.pipeline import Iteration
from embodyrl.rollout.batch import BatchError, TrajectoryBatch
from embodyrl.rollout.episodes import (
    EARLY_SUCCESS,
    FinishedEpisode,
    Rollout,
    by_source,
    of_source,
    success_doubt,
    success_rate,
)
from embodyrl.rollout.interventions import Source
from embodyrl.rollout.late_chunks import OWN


def collect(iteration: Iteration) -> None:
    """Run the policy in the simulators, or random actions where the method explores so. Writes the columns of a
    rollout, and `env/` metrics of the episodes that ended."""
    random = iteration.learner.explores(iteration.replay)
    rollout = iteration.collector.collect(random=True) if random else iteration.collector.collect()
    iteration.rollouts.append(rollout)
    iteration.batch = rollout.batch
    iteration.metrics |= rollout_metrics(iteration.rollouts)
    require_agreement(iteration)
    if (doubt := success_doubt(rollout.finished)) is not None:
        iteration.warn(EARLY_SUCCESS, doubt)
    if rollout.finished and success_rate(rollout.finished) is None and iteration.learner.reward.takes("success"):
        settings = iteration.config
        raise UserError(
            f"algorithm.reward = {settings.algorithm.parts()['reward'].name!r} rewards success, but simulator "
            f"{settings.env.name!r} does not say whether {', '.join(settings.env.tasks)} is solved: set "
            "env.success_return where the simulator has it, or algorithm.reward=dense"
        )


def rollout_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Return the metrics of an iteration's rollouts; those of episodes only if any has ended."""
    env_steps = sum(rollout.env_steps for rollout in rollouts)
    rewards = sum(float(rollout.batch["rewards"].sum()) for rollout in rollouts)
    finished = [episode for rollout in rollouts for episode in rollout.finished]
    metrics = {
        "env/steps": float(env_steps),
        "env/episodes": float(len(finished)),
        "rollout/reward_per_step": rewards / max(env_steps, 1),
    }
    if rollouts and "source" in rollouts[0].batch:
        taken = [rollout.batch["source"][rollout.batch["valid"]] == Source.expert for rollout in rollouts]
        metrics["env/interventions"] = float(torch.cat(taken).float().mean())
    if rollouts and "invalid_actions" in rollouts[0].batch:
        invalid = [rollout.batch["invalid_actions"][rollout.batch["valid"]] for rollout in rollouts]
        metrics["env/invalid_actions"] = float(torch.cat(invalid).float().mean())
    if finished and "judged" in rollouts[0].batch:
        judged = sum(int(rollout.batch["judged"][rollout.batch["valid"]].sum()) for rollout in rollouts)
        metrics["env/judged_success"] = judged / len(finished)
    if finished and "answers" in rollouts[0].batch:
        metrics |= _answer_metrics(rollouts, known=success_rate(finished) is not None)
    if finished:
        metrics |= _means(finished, "")
    for source, own in by_source(finished).items():
        metrics |= {of_source("env/episodes", source): float(len(own))} | _means(own, source)
    return metrics


def _means(finished: Sequence[FinishedEpisode], source: str) -> dict[str, float]:
    """Return the mean metrics of episodes of a source, at least one; empty: of all."""
    rate = success_rate(finished)
    return {
        of_source("env/return", source): float(np.mean([each.total_reward for each in finished])),
        **({} if rate is None else {of_source("env/success_once", source): rate}),
        of_source("env/episode_length", source): float(np.mean([each.length for each in finished])),
    }


def _answer_metrics(rollouts: list[Rollout], *, known: bool) -> dict[str, float]:
    """Return the mean of what was answered about episodes and, if the simulator says what is solved, the share of
    episodes about which it says otherwise."""
    said, others, played = 0.0, 0, 0
    for rollout in rollouts:
        batch = rollout.batch
        differing, count = disagreement(batch["answers"], batch["success"], executed_in(batch))
        said, others, played = said + float(batch["answers"].sum()), others + differing, played + count
    share = {"env/disagreement": others / max(played, 1)} if known else {}
    return {"env/answer": said / max(played, 1)} | share


def require_agreement(iteration: Iteration) -> None:
    """Raise `RewardError` if an iteration's rewards must not be learned from; see `RewardConfig.fault_of`."""
    reward = iteration.config.algorithm.parts().get("reward")
    fault = None if reward is None else reward.fault_of(iteration.metrics)
    if fault is not None:
        raise RewardError(fault)


def batch_of(iteration: Iteration) -> TrajectoryBatch:
    """Return the batch that an earlier stage has collected."""
    if iteration.batch is None:
        raise BatchError("no stage has collected a batch yet: an iteration starts with a stage that does")
    return iteration.batch


def executed_in(batch: TrajectoryBatch) -> Tensor:
    """Return a mask of the actions that were executed, bool `[K, B, C]`."""
    return executed_actions(batch["steps"], batch["valid"], batch["rewards"].shape[2])


def chosen_in(batch: TrajectoryBatch) -> Tensor:
    """Return a mask of what was chosen that something depends on: of actions, bool `[K, B, C]`, those that are
    executed, also late ones in the place of the next chunk's first; of log-probs that belong to whole chunks, bool
    `[K, B, N]`, those of chunks of which anything is executed."""
    chosen = _chosen_actions(batch)
    return batch["counted"] & chosen.any(2, keepdim=True) if "counted" in batch else chosen


def _chosen_actions(batch: TrajectoryBatch) -> Tensor:
    if OWN not in batch:
        return executed_in(batch)
    own, over = batch[OWN], batch["terminated"] | batch["truncated"]
    reached = torch.where(over, batch["steps"], own.shape[2])
    return own & executed_actions(reached, batch["valid"], own.shape[2])


def free_simulators(iteration: Iteration) -> None:
    """End the simulators while the policy learns, if `env.offload` says so; they come back with the next rollout."""
    if iteration.config.env.offload:
        iteration.metrics["memory/simulators_freed_mib"] = iteration.collector.offload() / 2**20
