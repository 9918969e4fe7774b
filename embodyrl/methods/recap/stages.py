"""The stage of RECAP."""

from __future__ import annotations

from collections.abc import Iterator

from embodyrl.methods.recap.learner import JUDGED, AdvantageConditioned
from embodyrl.methods.replay.stages import replay_of
from embodyrl.methods.stages import free_simulators
from embodyrl.pipelines.pipeline import Iteration
from embodyrl.rollout.replay import Minibatch
from embodyrl.screen import task


def judge_and_learn(iteration: Iteration) -> None:
    """Learn values from all decisions of episodes that have ended, judge these by them, and learn the policy, told what
    was better. Adds `train/` metrics."""
    replay, learner = replay_of(iteration), iteration.learner
    assert isinstance(learner, AdvantageConditioned), "its algorithm is registered with another learner"
    settings, shown = learner.settings, iteration.transitions
    free_simulators(iteration)
    iteration.metrics |= replay.metrics()
    if not len(replay) and shown is None:
        return
    learner.begin_round(iteration)
    beside = learner.sampler(replay, shown)

    def drawn(steps: int, what: str) -> Iterator[Minibatch]:
        with task(what, steps, "steps") as progress:
            for minibatch in replay.minibatches(steps, settings.batch_size, beside):
                yield minibatch
                progress.advance()

    iteration.metrics |= learner.learn_values(drawn(settings.value_steps, "learning values"), settings.value_steps)
    iteration.metrics |= learner.judge(drawn(JUDGED, "judging"))
    iteration.metrics |= learner.learn_policy(drawn(settings.policy_steps, "learning"), settings.policy_steps)
    iteration.metrics |= iteration.engine.memory_metrics()
