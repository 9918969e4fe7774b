"""Further suites of tasks in LIBERO's layout: `env.task_files`, for those of others and of one's own.

A folder holds `bddl_files/<suite>/<task>.bddl`, the scene and the goal, and `init_files/<suite>/<task>.pruned_init`,
the start states. Perturbed tasks such as `turn_on_the_stove_language_3` of LIBERO-Plus may have those of the task that
their name begins with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from embodyrl.envs.libero import tasks
from embodyrl.envs.options import LiberoConfig

SCENES, STATES = "bddl_files", "init_files"
"""Folders of LIBERO's layout."""


@dataclass(frozen=True)
class Files:
    """What a task is made of."""

    scene: Path
    """Objects, regions, goal and task description."""
    start_states: Path
    """Its start states; see `tasks.read_states`."""


def files_of(task: str, config: LiberoConfig) -> Files:
    """Return the files of a task, of LIBERO's, of LIBERO-PRO's, or of `env.task_files`.

    Raises:
        KeyError, ValueError: there is no such task.
    """
    further = tasks_in(config.task_files) if config.task_files else {}
    if task in further:
        return further[task]
    return Files(tasks.task_file(task), tasks.start_states_file(task))


def further_tasks(config: LiberoConfig) -> dict[str, str] | None:
    """Return the tasks in `env.task_files` and their task descriptions; None if the folder is not on this machine."""
    if config.task_files is None:
        return {}
    if not (root_of(config.task_files) / SCENES).is_dir():
        return None
    return _described(config.task_files)


@lru_cache(maxsize=4)
def _described(folder: str) -> dict[str, str]:
    return {task: tasks.description_in(files.scene) or _words(task) for task, files in tasks_in(folder).items()}


def root_of(folder: str) -> Path:
    """Return the folder that `env.task_files` names."""
    return Path(folder).expanduser()


@lru_cache(maxsize=4)
def tasks_in(folder: str) -> dict[str, Files]:
    """Return the files of each task in a folder that has both."""
    found = {}
    for suite in sorted(path for path in (root_of(folder) / SCENES).iterdir() if path.is_dir()):
        states = {path.stem: path for path in (root_of(folder) / STATES / suite.name).glob("*.pruned_init")}
        for scene in sorted(suite.glob("*.bddl")):
            if (own := _longest_beginning(scene.stem, states)) is not None:
                found[f"{suite.name}/{scene.stem}"] = Files(scene, states[own])
    return found


def _longest_beginning(name: str, known: dict[str, Path]) -> str | None:
    """Return the longest of the known names that a name is, or begins with up to an underscore."""
    parts = name.split("_")
    beginnings = ("_".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((each for each in beginnings if each in known), None)


def _words(task: str) -> str:
    return task.partition("/")[2].replace("_", " ")
