"""Registers a simulator whose package is nowhere."""

from dataclasses import dataclass

from embodyrl.config.schema import EnvConfig, setting
from embodyrl.registry import SIMULATORS, Requirement


@dataclass(frozen=True, kw_only=True)
class FarAwayConfig(EnvConfig):
    """Options of a simulator that cannot be installed."""

    friction: float = setting(1.0, above=0.0)
    """Friction [1]."""


SIMULATORS.register(
    "far_away_simulator",
    target="no_such_package_xyz:Simulator",
    options=FarAwayConfig,
    requires=[Requirement(module="no_such_package_xyz", install="pip install 'embodyrl[xyz]'")],
    summary="a simulator whose package is not installed",
)
