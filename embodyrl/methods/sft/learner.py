"""Supervised fine-tuning: steps along a policy's supervised loss, towards demonstrated actions."""

from __future__ import annotations

from embodyrl.config.schema import AlgorithmConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import SimulatorSpec
from embodyrl.methods.imitation.imitation import Imitation
from embodyrl.methods.learner import Learner


class SupervisedLearner(Learner):
    """Learns from demonstrations alone.

    Args:
        engine, algorithm, simulator: see `Learner`.
    """

    def __init__(self, engine: HybridEngine, algorithm: AlgorithmConfig, simulator: SimulatorSpec) -> None:
        super().__init__(engine, algorithm, simulator)
        self.imitation = Imitation(engine)
