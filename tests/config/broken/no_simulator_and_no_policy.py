"""Registers a simulator that lacks methods, and a model that is no policy."""

from typing import Any

from embodyrl.registry import SIMULATORS, SupportedModel


class Still:
    """Cannot be stepped."""

    def __init__(self, config: Any, num_slots: int) -> None:
        self.num_slots = num_slots

    def reset(self, slots: list[int], episodes: list[Any]) -> None:
        """Do nothing."""


class Guess:
    """Decides nothing."""


SIMULATORS.register("still", target=Still, summary="a simulator that cannot be stepped")
SupportedModel.register("guess", target=Guess, critic=True, summary="a model that is no policy")
