"""Simulators in processes of their own: EnvManager."""

from embodyrl.envs.manager.manager import EnvManager, InvalidResult
from embodyrl.envs.manager.memory import StepResult

__all__ = ["EnvManager", "InvalidResult", "StepResult"]
