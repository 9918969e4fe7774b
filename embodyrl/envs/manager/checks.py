"""Checks that a simulator offers what the config asks for, and task descriptions of the config in place of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from embodyrl.config.schema import EnvConfig
from embodyrl.envs.types import SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.registry import SIMULATORS


def with_task_descriptions(spec: SimulatorSpec, descriptions: Mapping[str, str]) -> SimulatorSpec:
    """Return a simulator's spec with other task descriptions for some of its tasks.

    Raises:
        UserError: there is no such task, or another task has the same description, so that the simulator's description
            does not identify the task that it plays.
    """
    own = list(spec.tasks.values())
    for task in descriptions:
        if task not in spec.tasks:
            raise UserError(f"env.task_descriptions: no task {task!r} is played (env.tasks: {', '.join(spec.tasks)})")
        if own.count(spec.tasks[task]) > 1:
            same = [name for name, description in spec.tasks.items() if description == spec.tasks[task]]
            raise UserError(
                f"env.task_descriptions: the simulator has the same task description for {' and '.join(same)}, so that "
                "none of them can get one of its own: play them in separate runs"
            )
    return dataclasses.replace(spec, tasks={**spec.tasks, **descriptions})


def check_cameras(config: EnvConfig, spec: SimulatorSpec) -> None:
    """Raise `UserError` if `env.cameras` or `env.image_size` is not what the simulator shows."""
    if config.cameras and list(spec.cameras) != config.cameras:
        raise UserError(
            f"env.cameras is {config.cameras}, but simulator {config.name!r} shows "
            f"{list(spec.cameras) or 'no images'}: name what it shows, or set env.cameras to []"
        )
    if config.cameras and list(spec.image_size) != config.image_size:
        raise UserError(
            f"env.image_size is {config.image_size}, but simulator {config.name!r} declares SimulatorSpec.image_size = "
            f"{spec.image_size} (height, width): declare tuple(config.image_size), and render or resize to it"
        )


def check_importable(config: EnvConfig) -> None:
    """Raise `UserError` if the simulator or its options are defined in the main script, which no process imports."""
    target = SIMULATORS.entry(config.name).target if config.name in SIMULATORS else None
    for thing in (type(config), target):
        if getattr(thing, "__module__", None) == "__main__":
            raise UserError(
                f"{getattr(thing, '__name__', thing)} of simulator {config.name!r} is defined in the main script, "
                f"which simulator processes do not import: move it to a module of its own and name that under `plugins`"
            )
