"""Stages of supervised fine-tuning."""

from __future__ import annotations

from embodyrl.methods.sft.learner import SupervisedLearner
from embodyrl.pipelines.pipeline import Iteration
from embodyrl.rollout.batch import BatchError


def sft_step(iteration: Iteration) -> None:
    """Learn from the next `data.steps` minibatches of demonstrations; adds `train/` metrics."""
    if iteration.demonstrations is None:
        raise BatchError("there are no demonstrations to learn from: set data.path")
    assert isinstance(iteration.learner, SupervisedLearner), "its algorithm is registered with another learner"
    steps = iteration.config.data.steps
    batches = iteration.demonstrations.batches(iteration.engine.version * steps, steps)
    with iteration.engine.train_mode():
        iteration.metrics |= iteration.learner.imitation.learn(batches)
    iteration.metrics |= iteration.engine.memory_metrics()
