"""What is known of LIBERO without importing it: what configs may ask for, and what this machine lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.envs.libero import assets, pro
from embodyrl.envs.libero.task_files import SCENES, STATES, Files, files_of, further_tasks, root_of, tasks_in
from embodyrl.envs.libero.tasks import (
    ACTION_DIM,
    CAMERAS,
    CONTROL_FREQUENCY,
    OFFICIAL_STATES,
    ROBOT_STATE,
    known_tasks,
    official_state,
    package,
    read_states,
    task_description,
)
from embodyrl.envs.mujoco.info import MuJoCoInfo
from embodyrl.envs.options import Driver, LiberoConfig, Proprio, RenderQuality
from embodyrl.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from embodyrl.config.schema import Config

ARENAS = frozenset({"table", "kitchen_table", "living_room_table", "study_table", "coffee_table", "floor"})
"""Fixtures that are part of a scene and no objects."""

BELOW = ("libero/libero", "libero")
"""Where LIBERO's layout is in a source repository that `env.task_files` names instead."""


class LiberoInfo(MuJoCoInfo[LiberoConfig]):
    """Tasks and sizes of LIBERO, its downloads, and faults of configs."""

    def tasks(self) -> list[str]:
        """Return all task names, suite by suite."""
        return known_tasks()

    def further_tasks(self, env: LiberoConfig) -> dict[str, str] | None:
        """Return the tasks in `env.task_files` and their task descriptions; None if it is not on this machine."""
        return further_tasks(env)

    def task_description(self, task: str) -> str:
        """Return the task description that public checkpoints were trained with."""
        return task_description(task)

    def cameras(self) -> list[str]:
        """Return all camera names; every task has the same."""
        return list(CAMERAS)

    def state_dim(self, env: LiberoConfig) -> int | None:
        """Return the size of the state with end effector and fingers; None with all poses, where it depends on the
        task."""
        return ROBOT_STATE if env.proprio is Proprio.robot else None

    def action_dim(self, env: LiberoConfig) -> int:
        """Return the size of an action (D)."""
        return ACTION_DIM

    def control_frequency(self, env: LiberoConfig) -> float:
        """Return the control steps per second [Hz]."""
        return CONTROL_FREQUENCY

    def initial_state(self, start_state: int, env: LiberoConfig) -> int:
        """Return the number of the official start state, 0 .. 49."""
        return official_state(start_state, env)

    def perturbations(self, env: LiberoConfig) -> list[str]:
        """Return the kinds of perturbation that it can do: all; without the fast driver those of images and words."""
        if env.driver is Driver.upstream:
            return list(super().perturbations(env))
        return [*self._shown(env), "layout", "robot", *super().perturbations(env)]

    def assets(self) -> tuple[str, str]:
        """Return the location of LIBERO's meshes and textures, and the remedy if they are missing."""
        try:
            return f"in {assets.find(LiberoConfig(name='libero', tasks=[]))}", ""
        except UserError as error:
            found, _, remedy = str(error).partition(": ")
            return found, remedy

    def check(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for each fault of a config for LIBERO that is found without importing it."""
        env: Any = config.env
        if env.driver is Driver.upstream and env.render_quality is RenderQuality.fast:
            yield ConfigIssue(
                "env.render_quality",
                "env.render_quality = 'fast', but with env.driver = 'upstream' LIBERO renders by itself, as its "
                "authors do",
                "set it to full, or env.driver to fast",
            )
        left = OFFICIAL_STATES - (0 if env.share_start_states else env.start_states)
        if left == 0:
            yield ConfigIssue(
                "env.start_states",
                f"env.start_states = {OFFICIAL_STATES} leaves none of LIBERO's start states for evaluation",
                "set it to 40, or env.share_start_states to true: evaluation then plays those of training as well",
            )
        elif config.eval.episodes > left * len(env.tasks):
            yield ConfigIssue(
                "eval.episodes",
                f"eval.episodes = {config.eval.episodes}, but LIBERO has {left} start states for evaluation and "
                f"env.tasks {len(env.tasks)}: some episodes would be played twice with the same outcome",
                f"set eval.episodes to {left * len(env.tasks)} or less",
            )
        yield from _check_further(config)

    def check_here(self, config: Config) -> Iterator[ConfigIssue]:
        """Yield an issue for everything that this machine lacks for a run on LIBERO."""
        env: Any = config.env
        yield from _check_folder(config)
        yield from _check_pro(config)
        try:
            place = assets.find(env)
        except UserError as error:
            what, _, remedy = str(error).partition(": ")
            yield ConfigIssue("env.assets", what, remedy)
        else:
            yield from _check_models(config, place)


def _check_further(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for each task of `env.task_files` in `env.tasks` that LIBERO cannot build."""
    env: Any = config.env
    if not further_tasks(env):
        return
    further = tasks_in(env.task_files)
    for index, task in enumerate(env.tasks):
        if task in further:
            for what, remedy in _faults(further[task]):
                yield ConfigIssue(f"env.tasks.{index}", f"env.tasks[{index}] = {task!r}: {what}", remedy)


def _check_pro(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for the first task of LIBERO-PRO in `env.tasks` if its files are not installed."""
    for index, task in enumerate(config.env.tasks):
        if pro.has(task.partition("/")[0]) and not pro.is_here():
            what = f"env.tasks[{index}] = {task!r} is one of LIBERO-PRO, whose task files are not installed"
            yield ConfigIssue(f"env.tasks.{index}", what, pro.REMEDY)
            return


def _check_models(config: Config, place: Path) -> Iterator[ConfigIssue]:
    """Yield an issue for each task of LIBERO-PRO in `env.tasks` of which the folder of assets has no model."""
    env: Any = config.env
    for index, task in enumerate(env.tasks):
        if not (pro.has(task.partition("/")[0]) and pro.is_here() and task in known_tasks()):
            continue  # a rule reports names that are none
        for name in sorted(pro.objects() & set(_object_types(files_of(task, env).scene.read_text()))):
            if not any(place.glob(f"*/{name}.xml")) and not any(place.glob(f"*/{name}/{name}.xml")):
                yield ConfigIssue(
                    f"env.tasks.{index}",
                    f"env.tasks[{index}] = {task!r}: {place} has no model {name!r}, which is LIBERO-PRO's",
                    "leave env.assets out: make libero installs a folder that has it",
                )


def _check_folder(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue if `env.task_files` is no folder of tasks."""
    env: Any = config.env
    if env.task_files is None or further_tasks(env):
        return
    root = root_of(env.task_files)
    inner = next((each for each in BELOW if (root / each / SCENES).is_dir()), None)
    if not root.is_dir():
        what = "is no folder"
    elif not (root / SCENES).is_dir():
        what = f"has no folder {SCENES}/"
    else:
        what = f"has no task with a file in {SCENES}/<suite>/ and start states in {STATES}/<suite>/"
    yield ConfigIssue(
        "env.task_files",
        f"env.task_files = {env.task_files!r} {what}",
        f"did you mean {str(root / inner)!r}?"
        if inner
        else f"name a folder with {SCENES}/<suite>/<task>.bddl and {STATES}/<suite>/<task>.pruned_init",
    )


def _faults(files: Files) -> Iterator[tuple[str, str]]:
    """Yield what LIBERO lacks for a task, and what its start states lack, each with a remedy."""
    text = files.scene.read_text()
    problem = re.search(r"\(problem\s+([\w-]+)\)", text)
    kinds = {"object": _object_types(text), "problem": [problem[1].lower()] if problem else []}
    for kind, names in kinds.items():
        known = _known(kind)
        for name in sorted(set(names) - known):
            otherwise = "leave it out: its suite needs a LIBERO package of its own"
            remedy = did_you_mean(name, known, otherwise=otherwise) if kind == "object" else otherwise
            yield f"the installed LIBERO has no {kind} {name!r}, which {files.scene} names", remedy
    try:
        count = len(read_states(files.start_states))
    except Exception as error:  # a truncated archive, a pickle of something else, text
        yield f"{files.start_states} cannot be read: {error}", "fetch it again"
    else:
        if count < OFFICIAL_STATES:
            yield (
                f"{files.start_states} has {count} start states, fewer than {OFFICIAL_STATES}",
                f"make {OFFICIAL_STATES}, as in LIBERO's own files",
            )


def _object_types(scene: str) -> list[str]:
    """Return the types of the objects and fixtures in a scene: `a_1 a_2 - a` below `(:objects`."""
    found = re.findall(r"\(:(?:objects|fixtures)\s([^()]*)\)", scene)
    return [name for part in found for name in re.findall(r"\s-\s+(\w+)", part)]


@lru_cache(maxsize=2)
def _known(kind: str) -> frozenset[str]:
    """Return the names under which LIBERO registers its objects or problems, read from its files."""
    folder, pattern = {
        "object": ("objects", r"@register_object\s+(?:@\w+\s+)?class (\w+)"),
        "problem": ("problems", r"@register_problem\s+class (\w+)"),
    }[kind]
    classes = [
        name for path in (package() / "envs" / folder).glob("*.py") for name in re.findall(pattern, path.read_text())
    ]
    if kind == "problem":
        return frozenset(name.lower() for name in classes)
    # As LIBERO does: each capital letter and digit begins a word.
    own = frozenset("_".join(re.sub(r"([A-Z0-9])", r" \1", name).split()).lower() for name in classes)
    return own | pro.objects() | ARENAS
