"""Packages of Gymnasium environments that have a name of their own in `env.name`, and what is known of each.

One table for all of them: which module registers the ids, what installs it, which task descriptions its tasks have and
how it reports success. A package needs code of its own only where its environments cannot be used as they are; that is
in `adapters`. Importing this module imports no simulator.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodyrl.registry import Function, Requirement, load_target

SUCCESS_KEYS = ("is_success", "success", "succeed")
"""Names under which environments report success, the first that is there counts."""


def reported(info: Mapping[str, Any]) -> Any:
    """Return what a step's info reports as success; None without any of `SUCCESS_KEYS`."""
    return next((info[key] for key in SUCCESS_KEYS if key in info), None)


def completed(info: Mapping[str, Any]) -> Any:
    """Return whether a kitchen has no subtask left, each completed at some time of the episode; elsewhere what is
    reported."""
    return not info["tasks_to_complete"] if "tasks_to_complete" in info else reported(info)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One package of environments."""

    summary: str
    """One line for `embodyrl list simulators`."""
    requires: tuple[Requirement, ...]
    """What it needs."""
    modules: tuple[str, ...]
    """Modules to import, which register the ids; `module:function` is called."""
    ids: str = ""
    """Pattern of the ids in Gymnasium's registry that belong to it."""
    tasks: Function | None = None
    """`module:function` that returns its task names, where these are not ids of Gymnasium."""
    make: Function | None = None
    """`module:function` that makes an environment from a task and `env.kwargs`; None: `gymnasium.make` does."""
    descriptions: Mapping[str, str] = field(default_factory=dict)
    """Task descriptions, by task without its version and without the name of its reward."""
    success: Callable[[Mapping[str, Any]], Any] = reported
    """How a step's info tells success; None: it does not."""
    time_limit: int | None = None
    """Control steps after which its package ends episodes; None: what its ids are registered with."""
    start: Function | None = None
    """`module:function` that lets a reset begin with the robot in another pose, see `starts`; None: there is no way."""
    on_mujoco: bool = True
    """Whether MuJoCo simulates it, so that states are snapshots; else they are replayed."""

    def has_id(self, task: str) -> bool:
        """Return whether `task` is an id of Gymnasium that belongs to it, without importing anything."""
        return self.tasks is None and re.fullmatch(self.ids, task) is not None

    def known_tasks(self) -> list[str]:
        """Import the package and return all task names, sorted."""
        self.load()
        return self.names()

    def names(self) -> list[str]:
        """Return all task names, sorted; imports the package only where nothing else knows them."""
        if self.tasks is not None:
            return sorted(load_target(self.tasks)())
        self.load()
        import gymnasium

        return sorted(name for name in gymnasium.registry if self.has_id(name))

    def load(self) -> None:
        """Import the package, so that its ids are registered."""
        for module in self.modules:
            if ":" in module:
                load_target(module)()
            else:
                importlib.import_module(module)


MUJOCO = "embodyrl.envs.mujoco.rendering:import_mujoco"
"""Imports MuJoCo without OpenGL, which the first image loads; before anything else imports it."""


def _extra(name: str, *modules: str) -> tuple[Requirement, ...]:
    return tuple(Requirement(module=module, install=f"pip install 'embodyrl[{name}]'") for module in modules)


def _without_dependencies(extra: str, package: str, *modules: str) -> tuple[Requirement, ...]:
    """Return the requirements of a package that is installed without its own, see pyproject.toml."""
    command = f"make simulators   (or: pip install 'embodyrl[{extra}]', and then pip install --no-deps {package})"
    return tuple(Requirement(module=module, install=command) for module in modules)


FAMILIES: dict[str, Family] = {
    "mujoco": Family(
        summary="MuJoCo locomotion and control of Gymnasium (v5): HalfCheetah, Ant, Humanoid, Reacher, ...",
        requires=_extra("mujoco", "mujoco", "imageio"),
        modules=(MUJOCO, "gymnasium.envs.mujoco"),
        start="embodyrl.envs.gymnasium.starts:of_mujoco",
        ids="(Ant|HalfCheetah|Hopper|Humanoid|HumanoidStandup|InvertedPendulum|InvertedDoublePendulum|Reacher"
        "|Swimmer|Walker2d)-v[45]|Pusher-v5",  # Pusher-v4 needs MuJoCo 2
        descriptions={
            "Ant": "walk forward on four legs",
            "HalfCheetah": "run forward",
            "Hopper": "hop forward on one leg",
            "Humanoid": "walk forward on two legs",
            "HumanoidStandup": "stand up",
            "InvertedPendulum": "balance the pole on the cart",
            "InvertedDoublePendulum": "balance the two poles on the cart",
            "Pusher": "push the cylinder to the goal",
            "Reacher": "move the fingertip to the target",
            "Swimmer": "swim forward",
            "Walker2d": "walk forward on two legs",
        },
    ),
    "pusht": Family(
        summary="gym-pusht: push a T-shaped block onto its mark with a round finger (pymunk)",
        requires=_without_dependencies("pusht", "gym-pusht==0.1.8", "gym_pusht", "pymunk"),
        modules=("gym_pusht",),
        ids="gym_pusht/.*",
        descriptions={"gym_pusht/PushT": "push the T-shaped block onto the green T"},
        on_mujoco=False,
    ),
    "robotics": Family(
        summary="gymnasium-robotics: Fetch arm, Adroit and Shadow hands, Franka kitchen, mazes (MuJoCo)",
        requires=_extra("robotics", "gymnasium_robotics"),
        modules=("embodyrl.envs.gymnasium.adapters.robotics:load",),
        ids=r"Fetch\w+-v[34]|AdroitHand\w+-v\d|FrankaKitchen-v\d|Hand(Reach|Manipulate)\w*-v[13]"
        r"|(PointMaze|AntMaze)_\w+-v[345]",
        descriptions={
            "FetchReach": "move the gripper to the target",
            "FetchPush": "push the block to the target",
            "FetchSlide": "hit the puck so that it slides to the target",
            "FetchPickAndPlace": "pick up the block and move it to the target",
            "AdroitHandDoor": "turn the latch and open the door",
            "AdroitHandHammer": "pick up the hammer and drive the nail into the board",
            "AdroitHandPen": "turn the pen in the hand to the target orientation",
            "AdroitHandRelocate": "pick up the ball and move it to the target",
            "HandReach": "move the fingertips to their targets",
            "FrankaKitchen": "complete the tasks of the kitchen",
        },
        success=completed,
    ),
    "aloha": Family(
        summary="gym-aloha: two ViperX arms that hand over a cube or insert a peg (dm_control, MuJoCo)",
        requires=_extra("aloha", "gym_aloha", "dm_control"),
        modules=("embodyrl.envs.gymnasium.adapters.aloha:load",),
        tasks="embodyrl.envs.gymnasium.adapters.aloha:known_tasks",
        make="embodyrl.envs.gymnasium.adapters.aloha:make",
        descriptions={
            "gym_aloha/AlohaTransferCube": "pick up the cube with the right arm and transfer it to the left arm",
            "gym_aloha/AlohaInsertion": "insert the peg into the socket",
        },
    ),
    "hil": Family(
        summary="gym-hil: a Panda arm picks up a cube or arranges boxes (MuJoCo)",
        requires=_without_dependencies("hil", "gym-hil==0.1.14", "gym_hil", "mujoco"),
        modules=(MUJOCO, "gym_hil"),
        tasks="embodyrl.envs.gymnasium.adapters.hil:known_tasks",
        make="embodyrl.envs.gymnasium.adapters.hil:make",
        descriptions={
            "gym_hil/PandaPickCube": "pick up the cube",
            "gym_hil/PandaArrangeBoxes": "push every box onto the target of its colour",
        },
    ),
    "dm_control": Family(
        summary="dm_control suite: cartpole-swingup, walker-run, ball_in_cup-catch, ... (MuJoCo)",
        requires=_extra("dm-control", "dm_control"),
        modules=("embodyrl.envs.gymnasium.adapters.control:load",),
        tasks="embodyrl.envs.gymnasium.adapters.control:known_tasks",
        make="embodyrl.envs.gymnasium.adapters.control:make",
        time_limit=1000,
        descriptions={
            "ball_in_cup-catch": "swing the ball into the cup",
            "cartpole-balance": "balance the pole on the cart",
            "cartpole-swingup": "swing the pole up and balance it on the cart",
            "cheetah-run": "run forward",
            "finger-spin": "spin the body with the finger",
            "hopper-hop": "hop forward on one leg",
            "hopper-stand": "stand on one leg",
            "humanoid-run": "run forward on two legs",
            "humanoid-stand": "stand on two legs",
            "humanoid-walk": "walk forward on two legs",
            "pendulum-swingup": "swing the pendulum up",
            "point_mass-easy": "move the point to the target",
            "reacher-easy": "move the fingertip to the target",
            "reacher-hard": "move the fingertip to the target",
            "walker-run": "run forward on two legs",
            "walker-stand": "stand on two legs",
            "walker-walk": "walk forward on two legs",
        },
    ),
    "robosuite": Family(
        summary="robosuite 1.4: Lift, Stack, Can, Square, Door, and tasks of two Panda arms (MuJoCo)",
        requires=_without_dependencies("robosuite", "robosuite==1.4.0", "robosuite", "mujoco"),
        modules=("embodyrl.envs.gymnasium.adapters.robosuite:load", "embodyrl.envs.libero.driver:load_kernels"),
        tasks="embodyrl.envs.gymnasium.adapters.robosuite:known_tasks",
        make="embodyrl.envs.gymnasium.adapters.robosuite:make",
        start="embodyrl.envs.gymnasium.starts:of_robosuite",
        time_limit=1000,
        descriptions={
            "Lift": "lift the cube",
            "Stack": "put the red cube onto the green cube",
            "PickPlaceCan": "pick up the can and place it in its bin",
            "NutAssemblySquare": "put the square nut onto the square peg",
            "Door": "turn the handle and open the door",
            "TwoArmLift": "lift the pot with both arms",
            "TwoArmHandover": "pick up the hammer and hand it to the other arm",
            "TwoArmPegInHole": "put the peg into the hole",
        },
    ),
}


OWN_PACKAGES = {
    "box2d": Requirement(module="Box2D", install="pip install 'gymnasium[box2d]'"),
    "mujoco": _extra("mujoco", "mujoco")[0],
    "phys2d": Requirement(module="jax", install="pip install 'gymnasium[jax]'"),
    "tabular": Requirement(module="jax", install="pip install 'gymnasium[jax]'"),
}
"""What folders of Gymnasium's own environments need beside Gymnasium; the others need nothing."""


def family(simulator: str) -> Family | None:
    """Return the family of this `env.name`; None for `gymnasium` itself."""
    return FAMILIES.get(simulator)


_ENDING = re.compile(r"(Dense|Sparse)?(-v\d+)?$")


def task_description(task: str) -> str:
    """Return the task description of a task: that of its family, else the words of its name."""
    bare = _ENDING.sub("", task)
    for known in FAMILIES.values():
        if bare in known.descriptions:
            return known.descriptions[bare]
    return f"control {bare.rsplit('/')[-1]}"
