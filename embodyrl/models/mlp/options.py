"""Options of the MLP policy. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from embodyrl.config.schema import ModelConfig, setting


class Activation(StrEnum):
    """Nonlinearity between the layers."""

    tanh = "tanh"
    relu = "relu"
    elu = "elu"


@dataclass(frozen=True, kw_only=True)
class MLPConfig(ModelConfig):
    """A policy and a value function, each a small network on the state observation."""

    hidden_sizes: list[int] = setting([128, 128], low=1)
    """Widths of the hidden layers, of the policy and of the value network."""
    activation: Activation = setting(Activation.tanh)
    """Nonlinearity between the layers."""
    log_std_init: float = setting(-0.5, low=-5.0, high=2.0)
    """Start value of the exploration noise's log standard deviation, in units of half the action range. Discrete
    actions have no such noise."""
    normalize_observations: bool = setting(True)
    """Scale observations by a running mean and standard deviation, updated once per iteration and saved with the
    policy."""
