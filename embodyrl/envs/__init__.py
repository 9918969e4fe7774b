"""Simulators: the protocol, the backends, and EnvManager, which runs them in processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodyrl.envs.types import ActionField, ChunkResult, EpisodeSpec, Observation, Simulator, SimulatorSpec

__all__ = ["ActionField", "ChunkResult", "EpisodeSpec", "Observation", "Simulator", "SimulatorSpec"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that simulators' options can be read without numpy."""
    if name in __all__:
        import embodyrl.envs.types as types

        return getattr(types, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
