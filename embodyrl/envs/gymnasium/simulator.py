"""Any registered Gymnasium environment whose observations can be read as numbers, images, or both.

A task is an environment id, `Pendulum-v1`. The time limit is the one that it is registered with, unless
`env.max_episode_steps` sets another one.

Supported: observations that flatten to a vector (Box, Dict or Tuple of them, Discrete as one-hot) or are images (Box
of uint8 `[H, W, 3]`, by itself or as an entry of a Dict), actions that are a finite Box or Discrete. A Discrete action
is one float that holds an integer (meaning `discrete`); the actions of a Box of whole numbers are rounded.

Cameras: `render` is the environment's `render()`, `observation` is an observation that is an image, and each entry of a
Dict observation that is an image is a camera of that name (`outer.inner` in a Dict within a Dict). They are resized to
`env.image_size`. The cameras of an environment's MuJoCo scene are rendered at that size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from numpy.typing import NDArray

from embodyrl.config.schema import AUTO
from embodyrl.envs.base import Slot, SlotSimulator, Transition, check_task_list, described
from embodyrl.envs.gymnasium import attributes, families
from embodyrl.envs.gymnasium.families import family, task_description
from embodyrl.envs.gymnasium.tasks import Facts, known_tasks, limit_of, why_not_single, why_unknown
from embodyrl.envs.gymnasium.views import Views
from embodyrl.envs.mujoco import physics
from embodyrl.envs.mujoco.rendering import Renderers
from embodyrl.envs.mujoco.scene_changes import KINDS as SHOWN
from embodyrl.envs.mujoco.scene_changes import SceneChanges
from embodyrl.envs.options import GymnasiumConfig
from embodyrl.envs.perturb.kinds import level_of
from embodyrl.envs.types import MOST_ACTION, ActionField, EpisodeSpec, SimulatorSpec
from embodyrl.errors import UnknownNameError, UserError
from embodyrl.registry import load_target

SCENE = "scene."
"""Prefix of the names of a snapshot's arrays that are of the MuJoCo scene."""
KEPT_RENDERERS = 10
"""Renderers of MuJoCo scenes that a process keeps."""


class Gymnasium(SlotSimulator):
    """Gymnasium environments: any registered one, or those of the family that `env.name` names."""

    def __init__(self, config: GymnasiumConfig, num_slots: int) -> None:
        check_task_list(config.tasks, config.name)
        known = known_tasks(config.name)
        for task in config.tasks:
            if task not in known:
                raise UnknownNameError(" - ".join(why_unknown(config.name, task, known)))
        self._config = config
        self._renderers = Renderers(most=KEPT_RENDERERS)
        first = config.tasks[0]
        slot = GymnasiumSlot(first, config, self._renderers)
        spec = SimulatorSpec(
            tasks={task: task_description(task) for task in config.tasks},
            actions=(slot.field,),
            proprio_dim=slot.views.proprio_dim,
            environment_state=slot.views.environment_state,
            max_episode_steps=config.time_limit,
            control_frequency=slot.control_frequency,
            cameras=tuple(config.cameras),
            image_size=(config.image_size[0], config.image_size[1]) if config.cameras else (0, 0),
        )
        super().__init__(spec, num_slots, spare=[(first, slot)])

    def make_slot(self, task: str) -> Slot:
        """Build an environment of `task`."""
        slot = GymnasiumSlot(task, self._config, self._renderers)
        if (slot.field, slot.views.proprio_dim) != (self.spec.actions[0], self.spec.proprio_dim):
            raise UserError(
                f"env.tasks mixes environments of different shapes: {task!r} has {slot.views.proprio_dim} observation "
                f"numbers and actions {slot.field}, {self._config.tasks[0]!r} has {self.spec.proprio_dim} and "
                f"{self.spec.actions[0]}: name environments of one shape"
            )
        return slot

    def close(self) -> None:
        """Release the environments and the renderers."""
        super().close()
        self._renderers.close()


class GymnasiumSlot(Slot):
    """One Gymnasium environment, without the wrappers that repeat what `SlotSimulator` does."""

    def __init__(self, task: str, config: GymnasiumConfig, renderers: Renderers) -> None:
        self._env = _build(task, config)
        self._interface = Interface(task, self._env)
        self.views = Views(task, self._env, config, renderers)
        of = family(config.name)
        self._succeeds = of.success if of else families.reported
        self._exact = of is not None and of.on_mujoco
        self.field = action_field(task, self._env.action_space)
        self._native = native_action(self._env.action_space)
        self.control_frequency = _control_frequency(self._env)
        self._success_return = config.success_return
        self.time_limit = limit_of(config.name, task) if config.max_episode_steps == AUTO else None
        self._limit = self.time_limit or config.time_limit
        self._steps = 0
        self._return = 0.0
        self._observation: Any = None
        self._start = of.start if of else None
        self.perturbs = (SHOWN if self.views.scene_cameras else frozenset()) | ({"robot"} if self._start else set())
        self.views.check()

    def reset(self, episode: EpisodeSpec) -> None:
        """Reset with `episode.start_state` as the seed; `episode.seed` seeds everything drawn afterwards."""
        with self._moved_robot(episode):
            self._observation, _ = self._interface.reset(episode.start_state)
        self.views.changes = None
        if episode.perturb and self.views.scene_cameras:
            inner = self._env.unwrapped
            self.views.changes = SceneChanges.begin(episode, inner.model, inner.data, self.views.scene_cameras)
        self._interface.reseed(episode.seed)
        self._steps, self._return = 0, 0.0

    def _moved_robot(self, episode: EpisodeSpec) -> AbstractContextManager[None]:
        """Return a block in which a reset begins with the robot's pose of an episode."""
        level = level_of(episode.perturb, "robot")
        if not level or self._start is None:
            return nullcontext()
        begun: AbstractContextManager[None] = load_target(self._start)(self._env, episode.seed, level)
        return begun

    def step(self, action: NDArray[np.float32]) -> Transition:
        """Execute `action [D]`."""
        self._observation, reward, terminated, truncated, info = self._interface.step(self._native(action))
        self._steps += 1
        self._return += reward
        success: bool | None
        if self._success_return is None:
            reported = self._succeeds(info)
            success = None if reported is None else self._interface.success(reported)
        else:
            ended = terminated or truncated or self._steps >= self._limit
            success = ended and self._return >= self._success_return
        return Transition(reward, terminated, success, truncated)

    def observe(self) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32] | None]:
        """Images `[V, H, W, 3]` or None, and proprio `[S]` or None."""
        return self.views.read(self._observation)

    def snapshot(self) -> dict[str, NDArray[Any]] | None:
        """Return scene and Python objects of an environment on MuJoCo; None: replay is exact, this may not be."""
        if not self._exact:
            return None
        inner = self._env.unwrapped
        scene = {SCENE + name: array for name, array in physics.save(inner.model, inner.data).items()}
        return {**scene, **attributes.save(self._memory())}

    def restore(self, episode: EpisodeSpec, snapshot: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a snapshot of `episode`."""
        self.reset(episode)  # which makes the objects of an episode, and what it draws in the model
        scene = {name.removeprefix(SCENE): array for name, array in snapshot.items() if name.startswith(SCENE)}
        physics.restore(self._env.unwrapped.model, self._env.unwrapped.data, scene)
        memory = self._memory()
        attributes.restore(memory, snapshot)
        self._observation, self._steps, self._return = memory["seen"], memory["steps"], memory["return"]

    def _memory(self) -> dict[str, Any]:
        """Return what is remembered besides the scene."""
        return {"env": self._env, "seen": self._observation, "steps": self._steps, "return": self._return}

    def render(self) -> NDArray[np.uint8]:
        """Render the environment's own `rgb_array` image."""
        return self.views.render()

    def close(self) -> None:
        """Release the environment."""
        self._env.close()


def look(task: str, config: GymnasiumConfig) -> Facts:
    """Make an environment for what it says of itself; nothing is reset or rendered."""
    env = _build(task, config)
    try:
        field = action_field(task, env.action_space)
        views = Views(task, env, config)
        return Facts(
            state_dim=views.proprio_dim,
            environment_state=views.environment_state,
            action_dim=len(field.low),
            discrete=field.meaning == "discrete",
            control_frequency=_declared_frequency(env),
        )
    finally:
        env.close()


def _build(task: str, config: GymnasiumConfig) -> Any:
    """Make the environment `task`, without checking wrappers and the time limit that `SlotSimulator` counts."""
    of = family(config.name)
    if of is not None:
        of.load()  # a config is looked at before anything else has imported the package
    try:
        env = load_target(of.make)(task, **config.kwargs) if of and of.make else _registered(task, config.kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise UserError(f"the Gymnasium environment {task!r} needs a package that is not installed: {error}") from error
    except TypeError as error:
        if "gymnasium.Env" in str(error):
            raise UserError(f"the Gymnasium environment {task!r} is none: {error}") from error
        if not config.kwargs:
            raise
        raise UserError(f"env.kwargs {config.kwargs} do not fit the Gymnasium environment {task!r}: {error}") from error
    # A time limit that an environment has built in is its own, unless another one is set.
    keeps_limit = config.max_episode_steps == AUTO
    while isinstance(env, OrderEnforcing | PassiveEnvChecker | TimeLimit) and not (
        keeps_limit and isinstance(env, TimeLimit)
    ):
        env = env.env
    return env


def _registered(task: str, kwargs: dict[str, Any]) -> Any:
    """Make an environment that Gymnasium knows by its id, rendering images where it can."""
    spec = gymnasium.spec(task)
    if (why := why_not_single(task)) is not None:
        raise UserError(" - ".join(why))
    creator = (
        gymnasium.envs.registration.load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else None
    )
    modes = getattr(creator, "metadata", {}).get("render_modes", [])
    settings = {"render_mode": "rgb_array", **kwargs} if "rgb_array" in modes else dict(kwargs)
    return gymnasium.make(task, max_episode_steps=-1, disable_env_checker=True, **settings)


def _control_frequency(env: Any) -> float:
    """Return the control steps per simulated second [Hz]; if the environment does not declare them, its images per
    second, or 1."""
    return _declared_frequency(env) or float(env.metadata.get("render_fps") or 1.0)


def _declared_frequency(env: Any) -> float | None:
    step = getattr(env.unwrapped, "dt", None) or getattr(env.unwrapped, "tau", None)
    return 1.0 / step if isinstance(step, float) and math.isfinite(step) and step > 0 else None


# -------------------------------------------------------------------------------------------------------------- actions


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


# ------------------------------------------------------------------------------------ what environments take and return

REMEDY = "update it to the interface of gymnasium.Env, or wrap it with shimmy.GymV21CompatibilityV0"
"""Of environments with the interface of Gym before 0.26."""


class Interface:
    """Calls one environment, and checks what it returns.

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
