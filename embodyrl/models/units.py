"""A policy's actions in a simulator's units; `envs.conventions` on the policy's device."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import ActionConvention, conversion, from_simulator, to_simulator
from embodyrl.models.errors import PolicyError


class SimulatorUnits(nn.Module):
    """Converts un-normalised actions.

    Args:
        convention: what the numbers of the policy's actions mean.
        simulator: what the actions are for.
        action_dim: numbers in an action of the policy.
        remedy: what to do if the simulator's actions have another number.

    Raises:
        PolicyError: they have.
    """

    def __init__(self, convention: ActionConvention, simulator: SimulatorSpec, action_dim: int, remedy: str) -> None:
        super().__init__()
        if action_dim != simulator.action_dim:
            raise PolicyError(
                f"an action of the model has {action_dim} numbers, the simulator takes {simulator.action_dim}: {remedy}"
            )
        rule = conversion(convention, simulator)
        for field in dataclasses.fields(rule):
            self.register_buffer(field.name, torch.from_numpy(getattr(rule, field.name)), persistent=False)

    def forward(self, actions: Tensor) -> Tensor:
        """Actions `[..., D]` in the simulator's convention."""
        return to_simulator(actions, self)

    def inverse(self, actions: Tensor) -> Tensor:
        """Actions `[..., D]` in the policy's convention."""
        return from_simulator(actions, self)
