"""Issues of a config: location, message, remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from embodyrl.errors import UserError
from embodyrl.screen import counted

KeyPath = tuple[str | int, ...]
"""Path of a setting: `("env", "tasks", 0)`."""

COMMAND_LINE = "command line"


def dotted(path: KeyPath) -> str:
    """Return the path as text: `env.tasks[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def key_path(text: str) -> KeyPath:
    """Return the keys that `env.tasks.0` stands for."""
    return tuple(int(part) if part.isdigit() else part for part in text.split("."))


@dataclass(frozen=True)
class Location:
    """A place in a file, or the file as a whole."""

    file: str
    """Path of the file in messages, or `command line`."""
    line: int = 0
    """Line, from 1; 0: the file as a whole."""
    column: int = 0
    """Column, from 1."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


class LeftOut(Enum):
    """Type of the mark for a setting that is to be left out."""

    value_ = None


LEAVE_OUT = LeftOut.value_
"""In `ConfigIssue.fix`: the file should not have this setting."""


@dataclass(frozen=True)
class ConfigIssue:
    """One fault of a config."""

    where: str | tuple[str | KeyPath, ...]
    """The setting, as `env.tasks.0` or its keys, or several conflicting settings, the one to change first in front.
    Empty for a file as a whole, or where the caller adds the setting."""
    message: str
    """The fault, with the value found."""
    hint: str = ""
    """Remedy; empty if the message contains it."""
    location: Location | None = None
    """Location in a file, once it is known."""
    fix: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The remedy as values of settings (`LEAVE_OUT`: none), where one is as good as any. Empty: it is for the user to
    decide."""

    @property
    def paths(self) -> list[KeyPath]:
        """The settings as keys."""
        named = (self.where,) if isinstance(self.where, str) else self.where
        return [key_path(each) if isinstance(each, str) else each for each in named]

    @property
    def path(self) -> KeyPath:
        """The first of the settings; empty if there is none."""
        return next(iter(self.paths), ())

    def __str__(self) -> str:
        place = f"{self.location}: " if self.location is not None else ""
        return f"{place}{self.message}{f' - {self.hint}' if self.hint else ''}"


class MissingDependency(ConfigIssue):
    """Something that this machine lacks, a package or a folder: no fault of a config for another machine."""


class NeededToLearn(MissingDependency):
    """The same of what only learning needs: no fault either of a config whose policy acts."""


class ConfigError(UserError):
    """Raised with every fault of a config at once, before anything starts."""

    exit_code = 2
    prefix = ""  # every fault begins with its location

    def __init__(self, faults: Sequence[ConfigIssue], mended: str = "") -> None:
        self.faults = tuple(faults)
        lines = [*map(str, self.faults), f"{counted(len(self.faults), 'fault')}; nothing was started."]
        super().__init__("\n".join([*lines, mended]).rstrip("\n"))


def in_reading_order(faults: Iterable[ConfigIssue], files: Sequence[str]) -> list[ConfigIssue]:
    """Sort faults by file (in the order of `files`, the command line last), line and column; drops repeated ones."""
    rank = {name: index for index, name in enumerate(files)}

    def key(fault: ConfigIssue) -> tuple[bool, int, int, int]:
        where = fault.location or Location("")
        return (where.file == COMMAND_LINE, rank.get(where.file, len(rank)), where.line, where.column)

    return sorted(dict.fromkeys(faults), key=key)
