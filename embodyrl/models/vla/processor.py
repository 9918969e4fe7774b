"""What several vision-language-action models do between a simulator and their network."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import ActionConvention, conversion, from_simulator, to_simulator
from embodyrl.models.errors import PolicyError


def check_images(images: Any, count: int) -> Tensor:
    """Pictures `[B, V, H, W, 3]` of an observation, as a tensor.

    Args:
        images: numpy array or tensor, or None.
        count: pictures per observation that the model takes.

    Raises:
        PolicyError: they are missing, or of another type, shape or number than the model takes.
    """
    if images is None:
        raise PolicyError("the model needs pictures, and the observation has none: set env.cameras")
    pictures = images if isinstance(images, Tensor) else torch.from_numpy(np.array(images))
    if pictures.dtype != torch.uint8:
        raise PolicyError(f"pictures must be uint8 (0 .. 255), got {str(pictures.dtype).removeprefix('torch.')}")
    if pictures.dim() != 5 or pictures.shape[-1] != 3:
        raise PolicyError(f"pictures must have shape [B, V, H, W, 3], got {list(pictures.shape)}")
    if pictures.shape[1] != count:
        raise PolicyError(f"the model takes {count} picture(s) per observation, got {pictures.shape[1]}")
    return pictures


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
