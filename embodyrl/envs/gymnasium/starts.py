"""Resets in which the robot begins in another pose, by the means of its package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.mujoco.scene_changes import driven_joints
from embodyrl.envs.perturb.kinds import generator, joint_offsets


@contextmanager
def of_mujoco(env: Any, seed: int, level: int) -> Iterator[None]:
    """Let Gymnasium's own environments set other angles of the driven joints, within their limits, for a block.

    Args:
        env: a `gymnasium.envs.mujoco.MujocoEnv`.
        seed: of the episode.
        level: of the perturbation, 1 .. 5.
    """
    inner = env.unwrapped
    own, model = inner.set_state, inner.model
    joints = driven_joints(model)
    places, limited = model.jnt_qposadr[joints], model.jnt_limited[joints].astype(bool)
    low, high = np.where(limited[:, None], model.jnt_range[joints], [[-np.inf, np.inf]]).T
    offsets = joint_offsets(level, generator(seed, "robot"), len(joints))

    def set_state(qpos: NDArray[np.float64], qvel: NDArray[np.float64]) -> None:
        moved = np.array(qpos)
        moved[places] = np.clip(moved[places] + offsets, low, high)
        own(moved, qvel)

    inner.set_state = set_state
    try:
        yield
    finally:
        del inner.set_state


@contextmanager
def of_robosuite(env: Any, seed: int, level: int) -> Iterator[None]:
    """Let robosuite's robots begin with other joint angles, for a block; see `of_mujoco`."""
    robots, random = env.unwrapped.robots, generator(seed, "robot")
    own = [np.array(robot.init_qpos) for robot in robots]
    for robot, angles in zip(robots, own, strict=True):
        robot.init_qpos = angles + joint_offsets(level, random, len(angles))
    try:
        yield
    finally:
        for robot, angles in zip(robots, own, strict=True):
            robot.init_qpos = angles
