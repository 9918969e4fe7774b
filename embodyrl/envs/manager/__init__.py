"""Simulators in processes of their own: EnvManager."""

from embodyrl.envs.manager.manager import EnvManager, InvalidResult
from embodyrl.envs.manager.memory import StepResult
from embodyrl.envs.manager.simulators import Playing, Simulators

__all__ = ["EnvManager", "InvalidResult", "Playing", "Simulators", "StepResult"]
