"""Conversions between a simulator and a network, shared by several vision-language-action models."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from embodyrl.envs import SimulatorSpec
from embodyrl.envs.conventions import ActionConvention, conversion, from_simulator, to_simulator
from embodyrl.models.errors import PolicyError
from embodyrl.models.lerobot import Scale
from embodyrl.models.policy import check_tensor
from embodyrl.models.vla.cameras import Cameras
from embodyrl.models.vla.config import ActionUnits, Gripper
from embodyrl.screen import counted

# --------------------------------------------------------------------------------------------------------- observations


def check_images(given: Tensor | None, count: int | None) -> Tensor:
    """Return the images `[B, V, H, W, 3]` of an observation.

    Args:
        given: its images.
        count: `V` that the model takes; None: any, but at least one.

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
    if not images.shape[1] or count not in (None, images.shape[1]):
        wanted = "images" if count is None else counted(count, "image")
        raise PolicyError(f"the model takes {wanted} per observation, got {images.shape[1]}")
    return images


def shown_images(given: Tensor | None, cameras: Cameras | None) -> Tensor:
    """Return the images `[B, V, H, W, 3]` that a network reads, in its order; see `check_images`.

    Args:
        given: the observation's images.
        cameras: the simulator's cameras that show them; None: all, in their order.
    """
    if cameras is None:
        return check_images(given, None)
    return check_images(given, len(cameras.used))[:, cameras.order]


def fitted(images: Tensor, side: int, device: torch.device, *, centred: bool) -> Tensor:
    """Convert `images [B, V, H, W, 3]` in uint8 to `[B, V, 3, side, side]` float32 in [-1, 1].

    Images are resized without antialiasing to fit the square, as LeRobot does.

    Args:
        images: see above.
        side: of the square [pixels].
        device: device of the result.
        centred: black bars on all sides; if not, on the left and above.
    """
    flat = images.flatten(0, 1).to(device).permute(0, 3, 1, 2).float() / 255.0
    height, width = flat.shape[2:]
    if (height, width) != (side, side):
        ratio = max(width / side, height / side)
        height, width = int(height / ratio), int(width / ratio)
        flat = functional.interpolate(flat, size=(height, width), mode="bilinear", align_corners=False)
        left, top = ((side - width) // 2, (side - height) // 2) if centred else (side - width, side - height)
        flat = functional.pad(flat, (left, side - width - left, top, side - height - top))
    return torch.unflatten(flat * 2.0 - 1.0, 0, images.shape[:2])


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


class UnitOptions(Protocol):
    """Options that say what unnormalized actions mean."""

    @property
    def action_units(self) -> ActionUnits:
        """Units of motions."""
        ...

    @property
    def gripper(self) -> Gripper:
        """Meaning of the gripper's number."""
        ...

    @property
    def binary_gripper(self) -> bool:
        """Whether it only opens or closes fully."""
        ...


def convention_of(options: UnitOptions) -> ActionConvention:
    """Return the convention of unnormalized actions."""
    return ActionConvention(
        metric=options.action_units is ActionUnits.metric,
        gripper=(1.0, 0.0) if options.gripper is Gripper.one_opens else None,
        binary_gripper=options.binary_gripper,
    )


class Normalizer(nn.Module):
    """Normalises numbers of a data set, and back. Nothing is clipped; numbers without a width (divisor 0) become 0.

    Args:
        scale: of the `D` numbers, which are the last dimension.
    """

    origin: Tensor
    divisor: Tensor
    factor: Tensor

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        divisor = np.where(scale.divisor == 0, np.inf, scale.divisor)
        for name, numbers in (("origin", scale.origin), ("divisor", divisor), ("factor", scale.factor)):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.float32), persistent=False)
        self.shift = scale.shift

    def __len__(self) -> int:
        return len(self.origin)

    def normalize(self, numbers: Tensor) -> Tensor:
        """Normalise numbers `[..., D]` of the data set."""
        return (numbers - self.origin) / self.divisor - self.shift

    def unnormalize(self, numbers: Tensor) -> Tensor:
        """Convert the network's numbers `[..., D]` to those of the data set."""
        return (numbers + self.shift) * self.factor + self.origin


class SimulatorUnits(nn.Module):
    """Converts unnormalized actions to the simulator's convention, and back; without a simulator they stay as they are.

    Args:
        convention: meaning of the numbers of the policy's actions.
        simulator: spec of the simulator; None: there is none.
        action_dim: numbers in an action of the policy.
        remedy: end of the message if the simulator's actions have another size.

    Raises:
        PolicyError: the simulator's actions have another size.
    """

    def __init__(
        self, convention: ActionConvention, simulator: SimulatorSpec | None, action_dim: int, remedy: str
    ) -> None:
        super().__init__()
        self.converts = simulator is not None
        if simulator is None:
            return
        if action_dim != simulator.action_dim:
            raise PolicyError(
                f"an action of the model has {action_dim} numbers, the simulator takes {simulator.action_dim}: {remedy}"
            )
        rule = conversion(convention, simulator)
        for field in dataclasses.fields(rule):
            self.register_buffer(field.name, torch.from_numpy(getattr(rule, field.name)), persistent=False)

    def forward(self, actions: Tensor) -> Tensor:
        """Return actions `[..., D]` in the simulator's convention."""
        return to_simulator(actions, self) if self.converts else actions

    def inverse(self, actions: Tensor) -> Tensor:
        """Return actions `[..., D]` in the policy's convention."""
        return from_simulator(actions, self) if self.converts else actions
