"""Fast driver of MetaWorld's environments: less Python around the same physics.

Observations, rewards and success are those of MetaWorld bit for bit (`tests/envs/test_metaworld.py` compares them; with
`EMBODYRL_ALL_TASKS=1` for all 50 tasks). A step takes about half the time, a reset a tenth to a half. Differences:

- Named look-ups (`data.body("hand")`) are done once: the arrays they return are views that stay valid.
- Orientation matrices become quaternions in plain arithmetic: the formula of `scipy.spatial.transform.Rotation` without
  its dispatch over array libraries.
- Rewards of single numbers are computed without arrays.
- Contacts between fingers and object are found in arrays, not one by one.
- Target sites are not moved after a step, because the `mj_forward` that follows restores their position in the model.
- MetaWorld resets twice, and each time simulates 250 substeps to move the arm to its start. The first reset only has
  to lay out the model, so it simulates nothing; the second restores the cached result of the same model and state.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import mujoco
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.utils import reward_utils
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation  # type: ignore[import-untyped]

from embodyrl.envs.mujoco.physics import is_view
from embodyrl.envs.perturb.kinds import generator, hand_offset, level_of, towards_edge
from embodyrl.envs.types import EpisodeSpec

STATE = mujoco.mjtState.mjSTATE_INTEGRATION
"""The state that decides the rest of the simulation."""

DERIVED = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat"),
    *("subtree_com", "cvel"),
)
"""Positions derived from the state, which a task's reset may read before the next step recomputes them."""

LAYOUT = ("body_pos", "body_quat", "geom_pos", "geom_quat", "eq_data")
"""Parts of the model that tasks change from episode to episode and that affect the physics."""

MOVED = (*LAYOUT, "site_pos")
"""Parts of the model that tasks change from episode to episode."""

TASK = "task."
"""Prefix of the names of a snapshot's arrays that are attributes of the environment."""

HAND_UP = np.array([1, 0, 1, 0])
"""Orientation of the mocap body that pulls the end effector [quaternion, not normalised, as in MetaWorld]."""


def make(task: str) -> Any:
    """Build MetaWorld's environment of `task` with the goal in its observations, ready for `reset`."""
    task_class = ALL_V3_ENVIRONMENTS[task]
    module = importlib.import_module(task_class.__module__)
    if getattr(module, "Rotation", None) is Rotation:
        module.Rotation = QuickRotation  # type: ignore[attr-defined]
    reward_utils.tolerance = quick_tolerance
    env: Any = type(task_class.__name__, (_Driver, task_class), {})()
    # As in MetaWorld's multi-task benchmarks, observations contain the goal. The observation space is cached with the
    # goal hidden and steps clip to it, so it has to be rebuilt.
    env._partially_observable = False
    del env.sawyer_observation_space
    env._set_task_called = True
    # Layouts come from `np_random`, which `reset` seeds, neither frozen nor from numpy's global generator.
    env._freeze_rand_vec = False
    env.seeded_rand_vec = True
    env.limits = env.sawyer_observation_space.low, env.sawyer_observation_space.high
    _lay_out(env, 0)  # after which it has what a task remembers of an episode, so that one can be restored here
    env.remembers = frozenset(_remembered(env))
    return env


def reset(env: Any, start_state: int, perturb: Start | None = None) -> NDArray[np.float64]:
    """Start an episode of a `make` environment laid out by `start_state`; returns the observation `[39]`.

    The same generator is used for both of MetaWorld's resets: with a frozen task, too, both draw the same layout.

    Args:
        env: the environment.
        start_state: decides the layout.
        perturb: where robot and objects begin otherwise; None: nowhere.
    """
    env.curr_path_length = 0
    with nullcontext() if perturb is None else perturb.applied(env):
        return _begin(env, start_state)


def _begin(env: Any, start_state: int) -> NDArray[np.float64]:
    _lay_out(env, start_state)
    mujoco.mj_resetData(env.model, env.data)
    env.np_random = np.random.default_rng(start_state)
    observation: NDArray[np.float64] = env.reset_model()
    env._prev_obs = observation[:18].copy()
    observation[18:36] = env._prev_obs
    _place(env.model, env.data)
    return observation


LAYOUTS = 50
"""Draws of a layout in one reset that are moved; a task draws again while objects are too close to each other, and some
could not be moved apart."""


class Start:
    """Where the robot and the objects of an episode begin otherwise.

    Args:
        episode: whose kinds `robot` and `layout` are followed.
    """

    def __init__(self, episode: EpisodeSpec) -> None:
        self._episode = episode

    @contextmanager
    def applied(self, env: Any) -> Iterator[None]:
        """Let resets of an environment begin so, for the length of a block."""
        own, level = env.hand_init_pos, level_of(self._episode.perturb, "robot")
        if level:
            offset = hand_offset(level, generator(self._episode.seed, "robot"))
            env.hand_init_pos = np.clip(own + offset, env.mocap_low, env.mocap_high)
        if level_of(self._episode.perturb, "layout"):
            env.moved_layout = self._moved
        self._left = {True: LAYOUTS, False: LAYOUTS}
        try:
            yield
        finally:
            env.hand_init_pos = own
            vars(env).pop("moved_layout", None)  # a snapshot has all attributes of its own

    def _moved(self, env: Any, layout: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a layout that is nearer to the edge of those that the task draws."""
        self._left[env.layout_only] -= 1
        if self._left[env.layout_only] < 0:
            return layout
        level, random = level_of(self._episode.perturb, "layout"), generator(self._episode.seed, "layout")
        space = env._random_reset_space
        return towards_edge(level, random, layout, space.low, space.high)


def _lay_out(env: Any, start_state: int) -> None:
    """Lay the model out for `start_state`, without simulating anything."""
    env.np_random = np.random.default_rng(start_state)
    env.layout_only = True
    env.reset_model()
    env.layout_only = False


def snapshot(env: Any) -> dict[str, NDArray[Any]]:
    """Return everything that decides the rest of the running episode: physics, layout, and the task's attributes."""
    layout = {name: array.copy() for name, array in _layout(env).items()}
    return {"physics": env.physics(), **layout, **_remembered(env)}


def restore(env: Any, snapshot: Mapping[str, NDArray[Any]]) -> None:
    """Continue from a `snapshot` of an environment of the same task, whatever was played before. Simulates nothing.

    Raises:
        ValueError: the snapshot does not belong to such an environment.
    """
    want = {name: array.shape for name, array in {"physics": env.physics(), **_layout(env)}.items()}
    if lacking := (want.keys() | env.remembers) - snapshot.keys():
        raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
    for name, shape in want.items():
        if snapshot[name].shape != shape:
            raise ValueError(f"{name} has shape {snapshot[name].shape}, want {shape}")
    for name, array in _layout(env).items():
        array[...] = snapshot[name]
    mujoco.mj_setState(env.model, env.data, snapshot["physics"], STATE)
    mujoco.mj_forward(env.model, env.data)  # poses, which tasks have views of and images show
    mujoco.mj_setState(env.model, env.data, snapshot["physics"], STATE)  # mj_forward changed the solver's warm start
    for name in _remembered(env).keys() - snapshot.keys():
        delattr(env, name.removeprefix(TASK))
    for name in snapshot.keys() - want.keys():
        _remember(env, name.removeprefix(TASK), snapshot[name])


def _layout(env: Any) -> dict[str, NDArray[Any]]:
    """Return the parts of the model that tasks change, as views."""
    return {f"model.{name}": getattr(env.model, name) for name in MOVED}


def _remember(env: Any, name: str, value: NDArray[Any]) -> None:
    """Set an attribute from the copy that `_remembered` made."""
    plain = type(getattr(env, name, None)) in (bool, int, float, list)
    setattr(env, name, None if value.size == 0 else value.tolist() if plain else value.copy()[()])


def _remembered(env: Any) -> dict[str, NDArray[Any]]:
    """Return copies of an environment's numeric attributes, by `task.<name>`; None becomes an empty array.

    Views of MuJoCo's arrays are left out: some tasks keep the position of a body as a goal, which moves along with it.
    """
    arrays = {}
    for name, value in vars(env).items():
        if value is None:
            arrays[TASK + name] = np.empty(0)
        elif isinstance(value, bool | int | float | list | np.generic | np.ndarray) and not is_view(value):
            numbers = np.array(value)
            if numbers.dtype.kind in "biuf" and numbers.size:
                arrays[TASK + name] = numbers
    return arrays


def _place(model: Any, data: Any) -> None:
    """Recompute all poses for images: tasks move bodies in the model at the end of their reset.

    MetaWorld renders them at their old places until the first step, which recomputes the same poses. So only the first
    image changes.
    """
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    mujoco.mj_camlight(model, data)


class _Driver:
    """Replaces the general methods of MetaWorld's base class `SawyerXYZEnv`; those of the tasks stay unchanged."""

    model: Any
    data: Any
    _prev_obs: NDArray[np.float64]
    limits: tuple[NDArray[np.float64], NDArray[np.float64]]
    """Smallest and largest observation `[39]`, to which steps clip."""
    layout_only = False
    """Whether a reset only lays out the model."""
    moved_layout: Callable[[Any, NDArray[np.float64]], NDArray[np.float64]] | None = None
    """Moves the layout that a reset has drawn; None: it stays."""
    remembers: frozenset[str]
    """Names of the arrays of task attributes that every snapshot has."""

    def __init__(self) -> None:
        self._bodies: dict[str, NDArray[np.float64]] = {}
        self._fingers: tuple[NDArray[np.float64], ...] = ()
        self._hand_reset: dict[tuple[Any, ...], tuple[NDArray[np.float64], list[NDArray[np.float64]]]] = {}
        super().__init__()

    def get_body_com(self, body_name: str) -> NDArray[np.float64]:
        """Return the position of a body, as a view `[3]`."""
        if body_name not in self._bodies:
            self._bodies[body_name] = self.data.body(body_name).xpos
        return self._bodies[body_name]

    @property
    def tcp_center(self) -> NDArray[np.float64]:
        """Return the middle between the two fingers `[3]`."""
        if not self._fingers:
            self._fingers = tuple(self.data.site(name).xpos for name in ("rightEndEffector", "leftEndEffector"))
        right, left = self._fingers
        return (right + left) / 2.0

    def touching_object(self, object_geom_id: int) -> bool:
        """Return whether both finger pads press on the object."""
        geoms = self.data.contact.geom  # [contacts, 2]
        held = (geoms == object_geom_id).any(axis=1)
        return all(self._pad_force(geoms, held, pad) > 0 for pad in ("leftpad_geom", "rightpad_geom"))

    def _pad_force(self, geoms: NDArray[np.int32], held: NDArray[np.bool_], pad: str) -> float:
        """Return the sum of the contact forces between one finger pad and the object [N]."""
        if not held.any():
            return 0.0
        contacts = held & (geoms == self.data.geom(pad).id).any(axis=1)
        return float(sum(self.data.efc_force[self.data.contact.efc_address[contacts]].tolist()))

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float64], Any, dict[str, Any]]:
        """Execute `action [4]`, which is within -1 .. 1; returns observation `[39]`, reward and info."""
        env: Any = self
        model, data = self.model, self.data
        target = data.mocap_pos + (action[:3] * env.action_scale)[None]
        target[0] = np.minimum(np.maximum(target[0], env.mocap_low), env.mocap_high)
        data.mocap_pos = target
        data.mocap_quat = HAND_UP
        data.ctrl[:] = (action[3], -action[3])
        mujoco.mj_step(model, data, nstep=env.frame_skip)
        mujoco.mj_forward(model, data)
        env.curr_path_length += 1
        observation = np.empty(39)
        observation[:18] = current = self._get_curr_obs_combined_no_goal()
        observation[18:36] = self._prev_obs
        observation[36:] = env._get_pos_goal()
        self._prev_obs = current
        np.maximum(observation, self.limits[0], out=observation)
        np.minimum(observation, self.limits[1], out=observation)
        reward, info = env.evaluate_state(observation, action)
        return observation, reward, info

    def _get_curr_obs_combined_no_goal(self) -> NDArray[np.float64]:
        """Return end-effector position, gripper opening, and the poses of up to two objects `[18]`."""
        env: Any = self
        current = np.zeros(18)
        current[:3] = self.get_body_com("hand")
        apart = self.get_body_com("rightclaw") - self.get_body_com("leftclaw")
        current[3] = min(math.sqrt(apart.dot(apart)) / 0.1, 1.0)
        positions, quaternions = env._get_pos_objects(), env._get_quat_objects()
        for index in range(len(positions) // 3):
            start = 4 + 7 * index
            current[start : start + 3] = positions[3 * index : 3 * index + 3]
            current[start + 3 : start + 7] = quaternions[4 * index : 4 * index + 4]
        return current

    def _get_state_rand_vec(self) -> NDArray[np.float64]:
        """Draw the layout of an episode: positions of objects and goal."""
        drawn: NDArray[np.float64] = super()._get_state_rand_vec()  # type: ignore[misc]
        if self.moved_layout is not None:
            drawn = self.moved_layout(self, drawn)
            self._last_rand_vec = drawn
        return drawn

    def _reset_hand(self, steps: int = 50) -> None:
        """Move the end effector to its start by simulating `steps`, or by restoring the cached result."""
        env: Any = self
        if self.layout_only:
            env.init_tcp = self.tcp_center
            return
        before = self.physics()
        layout = (getattr(self.model, name).tobytes() for name in LAYOUT)
        key = (steps, np.asarray(env.hand_init_pos).tobytes(), before.tobytes(), *layout)
        if key not in self._hand_reset:
            super()._reset_hand(steps)  # type: ignore[misc]
            self._hand_reset = {key: (self.physics(), [getattr(self.data, name).copy() for name in DERIVED])}
        else:
            state, derived = self._hand_reset[key]
            mujoco.mj_setState(self.model, self.data, state, STATE)
            for name, values in zip(DERIVED, derived, strict=True):
                getattr(self.data, name)[...] = values
        env.init_tcp = self.tcp_center

    def physics(self) -> NDArray[np.float64]:
        """Return the simulation's state, see `STATE`."""
        state = np.empty(mujoco.mj_stateSize(self.model, STATE))
        mujoco.mj_getState(self.model, self.data, state, STATE)
        return state


_tolerance = reward_utils.tolerance


def quick_tolerance(
    x: Any,
    bounds: tuple[float, float] = (0.0, 0.0),
    margin: Any = 0.0,
    sigmoid: str = "gaussian",
    value_at_margin: float = 0.1,
) -> Any:
    """Return what MetaWorld's `tolerance` does: 1 where `x` is within bounds, less with the distance from them. Rewards
    ask for single numbers and long tails, which are computed here without arrays."""
    lower, upper = bounds
    if not isinstance(x, float) or sigmoid != "long_tail" or not lower <= upper or not margin > 0:
        return _tolerance(x, bounds, margin, sigmoid, value_at_margin)  # type: ignore[arg-type]
    if lower <= x <= upper:
        return 1.0
    distance = (float(lower - x) if x < lower else float(x - upper)) / float(margin)
    return 1.0 / ((distance * math.sqrt(1.0 / value_at_margin - 1.0)) ** 2 + 1.0)


class QuickRotation:
    """The part of `scipy.spatial.transform.Rotation` that MetaWorld uses, with the same results."""

    __slots__ = ("_quaternion",)

    def __init__(self, quaternion: NDArray[np.float64]) -> None:
        self._quaternion = quaternion

    @staticmethod
    def from_matrix(matrix: NDArray[np.float64]) -> QuickRotation:
        """Convert a rotation matrix `[3, 3]`."""
        (a, b, c), (d, e, f), (g, h, i) = matrix.tolist()
        lengths = abs(a * a + b * b + c * c - 1), abs(d * d + e * e + f * f - 1), abs(g * g + h * h + i * i - 1)
        angles = abs(a * d + b * e + c * f), abs(a * g + b * h + c * i), abs(d * g + e * h + f * i)
        if not max(*lengths, *angles) < 1e-12:  # scipy makes such a matrix orthogonal first
            return QuickRotation(Rotation.from_matrix(matrix).as_quat())
        trace = a + e + i
        if trace > a and trace > e and trace > i:
            x, y, z, w = h - f, c - g, d - b, 1 + trace
        elif a >= e and a >= i:
            x, y, z, w = 1 - trace + 2 * a, d + b, g + c, h - f
        elif e >= i:
            x, y, z, w = d + b, 1 - trace + 2 * e, h + f, c - g
        else:
            x, y, z, w = g + c, h + f, 1 - trace + 2 * i, d - b
        norm = math.sqrt(x * x + y * y + z * z + w * w)
        return QuickRotation(np.array((x / norm, y / norm, z / norm, w / norm)))

    def as_quat(self) -> NDArray[np.float64]:
        """Return the quaternion `[4]`, scalar last."""
        return self._quaternion
