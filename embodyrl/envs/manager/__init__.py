"""Simulators in processes of their own: EnvManager."""

from embodyrl.envs.manager.exchange import StepResult
from embodyrl.envs.manager.manager import EnvManager, InvalidResult

__all__ = ["EnvManager", "InvalidResult", "StepResult"]
