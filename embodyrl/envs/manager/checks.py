"""Whether a simulator is what the config asks for, and what it is told where the config says so in other words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from embodyrl.config.schema import EnvConfig
from embodyrl.envs.types import SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.registry import SIMULATORS


def instructed(spec: SimulatorSpec, instructions: Mapping[str, str]) -> SimulatorSpec:
    """What a simulator offers, with other sentences for some of its tasks.

    Raises:
        UserError: there is no such task, or its own sentence is also that of another one, so that a simulator's
            sentence does not tell which of them it plays.
    """
    own = list(spec.tasks.values())
    for task in instructions:
        if task not in spec.tasks:
            raise UserError(f"env.instructions: no task {task!r} is played (env.tasks: {', '.join(spec.tasks)})")
        if own.count(spec.tasks[task]) > 1:
            same = [name for name, sentence in spec.tasks.items() if sentence == spec.tasks[task]]
            raise UserError(
                f"env.instructions: the simulator has the same sentence for {' and '.join(same)}, so that none of them "
                "can get one of its own: play them in separate runs"
            )
    return dataclasses.replace(spec, tasks={**spec.tasks, **instructions})


def check_cameras(config: EnvConfig, spec: SimulatorSpec) -> None:
    """Raise `UserError` if cameras were asked for and are not what the simulator shows."""
    if config.cameras and list(spec.cameras) != config.cameras:
        raise UserError(
            f"env.cameras is {config.cameras}, but simulator {config.name!r} shows "
            f"{list(spec.cameras) or 'no pictures'}: name what it shows, or set env.cameras to []"
        )


def check_importable(config: EnvConfig) -> None:
    """Raise `UserError` if the simulator or its options are defined where its processes do not look."""
    target = SIMULATORS.entry(config.name).target if config.name in SIMULATORS else None
    for thing in (type(config), target):
        if getattr(thing, "__module__", None) == "__main__":
            raise UserError(
                f"{getattr(thing, '__name__', thing)} of simulator {config.name!r} is defined in the main script, "
                f"which simulator processes do not import: move it to a module of its own and name that under `plugins`"
            )
