"""Any registered Gymnasium environment whose observations can be read as one vector.

A task is an environment id, `Pendulum-v1`. The time limit is the run's (`env.max_episode_steps`); the one that
Gymnasium registered for the id is not applied.

Supported: observations that flatten to a vector (Box, Dict or Tuple of them, Discrete as one-hot), actions that are a
finite Box or Discrete. A Discrete action is one float that holds an integer (meaning `discrete`).
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from numpy.typing import NDArray

from embodyrl.envs.base import RenderError, Slot, SlotSimulator, Transition, check_task_list, check_tasks
from embodyrl.envs.options import GymnasiumConfig
from embodyrl.envs.types import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.errors import UserError


def known_tasks() -> list[str]:
    """All environment ids that are registered now; plug-ins may add more."""
    return sorted(gymnasium.registry)


class Gymnasium(SlotSimulator):
    """Gymnasium environments with vector observations."""

    def __init__(self, config: GymnasiumConfig, num_slots: int) -> None:
        check_task_list(config.tasks, "gymnasium")
        for task in config.tasks:
            if ":" in task:
                raise UserError(
                    f"env.tasks names {task!r}, which would import a module: list the module under plugins: and name "
                    f"only {task.split(':')[-1]!r}"
                )
        check_tasks(config.tasks, known_tasks(), "gymnasium")
        self._config = config
        first = config.tasks[0]
        slot = GymnasiumSlot(first, config)
        spec = SimulatorSpec(
            tasks={task: f"control {task.rsplit('/')[-1].rsplit('-v', 1)[0]}" for task in config.tasks},
            actions=(slot.field,),
            proprio_dim=slot.proprio_dim,
            max_episode_steps=config.max_episode_steps,
            control_frequency=slot.control_frequency,
        )
        super().__init__(spec, num_slots, spare=[(first, slot)])

    def make_slot(self, task: str) -> Slot:
        """An environment of `task`."""
        slot = GymnasiumSlot(task, self._config)
        if (slot.field, slot.proprio_dim) != (self.spec.actions[0], self.spec.proprio_dim):
            raise UserError(
                f"env.tasks mixes environments of different shapes: {task!r} has {slot.proprio_dim} observation "
                f"numbers and actions {slot.field}, {self._config.tasks[0]!r} has {self.spec.proprio_dim} and "
                f"{self.spec.actions[0]}: name environments of one shape"
            )
        return slot


class GymnasiumSlot(Slot):
    """One Gymnasium environment, without the wrappers that repeat what `SlotSimulator` does."""

    def __init__(self, task: str, config: GymnasiumConfig) -> None:
        self._task = task
        self._env = _build(task, config.kwargs)
        self._space = self._env.observation_space
        self.proprio_dim = _vector_length(task, self._space)
        self.field = _action_field(task, self._env.action_space)
        self._plain = isinstance(self._space, spaces.Box)
        self._discrete = isinstance(self._env.action_space, spaces.Discrete)
        self._action_shape, self._action_type = self._env.action_space.shape, self._env.action_space.dtype
        self.control_frequency = _control_frequency(self._env)
        self._success_return = config.success_return
        self._limit = config.max_episode_steps
        self._steps = 0
        self._return = 0.0
        self._observation: Any = None

    def reset(self, episode: EpisodeSpec) -> None:
        """`episode.start_state` seeds the reset, `episode.seed` whatever is drawn after it."""
        self._observation, _ = self._env.reset(seed=episode.start_state)
        self._env.unwrapped.np_random, _ = seeding.np_random(episode.seed)
        self._steps, self._return = 0, 0.0

    def step(self, action: NDArray[np.float32]) -> Transition:
        """Execute `action [D]`."""
        native: Any
        if self._discrete:
            native = round(float(action[0]))
        else:
            native = action.reshape(self._action_shape).astype(self._action_type)
        self._observation, reward, terminated, truncated, info = self._env.step(native)
        self._steps += 1
        self._return += float(reward)
        if self._success_return is None:
            success = bool(info.get("is_success", info.get("success", False)))
        else:
            ended = terminated or truncated or self._steps >= self._limit
            success = ended and self._return >= self._success_return
        return Transition(float(reward), bool(terminated), success, bool(truncated))

    def observe(self) -> tuple[None, NDArray[np.float32]]:
        """No images; proprio `[S]`."""
        flat = self._observation if self._plain else spaces.flatten(self._space, self._observation)
        return None, np.array(flat, np.float32).reshape(-1)

    def render(self) -> NDArray[np.uint8]:
        """The environment's own `rgb_array` picture."""
        try:
            picture = self._env.render()
        except Exception as error:
            raise RenderError(f"the Gymnasium environment {self._task!r} cannot draw: {error}") from error
        if not isinstance(picture, np.ndarray):
            raise RenderError(f"the Gymnasium environment {self._task!r} has no render mode 'rgb_array'")
        return np.asarray(picture, np.uint8)

    def close(self) -> None:
        """Release the environment."""
        self._env.close()


def _build(task: str, kwargs: dict[str, Any]) -> Any:
    """The environment `task`, without time limit and checking wrappers."""
    spec = gymnasium.spec(task)
    creator = (
        gymnasium.envs.registration.load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else None
    )
    modes = getattr(creator, "metadata", {}).get("render_modes", [])
    settings = {"render_mode": "rgb_array", **kwargs} if "rgb_array" in modes else dict(kwargs)
    try:
        env = gymnasium.make(task, disable_env_checker=True, **settings)
    except gymnasium.error.DependencyNotInstalled as error:
        raise UserError(f"the Gymnasium environment {task!r} needs a package that is not installed: {error}") from error
    except TypeError as error:
        if not kwargs:
            raise
        raise UserError(f"env.kwargs {kwargs} do not fit the Gymnasium environment {task!r}: {error}") from error
    while isinstance(env, OrderEnforcing | PassiveEnvChecker | TimeLimit):
        env = env.env
    return env


def _vector_length(task: str, space: spaces.Space[Any]) -> int:
    """`S`, or `UserError` if the observations are not one vector."""
    picture = isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) > 1
    if picture or not space.is_np_flattenable:
        raise UserError(
            f"the Gymnasium environment {task!r} has observations {space}: supported are vectors (Box, Discrete, and "
            f"Dict or Tuple of them)"
        )
    return int(spaces.flatdim(space))


def _action_field(task: str, space: spaces.Space[Any]) -> ActionField:
    """The one field of the action vector, or `UserError` if there can be none."""
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return ActionField(
            name="action", meaning="discrete", unit="1", low=(float(first),), high=(float(first + space.n - 1),)
        )
    if isinstance(space, spaces.Box) and np.isfinite(space.low).all() and np.isfinite(space.high).all():
        low, high = space.low.astype(np.float32).ravel().tolist(), space.high.astype(np.float32).ravel().tolist()
        return ActionField(name="action", meaning="native", unit="1", low=tuple(low), high=tuple(high))
    raise UserError(f"the Gymnasium environment {task!r} has actions {space}: supported are finite Box and Discrete")


def _control_frequency(env: Any) -> float:
    """Control steps per simulated second, as far as the environment says [Hz]; 1 if it does not."""
    step = getattr(env.unwrapped, "dt", None) or getattr(env.unwrapped, "tau", None)
    if isinstance(step, float) and math.isfinite(step) and step > 0:
        return 1.0 / step
    return float(env.metadata.get("render_fps") or 1.0)
