"""The one place where a policy's action convention meets a simulator's."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.types import SimulatorSpec

ArrayT = TypeVar("ArrayT")


def unit_range(spec: SimulatorSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Centre and half width `[D]` of the simulator's action range, in its units."""
    half = np.float32(0.5)
    return half * (spec.action_low + spec.action_high), half * (spec.action_high - spec.action_low)


def from_unit_range(actions: ArrayT, centre: ArrayT, half_width: ArrayT) -> ArrayT:
    """Map actions from [-1, 1] to a simulator's range, cutting off what lies outside.

    Args:
        actions: `[..., D]`, numpy array or torch tensor; -1 is the lower end of the range, 1 the upper.
        centre, half_width: `[D]`, of the same kind, from `unit_range`.
    """
    return centre + half_width * actions.clip(-1.0, 1.0)  # type: ignore[attr-defined]


def is_discrete(spec: SimulatorSpec) -> bool:
    """Whether the simulator takes one choice among n (an index) instead of continuous numbers."""
    return len(spec.actions) == 1 and spec.actions[0].meaning == "discrete"
