"""Registers a simulator of which what is known cannot be."""

from typing import Any

from embodyrl.config.infos import SimulatorInfo
from embodyrl.config.schema import EnvConfig
from embodyrl.registry import SIMULATORS


class Mistaken(SimulatorInfo[EnvConfig]):
    """What is known, of which three answers cannot be."""

    def time_limit(self, env: EnvConfig) -> int:
        """Name no step."""
        return 0

    def control_frequency(self, env: EnvConfig) -> Any:
        """Name a text."""
        return "20 Hz"

    def perturbations(self, env: EnvConfig) -> Any:
        """Name a kind, not a list of them."""
        return "noise"


SIMULATORS.register("mistaken", target="answers_what_cannot_be:Simulator", info=Mistaken, summary="")
