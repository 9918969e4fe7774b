"""Conversions between a simulator and a network, shared by several vision-language-action models."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import ActionConvention, conversion, from_simulator, to_simulator
from embodyrl.models.errors import PolicyError
from embodyrl.models.policy import check_tensor
from embodyrl.screen import counted

# --------------------------------------------------------------------------------------------------------- observations


def check_images(given: Tensor | None, count: int) -> Tensor:
    """Return the images `[B, V, H, W, 3]` of an observation.

    Args:
        given: its images.
        count: `V` that the model takes.

    Raises:
        PolicyError: images are missing, or have another type, shape or number than the model takes.
    """
    if given is None:
        raise PolicyError("the model needs images, and the observation has none", "set env.cameras")
    images = check_tensor(given, "images")
    if images.dtype != torch.uint8:
        raise PolicyError(f"images must be uint8 (0 .. 255), got {str(images.dtype).removeprefix('torch.')}")
    if images.dim() != 5 or images.shape[-1] != 3:
        raise PolicyError(f"images must have shape [B, V, H, W, 3], got {list(images.shape)}")
    if images.shape[1] != count:
        raise PolicyError(f"the model takes {counted(count, 'image')} per observation, got {images.shape[1]}")
    return images


def read_state(proprio: Tensor | None, size: int, device: torch.device) -> Tensor:
    """Return the robot's state of an observation as float32 `[B, S]`.

    Args:
        proprio: its state `[B, S]`.
        size: `S` that the model takes.
        device: device of the result.

    Raises:
        PolicyError: the state is missing, is no tensor, or has another size.
    """
    if proprio is None or proprio.shape[-1] != size:
        found = "none" if proprio is None else f"{proprio.shape[-1]} numbers"
        raise PolicyError(f"the model needs a state of {size} numbers, the observation has {found}")
    return check_tensor(proprio, "proprio").to(device, torch.float32)


# -------------------------------------------------------------------------------------------------------------- numbers


class Normalizer(nn.Module):
    """Normalizes numbers of a data set to `(x - centre) / half_width`, and back. Constant entries (width 0) become 0.
    Nothing is clipped.

    Args:
        centre: `[D]`.
        half_width: `[D]`.
    """

    centre: Tensor
    half_width: Tensor

    def __init__(self, centre: Tensor, half_width: Tensor) -> None:
        super().__init__()
        self.register_buffer("centre", centre.float(), persistent=False)
        self.register_buffer("half_width", half_width.float(), persistent=False)

    def __len__(self) -> int:
        return len(self.centre)

    def normalize(self, numbers: Tensor) -> Tensor:
        """Normalize numbers `[..., D]` of the data set."""
        still = self.half_width == 0
        return ((numbers - self.centre) / self.half_width.masked_fill(still, 1.0)).masked_fill(still, 0.0)

    def unnormalize(self, numbers: Tensor) -> Tensor:
        """Convert the network's numbers `[..., D]` to those of the data set."""
        return numbers * self.half_width + self.centre


class SimulatorUnits(nn.Module):
    """Converts unnormalized actions to the simulator's convention, and back.

    Args:
        convention: meaning of the numbers of the policy's actions.
        simulator: spec of the simulator.
        action_dim: numbers in an action of the policy.
        remedy: end of the message if the simulator's actions have another size.

    Raises:
        PolicyError: the simulator's actions have another size.
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
        """Return actions `[..., D]` in the simulator's convention."""
        return to_simulator(actions, self)

    def inverse(self, actions: Tensor) -> Tensor:
        """Return actions `[..., D]` in the policy's convention."""
        return from_simulator(actions, self)
