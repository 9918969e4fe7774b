"""Stages of methods that learn from a replay.

Shapes: `M` decisions.
"""

from __future__ import annotations

from dataclasses import replace

from embodyrl.methods.replay.learner import ReplayLearner
from embodyrl.methods.stages import batch_of, free_simulators
from embodyrl.pipelines.pipeline import Iteration
from embodyrl.rollout.batch import BatchError
from embodyrl.rollout.replay import DemonstrationSampler, Replay
from embodyrl.rollout.spread import bring_own

HOPELESS = 20
"""Episodes without a success after which there is a warning."""


def remember(iteration: Iteration) -> None:
    """Add the rollout's decisions to the replay. Reads observations, actions, rewards, success, terminated, truncated,
    steps, valid and episode; adds `replay/` metrics, and the success of the newest episodes as `env/`."""
    replay = replay_of(iteration)
    # Each rank keeps the images of its own envs, so that none travel.
    batch = bring_own(batch_of(iteration), iteration.engine.exchange, replay.own)
    replay.add(replace(iteration.rollouts[-1], batch=batch))
    iteration.metrics |= replay.metrics()
    learner_of(iteration).remembered(batch, replay, iteration)


def improve(iteration: Iteration) -> None:
    """Learn from decisions drawn from the replay, once it holds `start_after`: `updates_per_step` steps for each that
    was added since. Adds `train/` metrics."""
    replay, learner = replay_of(iteration), learner_of(iteration)
    settings = learner.algorithm.off_policy
    steps = replay.take_updates(settings.updates_per_step)
    # Before learning, so that with `env.offload` their memory is free for it.
    free_simulators(iteration)
    if steps:
        minibatches = replay.minibatches(steps, settings.batch_size, learner.sampler(replay, iteration.transitions))
        learner.learn_from(minibatches, iteration)
    iteration.metrics |= learner.progress(replay)
    reward = iteration.config.algorithm.parts().get("reward")
    if reward is not None and reward.name == "success" and replay.ended["episodes"] >= HOPELESS:
        _warn_of_no_success(iteration, replay)
    iteration.metrics |= iteration.engine.memory_metrics()


def improve_offline(iteration: Iteration) -> None:
    """Learn from demonstrations alone, `data.steps` steps. Adds `train/` metrics."""
    replay, learner = replay_of(iteration), learner_of(iteration)
    assert iteration.transitions is not None, "the config rules ask for data.path"
    alone = DemonstrationSampler(demonstrations=iteration.transitions, share=1.0)
    steps, size = iteration.config.data.steps, learner.algorithm.off_policy.batch_size
    learner.learn_from(replay.minibatches(steps, size, alone), iteration)
    iteration.metrics |= replay.metrics() | iteration.engine.memory_metrics()


def _warn_of_no_success(iteration: Iteration, replay: Replay) -> None:
    """Warn if no episode has ever succeeded, though nothing else is rewarded."""
    if not replay.ended["successes"]:
        iteration.warn(
            "replay_without_success",
            f"no episode of {replay.ended['episodes']} has succeeded, and algorithm.reward=success rewards nothing "
            "else: the critics have nothing to learn. Choose easier tasks, a longer env.max_episode_steps, or "
            "algorithm.reward=dense",
        )


def replay_of(iteration: Iteration) -> Replay:
    """Return the replay of a run."""
    if iteration.replay is None:
        raise BatchError("there is no replay: choose an algorithm that learns from one, such as sac")
    return iteration.replay


def learner_of(iteration: Iteration) -> ReplayLearner:
    """Return the method of a run that learns from a replay."""
    assert isinstance(iteration.learner, ReplayLearner), "the config rules ask for it"
    return iteration.learner
