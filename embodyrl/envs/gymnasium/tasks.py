"""Environments that Gymnasium knows by name. Importing Gymnasium takes 0.2 s and loads no simulator."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from embodyrl.config.infos import MOST_EPISODE_STEPS
from embodyrl.envs.gymnasium.families import FAMILIES, family
from embodyrl.errors import near_match

GYMNASIUM = "gymnasium"
"""`env.name` of any environment that Gymnasium knows."""
RENDER = "render"
"""Camera that is the environment's `render()`."""
OBSERVATION = "observation"
"""Camera that is the whole observation, where that is an image."""


def known_tasks(simulator: str = GYMNASIUM) -> list[str]:
    """Return all tasks of a family; of `gymnasium` all environment ids registered so far, to which plug-ins add."""
    if (of := family(simulator)) is not None:
        return of.known_tasks()
    import gymnasium

    return sorted(gymnasium.registry)


def limit_of(simulator: str, task: str) -> int:
    """Return the time limit that a known task is registered with [control steps]; `MOST_EPISODE_STEPS` if with none."""
    import gymnasium

    of = family(simulator)
    registered = of.time_limit if of else None
    if registered is None and task in gymnasium.registry:
        registered = gymnasium.registry[task].max_episode_steps
    return registered if registered is not None and registered > 0 else MOST_EPISODE_STEPS


_REGISTERED = re.compile(r'^register\(\s*id="([^"]+)",\s*(?:vector_)?entry_point="gymnasium\.envs\.(\w+)', re.MULTILINE)


def own_tasks() -> dict[str, str]:
    """Return the ids that Gymnasium itself always registers, with the folder of each, as in `box2d`; read from its
    source without importing it."""
    spec = importlib.util.find_spec("gymnasium")
    if spec is None or spec.origin is None:
        return {}
    file = Path(spec.origin).parent / "envs" / "__init__.py"
    return dict(_REGISTERED.findall(file.read_text())) if file.is_file() else {}


class Facts(NamedTuple):
    """What only an environment itself knows."""

    state_dim: int
    """`S`"""
    environment_state: tuple[int, int]
    """See `SimulatorSpec.environment_state`."""
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


def why_not_single(task: str) -> tuple[str, str] | None:
    """Return message and remedy for an id that is registered without single environments, else None."""
    import gymnasium

    spec = gymnasium.registry.get(task)
    if spec is None or spec.entry_point is not None:
        return None
    return (
        f"the Gymnasium environment {task!r} is registered with a vector_entry_point alone, as batches",
        "register an entry_point as well: env.num_envs single environments are played",
    )


def _without_version(task: str) -> str:
    return task.rpartition("-v")[0] or task
