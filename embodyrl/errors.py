"""Errors that a user can fix. The command line prints them in one line, without a traceback, and exits with 1 or 2."""

from __future__ import annotations

import difflib
import errno
import inspect
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeGuard

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""C0 except tab and newline, DEL, C1, and the marks that reverse the direction of writing."""


def has_controls(value: object) -> bool:
    """Return whether a value is a text with control characters, which could change a terminal's state."""
    return isinstance(value, str) and _CONTROLS.search(value) is not None


def without_controls(text: str) -> str:
    """Return a text in which control characters except newline and tab are escaped, safe to print on a terminal."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def near_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the entry of `known` most similar to `name`, whatever their case, or None.

    Args:
        name: the name as written.
        known: the legal names.
        cutoff: least similarity, 0 .. 1.
    """
    by_letters: dict[str, str] = {}
    for each in known:
        by_letters.setdefault(each.casefold(), each)
    matches = difflib.get_close_matches(name.casefold(), list(by_letters), n=1, cutoff=cutoff)
    return by_letters[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str], *, lead: str = "", otherwise: str = "") -> str:
    """Return the hint `did you mean ...?` with the near match among `known`, after `lead`; `otherwise` if none is
    near."""
    near = near_match(name, known)
    return f"{lead}did you mean {near!r}?" if near else otherwise


class UserError(ValueError):
    """Raised for a mistake that the user can fix. Its text names the fault, the value found, and the remedy."""

    exit_code: ClassVar[int] = 1
    """Exit code of the command line: 1 the run failed, 2 the request is wrong and nothing was started."""
    prefix: ClassVar[str] = "error: "
    """Text that the command line prints in front."""


class RemediedError(UserError):
    """A mistake and its remedy, which the fault of a setting shows separately.

    Args:
        message: what is wrong, where, and what was found.
        remedy: what to do; empty: the message says it.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}: {remedy}" if remedy else message)
        self.message, self.remedy = message, remedy


class UnknownNameError(UserError):
    """Raised when a registry does not know a name."""


class DuplicateNameError(UserError):
    """Raised when a name is registered a second time."""


class MissingPackageError(UserError):
    """Raised when a component needs a package that is not installed; the text contains the install command."""


class PluginError(UserError):
    """Raised when a module named under `plugins:` or an entry point cannot be imported."""


class RunError(RuntimeError):
    """Raised when a run cannot continue for a reason outside the config: a simulator died, a loss is not finite."""

    @property
    def for_people(self) -> str:
        """Text that the command line prints."""
        return str(self)


class RewardError(RunError):
    """Raised when rewards that are asked for cannot be had or trusted. The run ends; what it has learned is saved."""


def listed(names: Iterable[str]) -> str:
    """Return names in quotes, one after the other."""
    return ", ".join(map(repr, names))


def shell_command(*words: str | Path) -> str:
    """Return a command of embodyrl, as it can be pasted into a shell: `shell_command("resume", run_dir)`."""
    return shlex.join(["embodyrl", *map(str, words)])


class DiskFull(RunError):
    """Raised when something could not be written because a disk is full, or a quota used up.

    Args:
        error: what writing it raised.
        go_on: the command for when there is room; empty: the one that was given.
    """

    def __init__(self, error: OSError, go_on: str = "") -> None:
        where = "" if error.filename is None else f" ({error.filename})"
        super().__init__(f"{error.strerror}{where}. Make room, then continue: {go_on or 'the same command'}")

    @staticmethod
    def is_why(error: Exception) -> TypeGuard[OSError]:
        """Return whether an exception says that."""
        return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def at_line(file: str | Path, line: int) -> str:
    """Return `file:line` for people: relative to the working directory for a file below it."""
    path = os.path.normpath(file)
    near = os.path.relpath(path)
    return f"{path if near.startswith(os.pardir) else near}:{line}"


def line_of(thing: Any, part: str = "") -> str:
    """Return ` (file:line)` of a class or function, of the first line in it that begins with `part`; empty if it is not
    known."""
    try:
        function = inspect.unwrap(thing)
        lines, first = inspect.getsourcelines(function)
        offset = next((number for number, line in enumerate(lines) if part and line.lstrip().startswith(part)), 0)
        return f" ({at_line(inspect.getsourcefile(function) or '', first + offset)})"
    except (OSError, TypeError):
        return ""


def frames_of_plugin(error: BaseException) -> TracebackType | None:
    """Return an error's traceback from the first frame that is neither in this package nor in what is installed, or
    None."""
    return next(_outside(error), None)


def line_of_plugin(error: BaseException) -> tuple[str, int] | None:
    """Return file and line of the last such frame of an error, or None."""
    return next(((each.tb_frame.f_code.co_filename, each.tb_lineno) for each in reversed([*_outside(error)])), None)


def _outside(error: BaseException) -> Iterator[TracebackType]:
    known = (str(Path(__file__).parent), sys.prefix, sys.base_prefix, "<")
    trace = error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(known):
            yield trace
        trace = trace.tb_next


def is_debugging() -> bool:
    """Return whether errors are shown with all that led to them (`EMBODYRL_DEBUG=1`)."""
    return os.environ.get("EMBODYRL_DEBUG") == "1"


def explain(error: UserError | RunError) -> int:
    """Print an error to stderr, or to stdout where that is closed; returns its exit code."""
    if isinstance(error, UserError):
        prefix, text, exit_code = error.prefix, str(error), error.exit_code
    else:
        prefix, text, exit_code = UserError.prefix, error.for_people, 1
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    text = text.rstrip("\n")  # the traceback of a simulator ends with some
    if (stream := sys.stderr or sys.stdout) is not None:
        stream.write(without_controls(f"{prefix}{text}{notes}\n"))
    return exit_code
