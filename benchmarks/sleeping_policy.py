"""A plug-in for `scale_check.py`: a policy whose decisions take as long as its config says."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch

from embodyrl.config.schema import setting
from embodyrl.envs import SimulatorSpec
from embodyrl.models.mlp.options import MLPConfig
from embodyrl.models.mlp.policy import MLPPolicy
from embodyrl.models.policy import ActOutput, Inputs
from embodyrl.registry import SupportedModel


@dataclass(frozen=True, kw_only=True)
class SleepingPolicyConfig(MLPConfig):
    """Duration of decisions."""

    name: str = "sleeping"
    decide_least_ms: float = setting(20.0, low=0.0)
    """Length of a decision, however few envs there are [ms]."""
    decide_ms: float = setting(5.0, low=0.0)
    """Length of a decision per env [ms], if that is more."""


class SleepingPolicy(MLPPolicy):
    """An MLP that sleeps before it acts, as long as a large policy on a GPU would take."""

    def __init__(self, config: SleepingPolicyConfig, simulator: SimulatorSpec, chunk_size: int) -> None:
        """Build the MLP."""
        super().__init__(config, simulator, chunk_size)
        self._least_s, self._each_s = config.decide_least_ms / 1e3, config.decide_ms / 1e3

    def act(
        self, inputs: Inputs, mode: Literal["train", "eval"], generator: torch.Generator | None = None
    ) -> ActOutput:
        """Sleep, then act."""
        time.sleep(max(self._least_s, self._each_s * len(inputs["proprio"])))
        return super().act(inputs, mode, generator)


SupportedModel.register(
    "sleeping",
    target=SleepingPolicy,
    options=SleepingPolicyConfig,
    critic=True,
    max_chunk=32,
    blocks=False,
    summary="an MLP whose decisions take time",
)
