"""Engines with the learner of a method, for tests that look at both."""

from __future__ import annotations

from typing import Any

from embodyrl.config.schema import AlgorithmConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import SimulatorSpec
from embodyrl.methods.imitation.imitation import Imitation
from embodyrl.methods.learner import Learner, build_learner
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.methods.on_policy.learner import OnPolicyLearner
from embodyrl.models import Policy

PPO: dict[str, Any] = {"learner": OnPolicyLearner, "algorithm": OnPolicyConfig(name="ppo")}
"""Arguments of `planning.dry_run.trace`."""


class LearningEngine(HybridEngine):
    """An engine that knows its learner, and has the state of both, as a checkpoint does."""

    learner: Any

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        warning = super().load_state_dict(state)
        self.learner.load_state_dict(state)
        return warning


def learning_engine(
    policy: Policy, *, algorithm: AlgorithmConfig, simulator: SimulatorSpec | None = None, **options: Any
) -> LearningEngine:
    """Return the engine that a run with these settings would have, with its learner."""
    # Only critics that do not see what the policy sees ask for the simulator.
    spec: Any = simulator
    reference = getattr(algorithm, "kl_coef", 0.0) > 0.0
    learner: Learner = build_learner(policy, algorithm, simulator=spec, reference=reference, **options)
    engine: Any = learner.engine
    engine.__class__, engine.learner = LearningEngine, learner
    if not hasattr(learner, "imitation"):
        engine.learner.imitation = Imitation(engine)
    return engine
