"""Errors that a user can mend. The command line prints them as one sentence, without a traceback, and exits with 1
or 2."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from typing import ClassVar

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""C0 without tab and newline, DEL, C1, and what turns the direction of writing round."""


def has_controls(value: object) -> bool:
    """Return whether a value is a text with characters by which it could do more to a terminal than be shown."""
    return isinstance(value, str) and _CONTROLS.search(value) is not None


def without_controls(text: str) -> str:
    """A text that a terminal only shows: control characters but newline and tab are written out."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def near_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the entry of `known` that `name` was probably meant to be, or None.

    Args:
        name: what was written.
        known: what there is.
        cutoff: how much alike they must be, from 0 to 1.
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], *, lead: str = "", otherwise: str = "") -> str:
    """Return the question whether `name` was meant to be one of `known`, with `lead` in front; `otherwise` if none is
    near."""
    near = near_match(name, known)
    return f"{lead}did you mean {near!r}?" if near else otherwise


class UserError(ValueError):
    """Raised for a mistake that the user can mend; its text says what is wrong, what was found, and what to do."""

    exit_code: ClassVar[int] = 1
    """What the command line exits with: 1 the run failed, 2 the request is wrong and nothing was started."""
    prefix: ClassVar[str] = "error: "
    """What the command line puts before the text."""


class UnknownNameError(UserError):
    """Raised when a registry does not know a name."""


class DuplicateNameError(UserError):
    """Raised when a name is registered a second time."""


class MissingPackageError(UserError):
    """Raised when a component needs a package that is not installed; the text carries the install command."""


class PluginError(UserError):
    """Raised when a module named under `plugins:` or an entry point cannot be imported."""


class RunError(RuntimeError):
    """Raised when a run cannot go on for a reason that is not the user's config: a simulator died, a loss is not a
    number."""

    @property
    def for_people(self) -> str:
        """The text that the command line prints."""
        return str(self)


def explain(error: UserError | RunError) -> int:
    """Print an error to stderr; returns the exit code that it stands for."""
    if isinstance(error, UserError):
        prefix, text, exit_code = error.prefix, str(error), error.exit_code
    else:
        prefix, text, exit_code = UserError.prefix, error.for_people, 1
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    sys.stderr.write(without_controls(f"{prefix}{text}{notes}\n"))
    return exit_code
