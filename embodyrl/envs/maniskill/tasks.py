"""ManiSkill's tasks, their assets and task descriptions.

Everything is read from ManiSkill's files, because importing ManiSkill takes seconds.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from embodyrl.config.infos import MOST_EPISODE_STEPS

TASK_DESCRIPTIONS = {
    "AnymalC-Reach-v1": "walk to the goal position",
    "AnymalC-Spin-v1": "spin around on the spot as fast as possible",
    "DrawSVG-v1": "draw the outline on the canvas",
    "DrawTriangle-v1": "draw the triangle on the canvas",
    "FMBAssembly1Easy-v1": "insert the bridge piece into the slots of the board",
    "LiftPegUpright-v1": "lift the peg and stand it upright",
    "MS-AntRun-v1": "run forward",
    "MS-AntWalk-v1": "walk forward",
    "MS-CartpoleBalance-v1": "keep the pole upright",
    "MS-CartpoleSwingUp-v1": "swing the pole up and keep it upright",
    "MS-HopperHop-v1": "hop forward",
    "MS-HopperStand-v1": "stand upright",
    "MS-HumanoidRun-v1": "run forward",
    "MS-HumanoidStand-v1": "stand upright",
    "MS-HumanoidWalk-v1": "walk forward",
    "PegInsertionSide-v1": "insert the peg into the hole in the side of the box",
    "PickCube-v1": "pick up the cube and hold it at the goal position",
    "PickCubeSO100-v1": "pick up the cube and hold it at the goal position",
    "PickCubeWidowXAI-v1": "pick up the cube and hold it at the goal position",
    "PlaceSphere-v1": "place the sphere in the bin",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "PokeCube-v1": "poke the cube with the peg to the goal position",
    "PullCube-v1": "pull the cube to the goal region",
    "PullCubeTool-v1": "pull the cube closer with the tool",
    "PushCube-v1": "push the cube to the goal region",
    "PushT-v1": "push the T-shaped block to the goal pose",
    "RollBall-v1": "roll the ball to the goal region",
    "RotateSingleObjectInHandLevel0-v1": "rotate the object in the hand",
    "RotateSingleObjectInHandLevel1-v1": "rotate the object in the hand",
    "RotateValveLevel0-v1": "rotate the valve",
    "RotateValveLevel1-v1": "rotate the valve",
    "RotateValveLevel2-v1": "rotate the valve",
    "RotateValveLevel3-v1": "rotate the valve",
    "RotateValveLevel4-v1": "rotate the valve",
    "SO100GraspCube-v1": "grasp the cube and lift it",
    "StackCube-v1": "stack the red cube on the green cube",
    "StackPyramid-v1": "put two cubes side by side and stack the third on top",
    "TableTopFreeDraw-v1": "draw on the canvas",
    "TriFingerRotateCubeLevel0-v1": "rotate the cube to the goal orientation",
    "TriFingerRotateCubeLevel1-v1": "move the cube to the goal position on the table",
    "TriFingerRotateCubeLevel2-v1": "lift the cube to the goal position",
    "TriFingerRotateCubeLevel3-v1": "lift the cube to the goal position",
    "TriFingerRotateCubeLevel4-v1": "move the cube to the goal pose",
    "TwoRobotPickCube-v1": "pick up the cube and pass it to the other robot",
    "TwoRobotStackCube-v1": "stack the cubes in the goal region together",
    "UnitreeG1PlaceAppleInBowl-v1": "place the apple in the bowl",
    "UnitreeG1Stand-v1": "stand upright",
    "UnitreeG1TransportBox-v1": "carry the box to the other table",
    "UnitreeH1Stand-v1": "stand upright",
}
"""Task -> task description, for the tasks whose files come with ManiSkill."""

DRIVER_REMEDY = (
    "install a Vulkan driver that can: NVIDIA's, or Mesa's lavapipe 24.3 or newer (Debian 12: apt install -t "
    "bookworm-backports mesa-vulkan-drivers libvulkan1)"
)
"""Remedy where nothing renders."""

SEVERAL_ROBOTS = ("TwoRobotPickCube-v1", "TwoRobotStackCube-v1")
"""Tasks of ManiSkill with more than one robot, which are not supported."""

TWIN_ASSETS = "bridge_v2_real2sim"
"""Asset of the tasks that are twins of real scenes."""

ROBOT_ASSETS = {TWIN_ASSETS: "widowx250s"}
"""Asset -> the robot that its tasks use, which their registration does not name."""


def task_description(task: str) -> str:
    """Return the task description of `task`: a written one, or the words of its name."""
    words = re.sub(r"^MS-|-v\d+$", "", task)
    return TASK_DESCRIPTIONS.get(task, re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-_]", " ", words).lower())


def known_tasks() -> list[str]:
    """Return all tasks: those of ManiSkill's own files, and those that a plug-in registered in this process."""
    registration = sys.modules.get("mani_skill.utils.registration")
    return sorted({*_registered(), *(registration.REGISTERED_ENVS if registration else ())})


def limit_of(task: str) -> int | None:
    """Return the time limit that `task` is registered with [control steps], `MOST_EPISODE_STEPS` if with none; None if
    that is unknown before ManiSkill is imported."""
    registration = sys.modules.get("mani_skill.utils.registration")
    if registration and task in registration.REGISTERED_ENVS:
        return registration.REGISTERED_ENVS[task].max_episode_steps or MOST_EPISODE_STEPS
    return _registered()[task].max_episode_steps if task in _registered() else None


def assets_of(task: str) -> list[str]:
    """Return the names of the downloads that `task` needs; an unknown task needs none."""
    names = _registered()[task].assets if task in _registered() else []
    return names + [ROBOT_ASSETS[name] for name in names if name in ROBOT_ASSETS]


def missing_assets(task: str) -> list[str]:
    """Return the downloads that `task` needs and this machine lacks, as far as ManiSkill's files show."""
    places = _asset_places()
    return [name for name in assets_of(task) if name in places and not (asset_folder() / places[name]).exists()]


def asset_folder() -> Path:
    """Return ManiSkill's folder of downloads."""
    return Path(os.environ.get("MS_ASSET_DIR", str(Path.home() / ".maniskill"))) / "data"


def assets_missing(task: str, names: list[str]) -> tuple[str, str]:
    """Return message and remedy for missing downloads, with the commands that fetch them."""
    commands = [f"python -m mani_skill.utils.download_asset {name}" for name in names or [task]]
    what = f" ({', '.join(names)})" if names else ""
    return f"the assets{what} of the ManiSkill task {task!r} are not on this machine", " && ".join(commands)


class _Registration(NamedTuple):
    """What a decorator in ManiSkill's files says of a task."""

    assets: list[str]
    """`asset_download_ids`"""
    max_episode_steps: int | None
    """None: it does not say so literally."""


@cache
def _registered() -> dict[str, _Registration]:
    """Task -> what it is registered with, from the decorators in ManiSkill's files."""
    found: dict[str, _Registration] = {}
    for path in sorted((_package() / "envs/tasks").rglob("*.py")):
        text = path.read_text()
        if "@register_env" in text:
            found.update(_decorated(ast.parse(text)))
    return found


def _decorated(module: ast.Module) -> Iterator[tuple[str, _Registration]]:
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "register_env":
                    assets = _literal_keyword(call, "asset_download_ids") or []
                    limit = _literal_keyword(call, "max_episode_steps")
                    yield ast.literal_eval(call.args[0]), _Registration(assets, limit)


@cache
def _asset_places() -> dict[str, str]:
    """Download -> its folder below `asset_folder()`, for those that ManiSkill's file names literally."""
    places = {}
    for node in ast.walk(ast.parse((_package() / "utils/assets/data.py").read_text())):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            (target,) = node.targets
            place = _literal_keyword(node.value, "target_path")
            if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and place is not None:
                places[str(target.slice.value)] = place
    return places


def _literal_keyword(call: ast.Call, name: str) -> Any:
    """Return the value of a keyword argument that is a literal, else None."""
    for keyword in call.keywords:
        if keyword.arg == name:
            try:
                return ast.literal_eval(keyword.value)
            except ValueError:
                return None
    return None


def _package() -> Path:
    """Return ManiSkill's folder, without importing it."""
    spec = importlib.util.find_spec("mani_skill")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
