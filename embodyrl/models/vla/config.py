"""Words that options of several vision-language-action models share (imports no torch)."""

from __future__ import annotations

from enum import StrEnum


class WeightType(StrEnum):
    """Type of the weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class ActionUnits(StrEnum):
    """What un-normalised motions are measured in."""

    simulator = "simulator"
    metric = "metric"
