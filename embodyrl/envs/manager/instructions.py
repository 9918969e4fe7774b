"""What the policy is told to do, where the config says it in other words than the simulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from embodyrl.envs.types import SimulatorSpec
from embodyrl.errors import UserError


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
