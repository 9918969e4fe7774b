"""Conversion between a policy's action convention and a simulator's. It happens nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.types import SimulatorSpec

ArrayT = TypeVar("ArrayT")


def unit_range(spec: SimulatorSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return centre and half width `[D]` of the simulator's action range, in its units."""
    half = np.float32(0.5)
    return half * (spec.action_low + spec.action_high), half * (spec.action_high - spec.action_low)


def from_unit_range(actions: ArrayT, centre: ArrayT, half_width: ArrayT) -> ArrayT:
    """Map actions from [-1, 1] to a simulator's range, after clipping them to [-1, 1].

    Args:
        actions: `[..., D]`, numpy array or torch tensor; -1 is the lower end of the range, 1 the upper.
        centre, half_width: `[D]`, of the same kind, from `unit_range`.
    """
    return centre + half_width * actions.clip(-1.0, 1.0)  # type: ignore[attr-defined, no-any-return]


def is_discrete(spec: SimulatorSpec) -> bool:
    """Return whether the simulator's actions are discrete: the index of one choice among n."""
    return len(spec.actions) == 1 and spec.actions[0].meaning == "discrete"


@dataclass(frozen=True, kw_only=True)
class ActionConvention:
    """Meaning of a policy's actions, as far as it differs from the simulator's."""

    metric: bool = False
    """Motions are in metres and radians."""
    gripper: tuple[float, float] | None = None
    """Values that open and close a gripper; None: the simulator's own."""
    binary_gripper: bool = False
    """The gripper opens or closes fully, whichever value is nearer."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Conversion of a policy's actions to a simulator's: `scale * action + offset`, clipped to the simulator's
    range."""

    scale: NDArray[np.float32]
    """`[D]`"""
    offset: NDArray[np.float32]
    """`[D]`"""
    low: NDArray[np.float32]
    """`[D]` smallest action of the simulator."""
    high: NDArray[np.float32]
    """`[D]` largest action of the simulator."""
    binary: NDArray[np.float32]
    """`[D]` 1 where only the ends of the range are used, else 0."""


def conversion(convention: ActionConvention, spec: SimulatorSpec) -> Conversion:
    """Return the conversion of actions in a policy's convention to those of a simulator."""
    scale, offset, binary = [], [], []
    for field in spec.actions:
        factor, shift, ends = 1.0, 0.0, 0.0
        if field.opens is not None and field.closes is not None and convention.gripper is not None:
            opens, closes = convention.gripper
            factor = (field.opens - field.closes) / (opens - closes)
            shift = field.closes - factor * closes
            ends = float(convention.binary_gripper)
        elif convention.metric and field.unit in ("m", "rad"):
            factor = 1.0 / field.scale
        scale += [factor] * len(field.low)
        offset += [shift] * len(field.low)
        binary += [ends] * len(field.low)
    return Conversion(
        scale=np.asarray(scale, np.float32),
        offset=np.asarray(offset, np.float32),
        low=spec.action_low,
        high=spec.action_high,
        binary=np.asarray(binary, np.float32),
    )


def to_simulator(actions: ArrayT, rule: Any) -> ArrayT:
    """Convert actions `[..., D]` of a policy to the simulator's convention.

    Args:
        actions: numpy array or torch tensor.
        rule: a `Conversion`, or an object with its fields as arrays of the same kind as `actions`.
    """
    moved = (rule.offset + rule.scale * actions).clip(rule.low, rule.high)
    centre, half_width = 0.5 * (rule.low + rule.high), 0.5 * (rule.high - rule.low)
    side = (moved > centre) * 1.0 - (moved < centre) * 1.0
    converted: ArrayT = moved + rule.binary * (centre + half_width * side - moved)
    return converted


def from_simulator(actions: ArrayT, rule: Any) -> ArrayT:
    """Convert actions `[..., D]` of a simulator to the policy's convention, see `to_simulator`."""
    converted: ArrayT = (actions - rule.offset) / rule.scale
    return converted
