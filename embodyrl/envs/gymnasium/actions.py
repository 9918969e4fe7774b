"""Actions of a Gymnasium environment: the field that a policy fills, and what the environment is given for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from embodyrl.envs.types import MOST_ACTION, ActionField
from embodyrl.errors import UserError


def action_field(task: str, space: spaces.Space[Any]) -> ActionField:
    """Return the field of the action vector, or raise `UserError` for an unsupported action space."""
    has = f"the Gymnasium environment {task!r} has actions {space}"
    if isinstance(space, spaces.Discrete):
        first, last = int(space.start), int(space.start) + int(space.n) - 1
        if max(-first, last) > MOST_ACTION:
            raise UserError(
                f"{has}, from {first} to {last}, but float32 holds whole numbers only from -2**24 to 2**24: wrap it, "
                f"so that its actions are fewer and start at 0, Discrete(n)"
            )
        return ActionField(name="action", meaning="discrete", unit="1", low=(float(first),), high=(float(last),))
    if not isinstance(space, spaces.Box) or 0 in space.shape:
        raise UserError(f"{has}: supported are finite Box and Discrete, of at least one number")
    low, high = (end.astype(np.float64).ravel() for end in (space.low, space.high))
    endless = ~(np.maximum(-low, high) <= MOST_ACTION)
    if endless.any():
        where = int(np.argmax(endless))
        raise UserError(
            f"{has}: supported are finite Box and Discrete, but its number {where} goes from {low[where]:g} to "
            f"{high[where]:g}, which is no limit (2**24 is the most): declare Box(low, high) with the range that is "
            f"useful, or wrap it with gymnasium.wrappers.TransformAction"
        )
    ends = [tuple(end.astype(np.float32).tolist()) for end in (low, high)]
    return ActionField(name="action", meaning="native", unit="1", low=ends[0], high=ends[1])


def native_action(space: spaces.Space[Any]) -> Callable[[NDArray[np.float32]], Any]:
    """Return the conversion of an action `[D]`, within the bounds of `action_field`, to a new element of `space`."""
    if isinstance(space, spaces.Discrete):
        return lambda action: round(float(action[0]))
    assert isinstance(space, spaces.Box)
    shape, kind, low, high = space.shape, space.dtype, space.low, space.high
    if kind == np.float32:
        return lambda action: action.reshape(shape).copy()
    if kind.kind == "f":
        # In the space's own type, whose bounds float32 may exceed: 0.1 is 0.10000000149 there.
        return lambda action: np.clip(action.reshape(shape).astype(kind), low, high)
    return lambda action: np.clip(np.rint(action.reshape(shape)).astype(np.int64), low, high).astype(kind)
