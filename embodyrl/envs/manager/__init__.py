"""Simulators in processes of their own: EnvManager, and MixedManager for several of them."""

from embodyrl.envs.manager.manager import EnvManager, InvalidResult
from embodyrl.envs.manager.memory import StepResult
from embodyrl.envs.manager.mixed import MixedManager, start_env_manager
from embodyrl.envs.manager.simulators import EpisodePlayer, Simulators

__all__ = [
    "EnvManager",
    "EpisodePlayer",
    "InvalidResult",
    "MixedManager",
    "Simulators",
    "StepResult",
    "start_env_manager",
]
