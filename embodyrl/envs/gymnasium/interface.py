"""What Gymnasium's interface asks an environment to take and to return, as far as environments are known to differ."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.utils import seeding

from embodyrl.envs.base import described
from embodyrl.errors import UserError

REMEDY = "update it to the interface of gymnasium.Env, or wrap it with shimmy.GymV21CompatibilityV0"
"""Of environments with the interface of Gym before 0.26."""


class Interface:
    """Calls one environment, and checks what it returns.

    Args:
        task: its id, for messages.
        env: the environment.

    Raises:
        UserError: its `reset` takes no seed, as that of Gym before 0.26.
    """

    def __init__(self, task: str, env: Any) -> None:
        self._what, self._env = f"the Gymnasium environment {task!r}", env
        parameters = inspect.signature(env.unwrapped.reset).parameters.values()
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        if not takes_any and "seed" not in {each.name for each in parameters}:
            raise UserError(f"{self._what} has the interface of Gym before 0.26, its reset takes no seed: {REMEDY}")

    def reset(self, seed: int) -> tuple[Any, Mapping[str, Any]]:
        """Start an episode; returns observation and info.

        Raises:
            UserError: the environment returns something else.
        """
        returned = self._env.reset(seed=seed)
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            return returned
        raise UserError(
            f"{self._what} returned {_kinds(returned)} from reset, as Gym before 0.26 did, want observation and info "
            f"(a dict): {REMEDY}"
        )

    def reseed(self, seed: int) -> None:
        """Seed what the environment draws from now on, if it has a generator of numpy's under Gymnasium's name for it;
        one of its own that is of another kind stays as its reset has left it."""
        inner = self._env.unwrapped
        own = getattr(inner, "np_random", None)
        if isinstance(own, np.random.RandomState):
            own.seed(seed % 2**32)
        elif isinstance(own, np.random.Generator) and _may_set(inner, "np_random"):
            inner.np_random, _ = seeding.np_random(seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
        """Execute an action; returns observation, reward, terminated, truncated and info.

        Raises:
            UserError: the environment returns something else.
        """
        returned = self._env.step(action)
        if not isinstance(returned, tuple) or len(returned) != 5 or not isinstance(returned[4], Mapping):
            old = ", as Gym before 0.26 did (observation, reward, done, info)" if _is_old(returned) else ""
            raise UserError(
                f"{self._what} returned {_kinds(returned)} from step{old}, want observation, reward, terminated, "
                f"truncated and info (a dict): {REMEDY}"
            )
        observation, reward, terminated, truncated, info = returned
        paid = reward if type(reward) is float else self._single("reward", reward)
        return observation, paid, self._flag("terminated", terminated), self._flag("truncated", truncated), info

    def success(self, reported: Any) -> bool:
        """Return whether what was reported as success is one: a bool or a number, or an array of one.

        Raises:
            UserError: it is something else.
        """
        return self._flag("success", reported)

    def _flag(self, name: str, value: Any) -> bool:
        return value if type(value) is bool else bool(self._single(name, value))

    def _single(self, name: str, value: Any) -> float:
        """Return the number of a scalar, or of an array of one as vectorised code returns it."""
        array = np.asarray(value)
        if array.size == 1 and array.dtype.kind in "biuf":
            return float(array.item())
        raise UserError(f"{self._what} returned {name} {described(value)}, want one number")


def _kinds(returned: Any) -> str:
    """Describe what was returned."""
    if isinstance(returned, tuple):
        return f"{len(returned)} values ({', '.join(described(part) for part in returned)})"
    return described(returned)


def _is_old(returned: Any) -> bool:
    return isinstance(returned, tuple) and len(returned) == 4 and isinstance(returned[3], Mapping)


def _may_set(owner: Any, name: str) -> bool:
    """Return whether an attribute is no property that can only be read."""
    found = getattr(type(owner), name, None)
    return not isinstance(found, property) or found.fset is not None
