"""Simulators: the protocol, the backends, and EnvManager, which runs them in processes."""

from embodyrl.envs.types import ActionField, ChunkResult, EpisodeSpec, Observation, Simulator, SimulatorSpec

__all__ = ["ActionField", "ChunkResult", "EpisodeSpec", "Observation", "Simulator", "SimulatorSpec"]
