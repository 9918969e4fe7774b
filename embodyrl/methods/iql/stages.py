"""Stages of implicit Q-learning."""

from __future__ import annotations

from embodyrl.methods.iql.config import IQLConfig
from embodyrl.methods.replay.stages import learner_of, replay_of
from embodyrl.pipelines.pipeline import Iteration
from embodyrl.rollout.replay import Beside


def improve_offline(iteration: Iteration) -> None:
    """Learn from demonstrations alone, `data.steps` steps. Adds `train/` metrics."""
    replay, config, learner = replay_of(iteration), iteration.config, learner_of(iteration)
    assert iteration.transitions is not None, "the config rules ask for data.path"
    assert isinstance(config.algorithm, IQLConfig), "no other algorithm learns so"
    alone = Beside(demonstrations=iteration.transitions, share=1.0)
    minibatches = replay.minibatches(config.data.steps, config.algorithm.off_policy.batch_size, alone)
    learner.learn_from(minibatches, iteration)
    iteration.metrics |= replay.metrics() | iteration.engine.memory_metrics()
