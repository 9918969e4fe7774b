"""Values of options that several vision-language-action models share. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
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


class Gripper(StrEnum):
    """Meaning of the gripper's entry in an unnormalized action."""

    simulator = "simulator"
    one_opens = "one_opens"


class Frozen(StrEnum):
    """Part of the network that is not trained."""

    nothing = "nothing"
    vision = "vision"
    language = "language"


class StateInput(StrEnum):
    """Form in which a model reads the robot's state."""

    token = "token"
    none = "none"


@dataclass(frozen=True, kw_only=True)
class StackSizes:
    """Shape of a stack of transformer layers whose heads share keys and values."""

    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


SIGLIP_SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
"""Sizes of the vision tower of pi0 and GR00T, as transformers names them."""
