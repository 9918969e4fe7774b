"""Simulators in processes of their own: EnvManager."""

from embodyrl.envs.manager.manager import EnvManager, InvalidResult, StepResult

__all__ = ["EnvManager", "InvalidResult", "StepResult"]
