"""Options of the built-in simulators (part of the config schema; imports no simulator)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from embodyrl.config.schema import EnvConfig, OfTasks, setting


class Proprio(StrEnum):
    """Which numbers a policy is given beside images."""

    full = "full"
    robot = "robot"


class Driver(StrEnum):
    """What stands between a simulator's package and its slots."""

    fast = "fast"
    upstream = "upstream"


class Sim(StrEnum):
    """Where ManiSkill computes the physics."""

    cpu = "cpu"
    gpu = "gpu"


class RewardMode(StrEnum):
    """Which reward ManiSkill computes."""

    dense = "dense"
    normalized_dense = "normalized_dense"
    sparse = "sparse"


class RenderQuality(StrEnum):
    """How MuJoCo draws images."""

    full = "full"
    fast = "fast"


@dataclass(frozen=True, kw_only=True)
class MujocoConfig(EnvConfig):
    """What all backends on MuJoCo share."""

    render_quality: RenderQuality = setting(RenderQuality.full)
    """full: as the simulator's authors draw it. fast: without shadows, reflections and smoothed edges, several times
    faster on a CPU; images differ from those that public checkpoints were trained on."""
    driver: Driver = setting(Driver.fast)
    """fast: replaces private parts of the simulator's package by quicker ones with the same results, so it fits the
    versions of the package that it was written for. upstream: uses the package's own interface, for versions that it
    does not fit; slower, and states are saved by replay."""


@dataclass(frozen=True, kw_only=True)
class MetaWorldConfig(MujocoConfig):
    """MetaWorld."""

    proprio: Proprio = setting(Proprio.full)
    """full: all 39 numbers, poses of the objects and the goal included. robot: hand position and gripper opening (4
    numbers), the rest has to be seen."""
    end_at_success: bool = setting(False)
    """End the episode (terminated) as soon as the task is solved."""
    action_repeat: int = setting(1, low=1, high=50)
    """Simulator steps (1/80 s) that each action is held for; rewards add up. `max_episode_steps` counts actions."""
    show_goals: bool = setting(True)
    """Draw the coloured dots that mark goals. Without them, what is to be done is in the task description alone."""


@dataclass(frozen=True, kw_only=True)
class LiberoConfig(MujocoConfig):
    """LIBERO."""

    image_size: list[int] = setting([256, 256], low=16, high=2048)
    """Height and width of every camera's image [pixels]; 256 x 256 is what public checkpoints are evaluated with."""
    max_episode_steps: int = setting(300, low=1, of_tasks=OfTasks.note)
    """Control steps after which an episode is cut off (truncated); those of `settle_steps` do not count. Public
    evaluations use 220 for libero_spatial, 280 for libero_object, 300 for libero_goal, 520 for libero_10 and 400 for
    libero_90."""
    start_states: int = setting(40, low=1, high=50)
    """Training draws official start states 0 .. start_states-1 of the 50 that each task has; evaluation plays the
    others."""
    proprio: Proprio = setting(Proprio.robot)
    """robot: position and rotation of the hand and positions of the fingers (8 numbers), as public checkpoints take
    them. full: the poses of all objects and the positions of doors and knobs as well."""
    share_start_states: bool = setting(False)
    """Evaluation plays all 50 official start states, those of training among them, as public evaluations do."""
    settle_steps: int = setting(10, low=0)
    """Control steps without motion and with an open gripper before each episode, in which objects come to rest."""
    end_at_success: bool = setting(True)
    """End the episode (terminated) as soon as the task is solved, as LIBERO does."""
    assets: str | None = setting(None)
    """Folder of LIBERO's meshes and textures, which are not in its package. null: $EMBODYRL_LIBERO_ASSETS, else where
    LIBERO itself keeps them."""


@dataclass(frozen=True, kw_only=True)
class ManiSkillConfig(EnvConfig):
    """ManiSkill."""

    sim: Sim = setting(Sim.cpu)
    """cpu: PhysX on the CPU, each slot an environment of its own. gpu: all slots of a process as one batch on an NVIDIA
    GPU (one process per GPU); faster with many slots, but what one slot does can change another's last digits."""
    control_mode: str = setting("auto")
    """Controller of the robot, as ManiSkill names it; it defines what an action means. auto: pd_joint_delta_pos where
    the task's robot has it, else the robot's own."""
    reward_mode: RewardMode = setting(RewardMode.normalized_dense)
    """Reward that the task computes. sparse: 1 while its success condition holds (minus 1 while it reports failure)."""
    proprio: Proprio = setting(Proprio.full)
    """full: ManiSkill's state vector, poses of objects and goal included. robot: joint positions and velocities and the
    pose of the tool centre point, as a real robot measures them."""
    end_at_success: bool = setting(False)
    """End the episode (terminated) as soon as the task is solved."""


@dataclass(frozen=True, kw_only=True)
class GymnasiumConfig(EnvConfig):
    """Any Gymnasium environment."""

    kwargs: dict[str, Any] = setting({}, of_tasks=OfTasks.fault)
    """Keyword arguments for `gymnasium.make`; any key is legal here."""
    success_return: float | None = setting(None, of_tasks=OfTasks.fault)
    """An episode is a success if its return is at least this when it ends. Judged at the end and not before, because
    the running return of a task with negative rewards starts high. null: success after each step is what the
    environment's `info["is_success"]` or `info["success"]` says; without them there is none."""
