"""Environments that Gymnasium knows by name. Importing Gymnasium takes 0.2 s and loads no simulator."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.config.issues import ConfigIssue
from embodyrl.config.rules import fact
from embodyrl.errors import near_match
from embodyrl.registry import ALGORITHMS

if TYPE_CHECKING:
    from embodyrl.config.schema import Config


def known_tasks() -> list[str]:
    """Return all environment ids registered so far; plug-ins may add more."""
    import gymnasium

    return sorted(gymnasium.registry)


def own_tasks() -> set[str]:
    """Return the ids that Gymnasium itself always registers, read from its source without importing it."""
    spec = importlib.util.find_spec("gymnasium")
    if spec is None or spec.origin is None:
        return set()
    file = Path(spec.origin).parent / "envs" / "__init__.py"
    return set(re.findall(r'^register\(\s*id="([^"]+)"', file.read_text(), re.MULTILINE)) if file.is_file() else set()


def check_here(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for each task that is registered neither by Gymnasium nor by a plug-in, and for each whose actions
    the algorithm cannot learn."""
    issues = list(_unknown(config))
    yield from issues
    off_policy, imitates = (fact(ALGORITHMS, config.algorithm.name, name) for name in ("off_policy", "imitates"))
    if not issues and off_policy and not imitates:
        yield from _discrete(config)


def _discrete(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for each task with discrete actions, where they must be continuous. What an environment's actions
    are, only the environment itself knows."""
    import gymnasium

    for index, task in enumerate(config.env.tasks):
        try:
            environment = gymnasium.make(task, disable_env_checker=True)
        except Exception:  # of any kind, by code of its own: the simulator will fail to start, and say why
            continue
        if isinstance(environment.action_space, gymnasium.spaces.Discrete):
            able = [each.name for each in ALGORITHMS.entries() if not each.off_policy and not each.demonstrations]
            name = config.algorithm.name
            yield ConfigIssue(
                (f"env.tasks.{index}", "algorithm.name"),
                f"algorithm {name!r} learns continuous actions, and those of {task!r} are discrete",
                f"set algorithm to one of {', '.join(able)}, with model.head: gaussian",
            )
        environment.close()


def _unknown(config: Config) -> Iterator[ConfigIssue]:
    """Yield an issue for each task that is not registered."""
    if "gymnasium" not in sys.modules and own_tasks().issuperset(config.env.tasks):
        return
    known = known_tasks()
    for index, task in enumerate(config.env.tasks):
        if task not in known:
            yield ConfigIssue(f"env.tasks.{index}", *why_unknown(task, known))


def why_unknown(task: str, known: list[str]) -> tuple[str, str]:
    """Return message and remedy for an id that is not among the `known` ones."""
    module, colon, bare = task.rpartition(":")
    if colon:
        return (
            f"env.tasks names {task!r}, which would import a module",
            f"list {module or 'the module'} under plugins: and name only {bare!r}",
        )
    message = f"gymnasium has no task {task!r}"
    if versions := [other for other in known if _without_version(other) == _without_version(task)]:
        newest = max(versions, key=lambda other: (len(other), other))
        return message, f"did you mean {newest!r}? (versions: {', '.join(versions)})"
    if near := near_match(task, known):
        return message, f"did you mean {near!r}?"
    return message, "list the module that registers it under plugins:, or name an environment that Gymnasium has"


def _without_version(task: str) -> str:
    return task.rpartition("-v")[0] or task
