"""Values of options that several vision-language-action models share. Imports no torch."""

from __future__ import annotations

from enum import StrEnum


class WeightType(StrEnum):
    """Type of the weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class ActionUnits(StrEnum):
    """Units of unnormalized motions."""

    simulator = "simulator"
    metric = "metric"


class Frozen(StrEnum):
    """Part of the network that is not trained."""

    nothing = "nothing"
    vision = "vision"
    language = "language"


class StateInput(StrEnum):
    """Form in which a model reads the robot's state."""

    token = "token"
    none = "none"
