"""gym-aloha's two bimanual tasks, from joint positions instead of its three images in every step.

gym-aloha renders 480 x 640 images from three cameras in each step, whatever is asked for (0.4 s on a CPU), and declares
that actions lie in -1 .. 1, although its joint targets go further: the elbow starts at 1.16 rad. Here its tasks,
physics and rewards are used as they are, images come from the cameras of the scene, and the range of actions is that of
the actuators.
"""

from __future__ import annotations

import importlib
import math
from collections import OrderedDict
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodyrl.envs.gymnasium.adapters.control import ControlEnv
from embodyrl.envs.mujoco import rendering
from embodyrl.errors import UserError

TASKS = {
    "gym_aloha/AlohaTransferCube-v0": ("TransferCubeTask", "bimanual_viperx_transfer_cube.xml"),
    "gym_aloha/AlohaInsertion-v0": ("InsertionTask", "bimanual_viperx_insertion.xml"),
}
"""Id -> class of the task, and the file of its scene."""
PROPRIO = ("full", "robot")
LEFT_FINGERS, RIGHT_FINGERS = (6, 7), (14, 15)
"""Actuators of the fingers, which one number per arm commands."""
SOLVED = 4.0
"""Reward of a solved task."""


def load() -> None:
    """Import gym-aloha and dm_control without OpenGL."""
    rendering.import_mujoco()
    with rendering.environment(MUJOCO_GL="disable"):
        importlib.import_module("gym_aloha.env")


def known_tasks() -> list[str]:
    """Return the ids of both tasks."""
    return list(TASKS)


def make(task: str, *, proprio: str = "full") -> gymnasium.Env[Any, Any]:
    """Make one of the tasks.

    Args:
        task: its id.
        proprio: `robot`: the 14 joint and gripper positions, as in public datasets; `full`: also their speeds and the
            poses of the objects.
    """
    if proprio not in PROPRIO:
        raise UserError(f"env.kwargs.proprio of {task} must be one of {', '.join(PROPRIO)}; got {proprio!r}")
    sim, utils = (importlib.import_module(f"gym_aloha.{name}") for name in ("tasks.sim", "utils"))
    constants = importlib.import_module("gym_aloha.constants")
    control = importlib.import_module("dm_control.rl.control")
    physics_class = importlib.import_module("dm_control.mujoco").Physics
    name, scene = TASKS[task]

    class Task(getattr(sim, name)):  # type: ignore[misc]
        """The package's task, which renders nothing."""

        def get_observation(self, physics: Any) -> OrderedDict[str, Any]:
            """Return positions, and with `full` speeds and the poses of the objects."""
            seen = OrderedDict(agent_pos=self.get_qpos(physics))
            if proprio == "full":
                seen.update(agent_vel=self.get_qvel(physics), environment_state=self.get_env_state(physics))
            return seen

    def place_objects(seed: int) -> None:
        """Write the poses of the objects where the package's tasks read them from."""
        drawn = utils.sample_box_pose(seed) if name == "TransferCubeTask" else utils.sample_insertion_pose(seed)
        sim.BOX_POSE[0] = np.concatenate(np.atleast_2d(drawn))

    place_objects(0)
    physics = physics_class.from_xml_path(str(constants.ASSETS_DIR / scene))
    environment = control.Environment(physics, Task(), math.inf, control_timestep=constants.DT)
    return ControlEnv(
        environment,
        actions=_actions(physics.model.ptr),
        film_camera="angle",
        before_reset=place_objects,
        solved=lambda reward: reward == SOLVED,
    )


def _actions(model: Any) -> spaces.Box:
    """Return the range of joint targets [rad] of both arms, each followed by its gripper (0 closed, 1 open)."""
    low, high = np.array(model.actuator_ctrlrange, np.float32).T
    for first, _ in (LEFT_FINGERS, RIGHT_FINGERS):
        low[first], high[first] = 0.0, 1.0
    kept = np.setdiff1d(np.arange(len(low)), [second for _, second in (LEFT_FINGERS, RIGHT_FINGERS)])
    return spaces.Box(low[kept], high[kept])
