"""Simulators in processes of their own: EnvManager."""

from embodyrl.envs.manager.manager import EnvManager, InvalidResult
from embodyrl.envs.manager.memory import StepResult
from embodyrl.envs.manager.simulators import EpisodePlayer, Simulators

__all__ = ["EnvManager", "EpisodePlayer", "InvalidResult", "Simulators", "StepResult"]
