"""robosuite's tasks behind Gymnasium's interface (version 1.4, which LIBERO uses too).

The scene is built once and not at every reset, which takes a second; positions of robots and objects are drawn at every
reset, from the seed instead of numpy's global generator. Sizes that robosuite draws when it builds a scene (those of
Lift's cube, by a tenth) are therefore the same in all episodes. Images come from the cameras of the scene, upright.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodyrl.envs.gymnasium.adapters.hil import global_numbers
from embodyrl.envs.libero import driver
from embodyrl.envs.mujoco import rendering
from embodyrl.errors import UserError

TASKS = {
    "Lift": ["Panda"],
    "Stack": ["Panda"],
    "PickPlaceCan": ["Panda"],
    "NutAssemblySquare": ["Panda"],
    "Door": ["Panda"],
    "TwoArmLift": ["Panda", "Panda"],
    "TwoArmHandover": ["Panda", "Panda"],
    "TwoArmPegInHole": ["Panda", "Panda"],
}
"""Task -> its robots, unless `env.kwargs.robots` names others."""
ROBOT_KEYS = ("eef_pos", "eef_quat", "gripper_qpos")
"""What a policy reads of each robot: position [m] and quaternion of the end effector, positions of the fingers."""
PLACEMENT_ATTEMPTS = 1000
"""Most attempts to draw a layout without collisions."""


def load() -> None:
    """Import robosuite without OpenGL, log files and warnings."""
    rendering.import_mujoco()
    driver.quiet_robosuite()
    with driver.importing_robosuite("disable"):
        importlib.import_module("robosuite")


def known_tasks() -> list[str]:
    """Return the names of the tasks, robosuite's own."""
    return list(TASKS)


def make(task: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Make a task, see `Robosuite`."""
    return Robosuite(task, **kwargs)


class Robosuite(gymnasium.Env[Any, Any]):
    """One environment of robosuite.

    Args:
        task: robosuite's name of it.
        robots: its robots.
        controller: name of the robots' controller; `OSC_POSE`: displacements of the end effector, 5 cm and 0.5 rad
            at 1.
        dense: whether the reward is shaped; else it is 1 on success.
        proprio: `full`: end effectors, fingers and objects; `robot`: without objects.
        end_at_success: whether success ends the episode.
        kwargs: further arguments of the environment's class.

    Raises:
        UserError: `proprio` is neither `full` nor `robot`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    film_camera = "frontview"
    hidden_groups = (0,)
    """Groups of shapes that images leave out: those of collisions."""

    def __init__(
        self,
        task: str,
        *,
        robots: list[str] | None = None,
        controller: str = "OSC_POSE",
        dense: bool = True,
        proprio: str = "full",
        end_at_success: bool = False,
        **kwargs: Any,
    ) -> None:
        if proprio not in ("full", "robot"):
            raise UserError(f"env.kwargs.proprio must be full or robot; got {proprio!r}")
        robosuite: Any = importlib.import_module("robosuite")
        self._failed = importlib.import_module("robosuite.utils.errors").RandomizationError
        self._end_at_success = end_at_success
        with global_numbers(0):
            self._inner = robosuite.make(
                task,
                robots=robots or TASKS[task],
                controller_configs=robosuite.load_controller_config(default_controller=controller),
                reward_shaping=dense,
                has_renderer=False,
                has_offscreen_renderer=False,
                use_camera_obs=False,
                hard_reset=False,
                ignore_done=True,
                **kwargs,
            )
        self.dt = float(self._inner.control_timestep)
        """Simulated time of a step [s]."""
        seen = self._inner._get_observations(force_update=True)
        number = len(self._inner.robots)
        keys = [f"robot{robot}_{key}" for robot in range(number) for key in ROBOT_KEYS]
        keys = [key for key in keys if key in seen] + ["object-state"] * (proprio == "full")
        self.observation_space = spaces.Dict(
            {key: spaces.Box(-np.inf, np.inf, np.shape(seen[key]), np.float64) for key in keys}
        )
        low, high = self._inner.action_spec
        self.action_space = spaces.Box(low.astype(np.float32), high.astype(np.float32))

    @property
    def robots(self) -> Any:
        """The robots of robosuite, whose `init_qpos` is where they begin."""
        return self._inner.robots

    @property
    def model(self) -> Any:
        """The `mujoco.MjModel`."""
        return self._inner.sim.model._model

    @property
    def data(self) -> Any:
        """The `mujoco.MjData`."""
        return self._inner.sim.data._data

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode whose layout `seed` decides; a layout with collisions is drawn anew."""
        super().reset(seed=seed)
        with global_numbers(seed):
            for _ in range(PLACEMENT_ATTEMPTS):
                with contextlib.suppress(self._failed):
                    seen = self._inner.reset()
                    break
            else:
                raise RuntimeError(f"robosuite found no layout without collisions in {PLACEMENT_ATTEMPTS} attempts")
        for robot in self._inner.robots:  # robosuite lets grippers continue from where they were
            for gripper in robot.gripper.values() if isinstance(robot.gripper, dict) else [robot.gripper]:
                gripper.current_action = np.zeros(gripper.dof)
        return self._observed(seen), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute an action."""
        seen, reward, _, _ = self._inner.step(np.asarray(action, np.float64))
        solved = bool(self._inner._check_success())
        return self._observed(seen), float(reward), solved and self._end_at_success, False, {"is_success": solved}

    def _observed(self, seen: Any) -> dict[str, Any]:
        return {key: np.array(seen[key], np.float64) for key in self.observation_space.spaces}  # type: ignore[attr-defined]
