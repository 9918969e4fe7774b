"""A promise, what came of trying it, and the line of a plug-in that broke it."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from embodyrl.envs.base import RestoreMismatchWarning
from embodyrl.errors import RunError, UserError, at_line, line_of, line_of_plugin, without_controls

PACKAGE = str(Path(__file__).parents[1])
T = TypeVar("T")


class State(StrEnum):
    """What came of a promise."""

    kept = "ok"
    broken = "FAIL"
    does_not_apply = "-"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `embodyrl check`."""

    promise: str
    state: State
    found: str = ""
    """What was found, or why the promise does not apply."""
    place: str = ""
    """` (file:line)` in the plug-in; empty if it is not known, or there is none."""
    remedy: str = ""

    def __str__(self) -> str:
        text = f": {self.found}" if self.found else ""
        remedy = f" - {self.remedy}" if self.remedy else ""
        mark = f"{self.state:<4}" if self.state is not State.broken else f"{self.state} "
        return without_controls(" ".join(f"{mark}{self.promise}{text}{self.place}{remedy}".splitlines()))


class Broken(Exception):
    """Raised when a promise is broken.

    Args:
        found: what was found.
        remedy: what to do.
        method: whose line is named, `reset` for instance; empty: that of the promise.
    """

    def __init__(self, found: str, remedy: str = "", *, method: str = "") -> None:
        super().__init__(found)
        self.found, self.remedy, self.method = found, remedy, method


class DoesNotApply(Exception):
    """Raised when a promise does not apply; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Promise(Generic[T]):
    """A promise."""

    text: str
    keep: Callable[[T], None]
    """Tries it on a bench; raises `Broken` or `DoesNotApply`, or whatever the plug-in raises."""
    method: str
    """The method whose line is named where nothing tells more."""

    def __str__(self) -> str:
        return self.keep.__name__


def promise(into: list[Promise[T]], text: str, method: str) -> Callable[[Callable[[T], None]], Callable[[T], None]]:
    """Add a function to a list as a promise."""

    def add(function: Callable[[T], None]) -> Callable[[T], None]:
        into.append(Promise(text=text, keep=function, method=method))
        return function

    return add


class needed(Generic[T]):  # noqa: N801 - used as `property` is
    """A property that is computed once. Where that fails it raises what was raised, and from the second time on
    `DoesNotApply`: one fault is reported once.

    Args:
        build: the method that computes it; the first sentence of its docstring says what that is.
    """

    def __init__(self, build: Callable[[Any], T]) -> None:
        self._build, self.__doc__ = build, build.__doc__

    def __get__(self, bench: Bench, owner: type) -> T:
        name = self._build.__name__
        if name in bench.failed:
            what = (self.__doc__ or name).partition(".")[0]
            raise DoesNotApply(f"{what[0].lower()}{what[1:]} is missing, see above")
        if name not in bench.built:
            try:
                bench.built[name] = self._build(bench)
            except DoesNotApply:
                raise
            except BaseException:
                bench.failed.add(name)
                raise
        found: T = bench.built[name]
        return found


class Bench:
    """What promises are tried on."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules
        self.built: dict[str, Any] = {}
        """What is `needed` and was built, by name."""
        self.failed: set[str] = set()
        """What could not be built."""

    def owners(self) -> list[type]:
        """Return the classes whose methods promises name, the likely one first."""
        return [
            each
            for name in self.modules
            for each in list(vars(sys.modules.get(name, object)).values())
            if isinstance(each, type) and each.__module__ == name
        ]

    def line_of(self, method: str) -> str:
        """Return ` (file:line)` of a method of the plug-in; empty without one."""
        for owner in self.owners():
            for each in owner.__mro__:
                if method in vars(each):
                    place = line_of(vars(each)[method])
                    if place and not _is_own(each):
                        return place
                    break
        return ""

    def try_(self, promise: Promise[Any]) -> Finding:
        """Try a promise; whatever is raised becomes the finding."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RestoreMismatchWarning)
                promise.keep(self)
        except DoesNotApply as reason:
            return Finding(promise=promise.text, state=State.does_not_apply, found=str(reason))
        except Broken as broken:
            place = self.line_of(broken.method or promise.method)
            return _broken(promise, broken.found, place, broken.remedy)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plug-in may raise anything, SystemExit too
            text = str(error) if isinstance(error, UserError | RunError) else f"{type(error).__name__}: {error}"
            return _broken(promise, text, self.place(error, promise.method), remedy_for(error))
        return Finding(promise=promise.text, state=State.kept)

    def place(self, error: BaseException, method: str) -> str:
        """Return ` (file:line)` of the line in the plug-in that an error is about: where it was raised; the method that
        its text names, as `Block.observe()`; or `method`."""
        if (place := line_of_plugin(error)) is not None:
            return f" ({at_line(*place)})"
        if place_in := line_in(getattr(error, "remote_traceback", "")):
            return place_in
        if remedy_for(error):
            return self.line_of("__init__")
        named = re.search(r"\w+\.(\w+)\(\)", str(error))
        return (self.line_of(named[1]) if named else "") or self.line_of(_method_in(str(error)) or method)


def _broken(promise: Promise[Any], found: str, place: str, remedy: str) -> Finding:
    return Finding(promise=promise.text, state=State.broken, found=found.strip(), place=place, remedy=remedy)


def _is_own(owner: type) -> bool:
    """Return whether a class is one of this package."""
    return owner.__module__.partition(".")[0] == "embodyrl"


def _method_in(text: str) -> str:
    """Return the method of a slot whose numbers a simulator's error is about."""
    return "step" if "reward is" in text else "observe" if "proprio[" in text else ""


def line_in(text: str) -> str:
    """Return ` (file:line)` of the innermost line in a traceback, or in the stacks of threads, that is neither in this
    package nor in what is installed; empty if there is none."""
    known = (PACKAGE, sys.prefix, sys.base_prefix, "<")
    # The stacks of threads are written by `faulthandler`, which escapes all but ASCII.
    text = re.sub(r"\\(?:x[\da-f]{2}|u[\da-f]{4}|U[\da-f]{8})", lambda match: chr(int(match[0][2:], 16)), text)
    found = [each for each in re.findall(r'File "(.+?)", line (\d+)', text) if not each[0].startswith(known)]
    if not found:
        return ""
    file, line = found[0 if "most recent call first" in text else -1]
    return f" ({at_line(file, int(line))})"


REMEDIES = {
    "before Module.__init__": "call super().__init__(config, simulator, chunk_size) first in __init__",
    "has no attribute 'spec'": "set self.spec = PolicySpec(...) in __init__",
    "has no attribute '_closed'": "call super().__init__(spec, num_slots) at the end of __init__",
    "SlotSimulator.__init__() missing": "call super().__init__(spec, num_slots)",
    "already exists": "choose another name for it: torch.nn.Module has this attribute",
}
"""Remedies for what Python and torch say of usual mistakes in `__init__`, by a part of their text."""


def remedy_for(error: BaseException) -> str:
    """Return the remedy for an error that does not say it; empty if there is none."""
    return next((remedy for part, remedy in REMEDIES.items() if part in str(error)), "")
