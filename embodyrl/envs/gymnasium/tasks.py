"""Environments that Gymnasium knows by name. Importing Gymnasium takes 0.2 s and loads no simulator."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from embodyrl.envs.gymnasium.families import FAMILIES, family
from embodyrl.errors import near_match

GYMNASIUM = "gymnasium"
"""`env.name` of any environment that Gymnasium knows."""


def known_tasks(simulator: str = GYMNASIUM) -> list[str]:
    """Return all tasks of a family; of `gymnasium` all environment ids registered so far, to which plug-ins add."""
    if (of := family(simulator)) is not None:
        return of.known_tasks()
    import gymnasium

    return sorted(gymnasium.registry)


def own_tasks() -> set[str]:
    """Return the ids that Gymnasium itself always registers, read from its source without importing it."""
    spec = importlib.util.find_spec("gymnasium")
    if spec is None or spec.origin is None:
        return set()
    file = Path(spec.origin).parent / "envs" / "__init__.py"
    return set(re.findall(r'^register\(\s*id="([^"]+)"', file.read_text(), re.MULTILINE)) if file.is_file() else set()


class Facts(NamedTuple):
    """What only an environment itself knows."""

    state_dim: int
    """`S`"""
    action_dim: int
    """`D`"""
    discrete: bool
    """Whether an action is a choice."""
    control_frequency: float | None
    """[Hz]; None: it does not declare a time step."""


def why_unknown(simulator: str, task: str, known: list[str]) -> tuple[str, str]:
    """Return message and remedy for a task that is not among the `known` ones of a simulator."""
    module, colon, bare = task.rpartition(":")
    if colon:
        return (
            f"env.tasks names {task!r}, which would import a module",
            f"list {module or 'the module'} under plugins: and name only {bare!r}",
        )
    message = f"{simulator} has no task {task!r}"
    if versions := [other for other in known if _without_version(other) == _without_version(task)]:
        newest = max(versions, key=lambda other: (len(other), other))
        return message, f"did you mean {newest!r}? (versions: {', '.join(versions)})"
    if simulator == GYMNASIUM and (others := [name for name, of in FAMILIES.items() if of.has_id(task)]):
        return message, f"it belongs to {others[0]}: set env.name: {others[0]}"
    if near := near_match(task, known):
        return message, f"did you mean {near!r}?"
    if simulator != GYMNASIUM:
        return message, f"its tasks: {', '.join(known)}"
    return message, "list the module that registers it under plugins:, or name an environment that Gymnasium has"


def _without_version(task: str) -> str:
    return task.rpartition("-v")[0] or task
