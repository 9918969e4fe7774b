"""Values that were written for some tasks, and are left to others.

A group file, an experiment or a saved config names tasks and beside them what holds for these tasks alone, as the
return that counts as success. Whoever lays other tasks over it has to say what holds for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from embodyrl.config.compose import Composed
from embodyrl.config.fields import settings_of
from embodyrl.config.issues import COMMAND_LINE, ConfigIssue, KeyPath
from embodyrl.config.schema import Config, OfTasks
from embodyrl.config.values import show

TASKS: KeyPath = ("env", "tasks")


@dataclass(frozen=True)
class Inherited:
    """One such value."""

    what: OfTasks
    """Whether it is a fault."""
    fault: ConfigIssue
    """What to say about it."""


def inherited_values(config: Config, composed: Composed) -> Iterator[Inherited]:
    """The values of `env` that stand where tasks are named which are not played."""
    settings = composed.settings
    tasks, origin = settings.get(TASKS), settings.origins.get(TASKS)
    others = {place.value.file: value for path, value, place in settings.replaced if path == TASKS and value != tasks}
    if origin is None:
        return
    options: Any = type(config.env)
    for name, setting in settings_of(options).items():
        what, written = setting.field.metadata.get("of_tasks"), settings.origins.get(("env", name))
        if what is None or written is None or written.value.file not in others:
            continue
        value = settings.get(("env", name))
        if value in (None, {}):
            continue
        place = written.value.file
        key = f"env.{name}"
        beside = "on the command line" if origin.value.file == COMMAND_LINE else "beside them"
        where = f"env: {place.rpartition('env/')[2].removesuffix('.yaml')}" if place in composed.entries else place
        message = f"{key} = {show(value)} was written for {_names(others[place])} ({where}), not for {_names(tasks)}"
        remedy = f"write {key}=... {beside}, with what holds for these tasks (if the same holds, that)"
        yield Inherited(OfTasks(what), ConfigIssue((TASKS,), message, remedy, origin.value))


def _names(tasks: Any) -> str:
    return f"[{', '.join(map(str, tasks))}]" if isinstance(tasks, list) else show(tasks)
