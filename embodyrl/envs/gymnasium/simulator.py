"""Any registered Gymnasium environment whose observations can be read as numbers, images, or both.

A task is an environment id, `Pendulum-v1`. The time limit is the run's (`env.max_episode_steps`); the one that
Gymnasium registered for the id is not applied.

Supported: observations that flatten to a vector (Box, Dict or Tuple of them, Discrete as one-hot) or are images (Box
of uint8 `[H, W, 3]`, by itself or as an entry of a Dict), actions that are a finite Box or Discrete. A Discrete action
is one float that holds an integer (meaning `discrete`).

Cameras: `render` is the environment's `render()`, `observation` is an observation that is an image, and each entry of a
Dict observation that is an image is a camera of that name. All are resized to `env.image_size`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from numpy.typing import NDArray

from embodyrl.envs.base import RenderError, Slot, SlotSimulator, Transition, check_cameras, check_task_list
from embodyrl.envs.gymnasium.tasks import Facts, known_tasks, task_description, why_unknown
from embodyrl.envs.images import resize
from embodyrl.envs.mujoco import rendering
from embodyrl.envs.options import GymnasiumConfig
from embodyrl.envs.types import ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.errors import UnknownNameError, UserError

RENDER = "render"
"""Camera that is the environment's `render()`."""

OBSERVATION = "observation"
"""Camera that is the whole observation, where that is an image."""


class Gymnasium(SlotSimulator):
    """Gymnasium environments."""

    def __init__(self, config: GymnasiumConfig, num_slots: int) -> None:
        check_task_list(config.tasks, "gymnasium")
        known = known_tasks()
        for task in config.tasks:
            if task not in known:
                raise UnknownNameError(" - ".join(why_unknown(task, known)))
        self._config = config
        first = config.tasks[0]
        slot = GymnasiumSlot(first, config)
        spec = SimulatorSpec(
            tasks={task: task_description(task) for task in config.tasks},
            actions=(slot.field,),
            proprio_dim=slot.views.proprio_dim,
            max_episode_steps=config.max_episode_steps,
            control_frequency=slot.control_frequency,
            cameras=tuple(config.cameras),
            image_size=(config.image_size[0], config.image_size[1]) if config.cameras else (0, 0),
        )
        super().__init__(spec, num_slots, spare=[(first, slot)])

    def make_slot(self, task: str) -> Slot:
        """Build an environment of `task`."""
        slot = GymnasiumSlot(task, self._config)
        if (slot.field, slot.views.proprio_dim) != (self.spec.actions[0], self.spec.proprio_dim):
            raise UserError(
                f"env.tasks mixes environments of different shapes: {task!r} has {slot.views.proprio_dim} observation "
                f"numbers and actions {slot.field}, {self._config.tasks[0]!r} has {self.spec.proprio_dim} and "
                f"{self.spec.actions[0]}: name environments of one shape"
            )
        return slot


class GymnasiumSlot(Slot):
    """One Gymnasium environment, without the wrappers that repeat what `SlotSimulator` does."""

    def __init__(self, task: str, config: GymnasiumConfig) -> None:
        self._env = _build(task, config.kwargs)
        self.views = Views(task, self._env, config.cameras, config.image_size)
        self.field = _action_field(task, self._env.action_space)
        self._discrete = isinstance(self._env.action_space, spaces.Discrete)
        self._action_shape, self._action_type = self._env.action_space.shape, self._env.action_space.dtype
        self.control_frequency = _control_frequency(self._env)
        self._success_return = config.success_return
        self._limit = config.max_episode_steps
        self._steps = 0
        self._return = 0.0
        self._observation: Any = None
        self.views.check()

    def reset(self, episode: EpisodeSpec) -> None:
        """Reset with `episode.start_state` as the seed; `episode.seed` seeds everything drawn afterwards."""
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

    def observe(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32] | None]:
        """Images `[V, H, W, 3]` or None, and proprio `[S]` or None."""
        return self.views.read(self._observation)

    def render(self) -> NDArray[np.uint8]:
        """Render the environment's own `rgb_array` image."""
        return self.views.render()

    def close(self) -> None:
        """Release the environment."""
        self._env.close()


def look(task: str, config: GymnasiumConfig) -> Facts:
    """Make an environment for what it says of itself; nothing is reset or rendered."""
    env = _build(task, config.kwargs)
    try:
        field = _action_field(task, env.action_space)
        return Facts(
            state_dim=Views(task, env, config.cameras, config.image_size).proprio_dim,
            action_dim=len(field.low),
            discrete=field.meaning == "discrete",
            control_frequency=_declared_frequency(env),
        )
    finally:
        env.close()


def _build(task: str, kwargs: dict[str, Any]) -> Any:
    """Make the environment `task`, without time limit and checking wrappers."""
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


def _action_field(task: str, space: spaces.Space[Any]) -> ActionField:
    """Return the field of the action vector, or raise `UserError` for an unsupported action space."""
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
    """Return the control steps per simulated second [Hz]; if the environment does not declare them, its images per
    second, or 1."""
    return _declared_frequency(env) or float(env.metadata.get("render_fps") or 1.0)


def _declared_frequency(env: Any) -> float | None:
    step = getattr(env.unwrapped, "dt", None) or getattr(env.unwrapped, "tau", None)
    return 1.0 / step if isinstance(step, float) and math.isfinite(step) and step > 0 else None


class Views:
    """Reads the observations of one environment.

    Args:
        task: id of the environment, for messages.
        env: the environment.
        cameras: `render`, `observation`, or keys of a Dict observation, in the order of the images.
        image_size: height and width of every image [pixels].

    Raises:
        UserError: the environment has no such camera, or observations that are neither numbers nor images.
    """

    def __init__(self, task: str, env: Any, cameras: Sequence[str], image_size: Sequence[int]) -> None:
        self._task, self._env, self._cameras = task, env, cameras
        self._height, self._width = image_size
        space = env.observation_space
        self._has_parts = isinstance(space, spaces.Dict)
        parts = dict(space.spaces) if self._has_parts else {OBSERVATION: space}
        images = sorted(name for name, part in parts.items() if _is_image(part))
        check_cameras(cameras, [*images, RENDER], task)
        self._numbers = {name: part for name, part in parts.items() if name not in images}
        for name, part in self._numbers.items():
            _check_numbers(
                task, f"observations {part}" if name == OBSERVATION else f"an observation {name!r} {part}", part
            )
        self._is_vector = isinstance(space, spaces.Box) and not images
        self.proprio_dim = sum(int(spaces.flatdim(part)) for part in self._numbers.values())
        """`S`, numbers in an observation, without images."""
        if not cameras and not self.proprio_dim:
            raise UserError(
                f"the Gymnasium environment {task!r} shows nothing but images: set env.cameras: [{', '.join(images)}]"
            )

    def read(self, observation: Any) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32] | None]:
        """Images `[V, H, W, 3]` or None, and proprio `[S]` or None."""
        if self._is_vector and not self._cameras:
            return None, np.array(observation, np.float32).reshape(-1)
        parts = observation if self._has_parts else {OBSERVATION: observation}
        images = [self._image(camera, parts) for camera in self._cameras]
        numbers = [
            np.asarray(spaces.flatten(part, parts[name]), np.float32).reshape(-1)
            for name, part in self._numbers.items()
        ]
        return np.stack(images) if images else None, np.concatenate(numbers) if numbers else None

    def check(self) -> None:
        """Reset the environment and render once, if a camera needs rendering.

        Raises:
            UserError: the environment cannot render.
        """
        if RENDER in self._cameras:
            self._env.reset(seed=0)
            try:
                self.render()
            except RenderError as error:
                raise UserError(f"env.cameras names {RENDER!r}, but {error}") from error

    def render(self) -> NDArray[np.uint8]:
        """Render the environment's own image, in its own size `[H, W, 3]`.

        Raises:
            RenderError: it has none.
        """
        if hasattr(self._env.unwrapped, "mujoco_renderer"):
            rendering.choose()
        if self._env.unwrapped.render_mode != "rgb_array":
            raise RenderError(f"the Gymnasium environment {self._task!r} has no render mode 'rgb_array'")
        try:
            image = np.asarray(self._env.render(), np.uint8)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise RenderError(f"the Gymnasium environment {self._task!r} cannot render: {why}") from error
        if image.ndim != 3 or image.shape[2] != 3:
            raise RenderError(f"the Gymnasium environment {self._task!r} rendered {image.shape}, want [H, W, 3]")
        return image

    def _image(self, camera: str, parts: dict[str, Any]) -> NDArray[np.uint8]:
        image = self.render() if camera == RENDER else np.asarray(parts[camera])
        return resize(image, self._height, self._width)


def _is_image(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == 3


def _check_numbers(task: str, what: str, space: spaces.Space[Any]) -> None:
    """Raise `UserError` unless `space` flattens to a vector and is not an image of an unsupported format."""
    pixels = isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) > 1
    if pixels or not space.is_np_flattenable:
        raise UserError(
            f"the Gymnasium environment {task!r} has {what}: supported are vectors (Box, Discrete, and Dict or Tuple "
            f"of them) and images (Box of uint8 [H, W, 3], by itself or as an entry of a Dict)"
        )
