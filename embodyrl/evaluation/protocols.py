"""Evaluation protocols: what a published evaluation fixes, each aspect with its source. Imports nothing heavy.

A protocol is a YAML file. Those that come with embodyrl lie in `protocols/<simulator>/<name>.yaml`; one's own is named
by its path. `docs/evaluation.md` describes the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from embodyrl.errors import UserError, did_you_mean

FOLDER = Path(__file__).parent / "protocols"
"""Folder of the protocols that come with embodyrl."""

ASPECTS = (
    "episodes",
    "initial states",
    "settling",
    "horizon",
    "success",
    "images",
    "gripper",
    "control mode",
    "actions",
    "sampling",
    "seeds",
)
"""What makes success rates of two evaluations differ; a shipped protocol says something on each."""

OWN = "own"
"""Stands for the settings of the checkpoint among the names of protocols."""


class ProtocolError(UserError):
    """Raised when a protocol is unknown, malformed, or not for this checkpoint; nothing was started."""

    exit_code = 2


class Criterion(StrEnum):
    """Episodes that count as solved."""

    once = "once"
    at_end = "at_end"


@dataclass(frozen=True, kw_only=True)
class Aspect:
    """One thing that a protocol fixes."""

    name: str
    """One of `ASPECTS`; a protocol of one's own may have others."""
    says: str
    """What the protocol does, in a few words."""
    source: str = ""
    """File and lines in the protocol's repository, `path:10-12`, or in another one: `owner/name@commit:path:10-12`."""
    settings: Mapping[str, Any]
    """Settings of embodyrl that do the same."""
    by_task: Mapping[str, Mapping[str, Any]]
    """The same for tasks whose names match a pattern, `libero_spatial/*` for instance."""
    models: tuple[str, ...] = ()
    """Models that it concerns; empty: all."""
    images_only: bool = False
    """It concerns only policies that see images."""
    of_checkpoint: bool = False
    """The number of executed actions is the checkpoint's own, where its files say it."""
    differs: str = ""
    """What embodyrl does not do in the same way."""

    def concerns(self, model: str, *, sees_images: bool) -> bool:
        """Return whether its settings hold for a policy."""
        return (not self.models or model in self.models) and (sees_images or not self.images_only)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A way to evaluate."""

    name: str
    """`libero/openpi`, or the path of its file."""
    title: str
    """Whose it is, in a few words."""
    simulator: str
    repository: str = ""
    """`owner/name` on GitHub."""
    commit: str = ""
    checked: str = ""
    """Day on which the source was read, `2026-01-31`."""
    episodes_per_task: int
    criterion: Criterion
    aspects: tuple[Aspect, ...]
    models: tuple[str, ...] = ()
    """Models that it was published for; empty: any."""
    variants: Mapping[str, Mapping[str, str]]
    """What it plays besides a checkpoint's tasks, by name: the tasks instead of those that match, as patterns with an
    asterisk at the end, `libero_goal/*: libero_goal_swap/*` for instance."""

    @property
    def short_name(self) -> str:
        """Name without the simulator."""
        return self.name.rpartition("/")[2].removesuffix(".yaml")

    @property
    def executes_as_checkpoint(self) -> bool:
        """Whether the number of executed actions is the checkpoint's own."""
        return any(aspect.of_checkpoint for aspect in self.aspects)

    def tasks_of(self, variant: str, tasks: Sequence[str]) -> list[str]:
        """Return the tasks that a variant plays instead of some; those that none of its patterns match are left out."""
        instead = self.variants[variant].items()
        return [
            new[:-1] + task.removeprefix(old[:-1])
            for task in tasks
            for old, new in instead
            if task.startswith(old[:-1])
        ]

    def settings_of(self, task: str, model: str, *, sees_images: bool) -> dict[str, Any]:
        """Return the settings for a task.

        Raises:
            ProtocolError: an aspect has settings by task, and none for this one.
        """
        settings: dict[str, Any] = {}
        for aspect in self.aspects:
            if aspect.concerns(model, sees_images=sees_images):
                settings |= aspect.settings
                settings |= self._of_task(aspect, task)
        return settings

    def _of_task(self, aspect: Aspect, task: str) -> Mapping[str, Any]:
        if not aspect.by_task:
            return {}
        for pattern, settings in aspect.by_task.items():
            if fnmatchcase(task, pattern):
                return settings
        raise ProtocolError(
            f"protocol {self.name} does not say its {aspect.name} for {task!r}: it has tasks like "
            f"{', '.join(aspect.by_task)}; name such ones with env.tasks=[...], or take another protocol"
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tasks that a protocol plays with the same settings."""

    tasks: tuple[str, ...]
    settings: Mapping[str, Any]


def parts_of(protocol: Protocol, tasks: Sequence[str], model: str, *, sees_images: bool) -> list[Part]:
    """Divide tasks into those with the same settings, in the order of `tasks`.

    Raises:
        ProtocolError: the protocol does not say how to play one of them.
    """
    parts: list[Part] = []
    for task in tasks:
        settings = protocol.settings_of(task, model, sees_images=sees_images)
        same = next((number for number, part in enumerate(parts) if part.settings == settings), None)
        if same is None:
            parts.append(Part(tasks=(task,), settings=settings))
        else:
            parts[same] = Part(tasks=(*parts[same].tasks, task), settings=settings)
    return parts


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as the command line takes them: `env.cameras=["wrist"]`."""
    return [f"{name}={_as_override(value)}" for name, value in settings.items()]


def _as_override(value: Any) -> str:
    if isinstance(value, dict):  # keys have no quotes there
        return "{" + ", ".join(f"{key}: {_as_override(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


# ------------------------------------------------------------------------------------------------------------- finding


@cache
def shipped() -> dict[str, Protocol]:
    """Return the protocols that come with embodyrl, by name."""
    names = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in sorted(FOLDER.rglob("*.yaml"))}
    return {name: read(path, name) for name, path in names.items()}


def find(name: str, simulator: str) -> Protocol:
    """Return the protocol that a user means for a simulator.

    Args:
        name: `openpi`, `libero/openpi`, or the path of a file.
        simulator: `env.name` of the checkpoint.

    Raises:
        ProtocolError: there is none, or it is for another simulator.
    """
    if name.endswith((".yaml", ".yml")):
        protocol = read(Path(name), name)
        if protocol.simulator != simulator:
            raise ProtocolError(_of_another(protocol.name, protocol.simulator, simulator))
        return protocol
    known = shipped()
    wanted = name if name in known else f"{simulator}/{name}"
    if wanted in known and known[wanted].simulator == simulator:
        return known[wanted]
    elsewhere = [other for other in known if name in (other, known[other].short_name)]
    if elsewhere:
        others = ", ".join(dict.fromkeys(known[other].simulator for other in elsewhere))
        raise ProtocolError(_of_another(name, others, simulator))
    fitting = [protocol.short_name for protocol in known.values() if protocol.simulator == simulator]
    hint = did_you_mean(name.rpartition("/")[2], [*fitting, OWN], lead=" - ")
    raise ProtocolError(
        f"there is no protocol {name!r} for {simulator}{hint} ({_choices(simulator)}; one of your own is a file .yaml)"
    )


def _of_another(name: str, others: str, simulator: str) -> str:
    return f"protocol {name!r} is for {others}, but this checkpoint plays {simulator} ({_choices(simulator)})"


def _choices(simulator: str) -> str:
    """Return what there is for a simulator, in words."""
    names = [protocol.short_name for protocol in shipped().values() if protocol.simulator == simulator]
    return f"for {simulator}: {', '.join([*names, OWN])}" if names else f"none comes with embodyrl for {simulator}"


# ------------------------------------------------------------------------------------------------------------- reading

_OF_SOURCE = {"title", "repository", "commit", "checked", "models"}
_TOP = _OF_SOURCE | {"simulator", "episodes_per_task", "success", "aspects", "variants"}
_OF_ASPECT = {"says", "source", "set", "by_task", "models", "images_only", "of_checkpoint", "differs"}


def read(path: Path, name: str) -> Protocol:
    """Read a protocol.

    Raises:
        ProtocolError: the file is missing, is no YAML, or an entry is missing, unknown or of another type.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ProtocolError(f"cannot read protocol {name}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ProtocolError(f"protocol {name} is no YAML: {' '.join(str(error).split())}") from error
    entries = _Entries(name, "", found)
    entries.check_names(_TOP)
    aspects = entries.mapping("aspects")
    episodes = entries.get("episodes_per_task", int, needed=True)
    if episodes < 1:
        raise ProtocolError(f"protocol {name}: episodes_per_task = {episodes}: want 1 or more")
    criterion = entries.get("success", str, default=Criterion.once.value)
    if criterion not in set(Criterion):
        raise ProtocolError(f"protocol {name}: success = {criterion!r}: want one of {', '.join(Criterion)}")
    return Protocol(
        name=name,
        title=entries.get("title", str, default=""),
        simulator=entries.get("simulator", str, needed=True),
        repository=entries.get("repository", str, default=""),
        commit=entries.get("commit", str, default=""),
        checked=str(entries.get("checked", object, default="")),
        episodes_per_task=episodes,
        criterion=Criterion(criterion),
        aspects=tuple(_aspect(name, aspect, value) for aspect, value in aspects.items()),
        models=tuple(entries.get("models", list, default=[])),
        variants={variant: _instead(name, variant, found) for variant, found in entries.mapping("variants").items()},
    )


def _instead(protocol: str, variant: str, value: Any) -> Mapping[str, str]:
    """Return the tasks of a variant, by those instead of which it plays them."""
    place = f"variants.{variant}"
    _Entries(protocol, place, value)
    for old, new in value.items():
        if not (old.endswith("*") and isinstance(new, str) and new.endswith("*")):
            raise ProtocolError(
                f"protocol {protocol}: {place}: {old!r}: {new!r} are no patterns of tasks that end in an asterisk, "
                "as in libero_goal/*: libero_goal_swap/*"
            )
    return dict(value)


def _aspect(protocol: str, name: str, value: Any) -> Aspect:
    entries = _Entries(protocol, f"aspects.{name}", value)
    entries.check_names(_OF_ASPECT)
    by_task = entries.mapping("by_task")
    for pattern, settings in by_task.items():
        _Entries(protocol, f"aspects.{name}.by_task.{pattern}", settings)
    return Aspect(
        name=name,
        says=entries.get("says", str, needed=True),
        source=entries.get("source", str, default=""),
        settings=entries.mapping("set"),
        by_task=by_task,
        models=tuple(entries.get("models", list, default=[])),
        images_only=entries.get("images_only", bool, default=False),
        of_checkpoint=entries.get("of_checkpoint", bool, default=False),
        differs=entries.get("differs", str, default=""),
    )


class _Entries:
    """The entries of a mapping in a protocol's file."""

    def __init__(self, protocol: str, place: str, found: Any) -> None:
        self._lead = f"protocol {protocol}: {place}"
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise ProtocolError(f"{self._lead or protocol} is no mapping of names to values")
        self._found: dict[str, Any] = found
        self._dot = "." if place else ""

    def check_names(self, known: set[str]) -> None:
        """Refuse names that are not among `known`."""
        for key in self._found:
            if key not in known:
                hint = did_you_mean(key, known, lead=" - ", otherwise=f" (known: {', '.join(sorted(known))})")
                raise ProtocolError(f"{self._lead}{self._dot}{key} is unknown{hint}")

    def get(self, key: str, kind: type, *, default: Any = None, needed: bool = False) -> Any:
        """Return a value of a type."""
        if key not in self._found:
            if needed:
                raise ProtocolError(f"{self._lead}{self._dot}{key} is missing")
            return default
        value = self._found[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ProtocolError(f"{self._lead}{self._dot}{key} = {value!r}: want {kind.__name__}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a mapping of names; empty if it is missing."""
        value = self._found.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value):
            raise ProtocolError(f"{self._lead}{self._dot}{key} is no mapping of names to values")
        return value
