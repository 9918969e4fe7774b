"""Environments of dm_control behind Gymnasium's interface; its suite of control tasks.

dm_control is imported without its renderers: images come from the cameras of the MuJoCo scene.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodyrl.envs.mujoco import rendering


def load() -> None:
    """Import dm_control's suite without OpenGL."""
    rendering.import_mujoco()
    with rendering.environment(MUJOCO_GL="disable"):
        importlib.import_module("dm_control.suite")


def known_tasks() -> list[str]:
    """Return all tasks as `domain-task`, `ball_in_cup-catch`; not those of the quadruped with a numpy that is too new
    for dm_control's."""
    load()
    every = importlib.import_module("dm_control.suite").ALL_TASKS
    return ["-".join(pair) for pair in every if pair[0] != "quadruped" or hasattr(np, "in1d")]


def make(task: str, **task_kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Make an environment of the suite, without a time limit.

    Args:
        task: `domain-task`.
        task_kwargs: arguments of the task.
    """
    domain, _, name = task.partition("-")
    load_task = importlib.import_module("dm_control.suite").load
    return ControlEnv(load_task(domain, name, {"random": 0, **task_kwargs, "time_limit": math.inf}))


class ControlEnv(gymnasium.Env[Any, Any]):
    """An environment of `dm_control.rl.control`.

    Args:
        environment: a `dm_control.rl.control.Environment`.
        actions: the space of its actions; None: as it says itself.
        film_camera: camera of images for people; None: the first of the scene.
        before_reset: called with the seed before every reset.
        solved: tells from a reward whether the task is solved, which ends the episode; None: only the return tells.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        environment: Any,
        *,
        actions: spaces.Box | None = None,
        film_camera: str | None = None,
        before_reset: Callable[[int], None] | None = None,
        solved: Callable[[float], bool] | None = None,
    ) -> None:
        self._environment, self._before_reset, self._solved = environment, before_reset, solved
        self._unstable = importlib.import_module("dm_control.rl.control").PhysicsError
        self._seen: dict[str, Any] = {}
        shapes = environment.observation_spec()
        self.observation_space = spaces.Dict(
            {name: spaces.Box(-np.inf, np.inf, spec.shape, np.float64) for name, spec in shapes.items()}
        )
        bounds = environment.action_spec()
        self.action_space = actions or spaces.Box(
            np.broadcast_to(bounds.minimum, bounds.shape).astype(np.float32),
            np.broadcast_to(bounds.maximum, bounds.shape).astype(np.float32),
        )
        self.dt = float(environment.control_timestep())
        """Simulated time of a step [s]."""
        names = [self.model.camera(number).name for number in range(self.model.ncam)]
        self.film_camera = film_camera or next(filter(None, names), None)

    @property
    def model(self) -> Any:
        """The `mujoco.MjModel`."""
        return self._environment.physics.model.ptr

    @property
    def data(self) -> Any:
        """The `mujoco.MjData`."""
        return self._environment.physics.data.ptr

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Start an episode whose layout and noise `seed` decides."""
        super().reset(seed=seed)
        if seed is not None:
            self._environment.task._random = np.random.RandomState(seed % 2**32)
            if self._before_reset is not None:
                self._before_reset(seed)
        return self._observed(self._environment.reset().observation), {}

    def step(self, action: Any) -> tuple[Mapping[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute an action; an end with a discount of 1 is a truncation, as dm_control defines it."""
        try:
            outcome = self._environment.step(action)
        except self._unstable:
            # Random targets of ALOHA's joints can press its arms together until MuJoCo gives up, which must not end a
            # run. As in dm_control's composer the episode ends without reward; there is no newer observation.
            return self._seen, 0.0, True, False, {} if self._solved is None else {"is_success": False}
        reward, last = float(outcome.reward), bool(outcome.last())
        solved = self._solved is not None and self._solved(reward)
        terminated = solved or (last and outcome.discount == 0.0)
        info = {} if self._solved is None else {"is_success": solved}
        return self._observed(outcome.observation), reward, terminated, last and not terminated, info

    def _observed(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of the entries: some are views of MuJoCo's memory."""
        names = self.observation_space.spaces  # type: ignore[attr-defined]
        self._seen = {name: np.array(observation[name], np.float64) for name in names}
        return self._seen
