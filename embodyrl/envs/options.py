"""Options of the built-in simulators (part of the config schema; imports no simulator)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from embodyrl.config.infos import MOST_EPISODE_STEPS
from embodyrl.config.schema import EnvConfig, OfTasks, setting


class Proprio(StrEnum):
    """Contents of the state vector (proprio) of a policy."""

    full = "full"
    robot = "robot"


class SettleGripper(StrEnum):
    """What the gripper does while objects come to rest."""

    open = "open"
    still = "still"


class Driver(StrEnum):
    """Interface to a simulator's package."""

    fast = "fast"
    upstream = "upstream"


class Sim(StrEnum):
    """Device of ManiSkill's physics."""

    cpu = "cpu"
    gpu = "gpu"


class RewardMode(StrEnum):
    """Reward that ManiSkill computes."""

    dense = "dense"
    normalized_dense = "normalized_dense"
    sparse = "sparse"


class RenderQuality(StrEnum):
    """Rendering quality of MuJoCo."""

    full = "full"
    fast = "fast"


@dataclass(frozen=True, kw_only=True)
class MujocoConfig(EnvConfig):
    """Options of all backends on MuJoCo."""

    render_quality: RenderQuality = setting(RenderQuality.full)
    """full: as in the simulator's package. fast: without shadows, reflections and antialiasing, several times faster on
    a CPU; images differ from those that public checkpoints were trained on."""
    driver: Driver = setting(Driver.fast)
    """fast: replaces private parts of the simulator's package by faster ones with the same results; works with the
    package versions it was written for. upstream: uses the package's own interface, for other versions; slower, and
    states are saved by replay."""


@dataclass(frozen=True, kw_only=True)
class MetaWorldConfig(MujocoConfig):
    """MetaWorld."""

    proprio: Proprio = setting(Proprio.full)
    """full: all 39 numbers, with the poses of objects and the goal. robot: end-effector position and gripper opening (4
    numbers); the rest is only in the images."""
    end_at_success: bool = setting(False)
    """End the episode (terminated) as soon as the task is solved."""
    action_repeat: int = setting(1, low=1, high=50)
    """Simulator steps (1/80 s) for which each action is held; rewards add up. `max_episode_steps` counts actions."""
    settle_steps: int = setting(0, low=0, high=100)
    """Simulator steps with an action of zeros before each episode, as some public evaluations make them;
    `max_episode_steps` does not count them."""
    show_goals: bool = setting(True)
    """Render the coloured dots that mark goals. Without them, only the task description gives the goal."""


@dataclass(frozen=True, kw_only=True)
class LiberoConfig(MujocoConfig):
    """LIBERO."""

    image_size: list[int] = setting([256, 256], low=16, high=2048)
    """Height and width of every camera's image [pixels]; public checkpoints are evaluated with 256 x 256."""
    max_episode_steps: int | None = setting(300, low=1, high=MOST_EPISODE_STEPS, of_tasks=OfTasks.note)
    """Control steps after which an episode is cut off (truncated); those of `settle_steps` do not count. Public
    evaluations use 220 for libero_spatial, 280 for libero_object, 300 for libero_goal, 520 for libero_10 and 400 for
    libero_90. null: none."""
    start_states: int = setting(40, low=1, high=50)
    """Number of each task's 50 official start states for training, 0 .. start_states-1; evaluation plays the others."""
    proprio: Proprio = setting(Proprio.robot)
    """robot: position and rotation of the end effector and positions of the fingers (8 numbers), the input of public
    checkpoints. full: also the poses of all objects and the positions of doors and knobs."""
    share_start_states: bool = setting(False)
    """Evaluate on all 50 official start states, those of training included, as public evaluations do."""
    settle_steps: int = setting(10, low=0)
    """Control steps without motion before each episode, in which objects come to rest."""
    settle_gripper: SettleGripper = setting(SettleGripper.open)
    """open: it opens in those steps, as in most public evaluations. still: it stays as it is."""
    end_at_success: bool = setting(True)
    """End the episode (terminated) as soon as the task is solved, as LIBERO does."""
    assets: str | None = setting(None)
    """Folder of LIBERO's meshes and textures. null: $EMBODYRL_LIBERO_ASSETS, else what `make libero` installs, else
    LIBERO's own folder."""
    task_files: str | None = setting(None)
    """Folder with further suites in LIBERO's layout, such as those of LIBERO-Plus: bddl_files/<suite>/<task>.bddl and
    init_files/<suite>/<task>.pruned_init. Their tasks are called <suite>/<task>. null: LIBERO's own tasks alone."""


@dataclass(frozen=True, kw_only=True)
class ManiSkillConfig(EnvConfig):
    """ManiSkill."""

    driver: Driver = setting(Driver.fast)
    """fast: replaces private parts of ManiSkill by faster ones with the same results; works with the version it was
    written for. upstream: uses ManiSkill's own interface, for other versions; slower, and without `sim: gpu`."""
    sim: Sim = setting(Sim.cpu)
    """cpu: PhysX on the CPU, each env separate. gpu: all envs of a process as one batch on an NVIDIA GPU (one process
    per GPU); faster with many envs, but envs can change each other's last digits."""
    control_mode: str = setting("auto")
    """Controller of the robot, by ManiSkill's name; it defines the meaning of actions. auto: pd_joint_delta_pos if the
    task's robot has it, else the robot's default."""
    reward_mode: RewardMode = setting(RewardMode.normalized_dense)
    """Reward of the task. sparse: 1 while its success condition holds (-1 while it reports failure)."""
    proprio: Proprio = setting(Proprio.full)
    """full: ManiSkill's state vector, with the poses of objects and goal. robot: joint positions and velocities and the
    pose of the tool centre point, which a real robot measures."""
    end_at_success: bool = setting(False)
    """End the episode (terminated) as soon as the task is solved."""
    rebuild: bool = setting(False)
    """Build the scene anew for each episode (`sim: cpu`), which then is the same bit for bit whatever was played before
    it. In a scene that is used again it may not be: probably PhysX orders contacts of one moment by what it had
    simulated, and last digits change. Costs about 0.2 s per episode; what a task draws when it is built, such as
    sizes, then depends on the start state."""


@dataclass(frozen=True, kw_only=True)
class GymnasiumConfig(EnvConfig):
    """Any Gymnasium environment, and the families of them that have a name of their own."""

    kwargs: dict[str, Any] = setting({}, of_tasks=OfTasks.fault)
    """Keyword arguments of the environment; any key is legal here."""
    success_return: float | None = setting(None, of_tasks=OfTasks.fault)
    """Least return of a successful episode, compared at its end: the running return of a task with negative rewards
    starts high. null: success is the environment's `info["is_success"]` or `info["success"]` after each step; without
    them there is none."""
    environment_state: str | None = setting(None, of_tasks=OfTasks.fault)
    """Entry of a Dict observation that is the state of the environment and not of the robot, for models that read it
    separately. null: the entry `environment_state`, where there is one."""
    render_quality: RenderQuality = setting(RenderQuality.full)
    """Of cameras of a MuJoCo scene. full: as in the simulator's package. fast: without shadows, reflections and
    antialiasing, several times faster on a CPU."""
