"""What is wrong with a config, where it stands, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from embodyrl.errors import UserError

KeyPath = tuple[str | int, ...]
"""Where a setting lives: `("env", "tasks", 0)`."""

COMMAND_LINE = "command line"


def dotted(path: KeyPath) -> str:
    """The path as people write it: `env.tasks[0]`."""
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
    """Path of the file as people should read it, or `command line`."""
    line: int = 0
    """Line, from 1; 0: the file as a whole."""
    column: int = 0
    """Column, from 1."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class ConfigIssue:
    """One thing that is wrong with a config."""

    where: str | tuple[str | KeyPath, ...]
    """The setting it is about, `env.tasks.0` or its keys, or several that do not fit together, the one to change first
    in front; empty if it is about a file, or if whoever asked knows."""
    message: str
    """What is wrong."""
    hint: str = ""
    """What to do; empty if the message says it."""
    location: Location | None = None
    """Where it stands, once that is known."""

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


class ConfigError(UserError):
    """Raised with every fault of a config at once, before anything starts."""

    exit_code = 2
    prefix = ""  # every fault begins with its place

    def __init__(self, faults: Sequence[ConfigIssue]) -> None:
        self.faults = tuple(faults)
        count = len(self.faults)
        lines = [*map(str, self.faults), f"{count} fault{'' if count == 1 else 's'}; nothing was started."]
        super().__init__("\n".join(lines))


def in_reading_order(faults: Iterable[ConfigIssue], files: Sequence[str]) -> list[ConfigIssue]:
    """The faults without repetitions, by file (in the order of `files`, the command line last), line and column."""
    rank = {name: index for index, name in enumerate(files)}

    def key(fault: ConfigIssue) -> tuple[bool, int, int, int]:
        where = fault.location or Location("")
        return (where.file == COMMAND_LINE, rank.get(where.file, len(rank)), where.line, where.column)

    return sorted(dict.fromkeys(faults), key=key)
