"""The one place where a policy's action convention meets a simulator's."""

from __future__ import annotations

from typing import TypeVar

from embodyrl.envs.types import SimulatorSpec

ArrayT = TypeVar("ArrayT")


def from_unit_range(actions: ArrayT, low: ArrayT, high: ArrayT) -> ArrayT:
    """Map actions from [-1, 1] to a simulator's `low .. high`, cutting off what lies outside.

    Args:
        actions: `[..., D]`, numpy array or torch tensor; -1 means `low`, 1 means `high`.
        low, high: `[D]`, of the same kind, in the simulator's units.
    """
    unit = (actions.clip(-1.0, 1.0) + 1.0) * 0.5  # type: ignore[attr-defined]
    return low + unit * (high - low)  # type: ignore[operator]


def is_discrete(spec: SimulatorSpec) -> bool:
    """Whether the simulator takes one choice among n (an index) instead of continuous numbers."""
    return len(spec.actions) == 1 and spec.actions[0].meaning == "discrete"
