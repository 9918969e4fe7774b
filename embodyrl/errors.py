"""Errors that a user can fix. The command line prints them in one line, without a traceback, and exits with 1 or 2."""

from __future__ import annotations

import difflib
import errno
import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, TypeGuard

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""C0 except tab and newline, DEL, C1, and the marks that reverse the direction of writing."""


def has_controls(value: object) -> bool:
    """Return whether a value is a text with control characters, which could change a terminal's state."""
    return isinstance(value, str) and _CONTROLS.search(value) is not None


def without_controls(text: str) -> str:
    """Return a text in which control characters except newline and tab are escaped, safe to print on a terminal."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def near_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the entry of `known` most similar to `name`, or None.

    Args:
        name: the name as written.
        known: the legal names.
        cutoff: least similarity, 0 .. 1.
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


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
    """A mistake and its remedy, which the fault of a setting shows apart.

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
        super().__init__(f"{error.strerror}{where}. Make room, then go on: {go_on or 'the same command'}")

    @staticmethod
    def is_why(error: Exception) -> TypeGuard[OSError]:
        """Return whether an exception says that."""
        return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_debugging() -> bool:
    """Return whether errors are shown with all that led to them (`EMBODYRL_DEBUG=1`)."""
    return os.environ.get("EMBODYRL_DEBUG") == "1"


def explain(error: UserError | RunError) -> int:
    """Print an error to stderr; returns its exit code."""
    if isinstance(error, UserError):
        prefix, text, exit_code = error.prefix, str(error), error.exit_code
    else:
        prefix, text, exit_code = UserError.prefix, error.for_people, 1
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    text = text.rstrip("\n")  # the traceback of a simulator ends with some
    sys.stderr.write(without_controls(f"{prefix}{text}{notes}\n"))
    return exit_code
