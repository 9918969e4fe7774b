"""A config of RLinf while it is converted: settings to write, and what becomes of each key."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from embodyrl.migrate.files import RLinfConfig, RLinfError, is_open
from embodyrl.migrate.notes import ABSENT, DEAD, NOTES, TWINS

MISSING = object()
OPEN = "what OmegaConf would compute is not known here: write the value that it stands for"
"""What is said of a value that is left as it is written."""
UNKNOWN = "no setting here is known to mean it"
LONGEST = 80
"""Characters of a value that a message shows."""
MOST = 10**9
"""Largest number of envs, steps, episodes that is read."""


@dataclass(frozen=True)
class Line:
    """A setting to write, and the keys it comes from."""

    value: Any
    note: str


@dataclass
class Migration:
    """A converted config.

    Args:
        source: the values to convert.
    """

    source: RLinfConfig
    groups: dict[str, str] = field(default_factory=dict)
    """Choices of `defaults`."""
    lines: dict[str, Line] = field(default_factory=dict)
    """Settings by full name."""
    converted: set[str] = field(default_factory=set)
    """Keys whose meaning the result has."""
    differs: dict[str, str] = field(default_factory=dict)
    """Keys without a counterpart, or with one that is not quite the same, and the reason."""
    written: dict[str, str] = field(default_factory=dict)
    """Keys as the file writes them; RLinf may have them in another place now."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; null counts as absent, and so does a text that a resolver would replace, which is noted."""
        value = self.source.values.get(key)
        if is_open(value):
            self.differs[key] = OPEN
            return default
        return default if value is None or value == "None" else value

    def number(self, key: str, default: float) -> float:
        """Return a value as a number.

        Raises:
            RLinfError: it is none.
        """
        value = self.get(key, default)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise RLinfError(f"{key} = {shown(value)} is no number", "write the number that it stands for")
        return number

    def count(self, key: str, default: int) -> int:
        """Return how many there are of something.

        Raises:
            RLinfError: it is no number, or none that something can be counted by.
        """
        value = int(self.number(key, default))
        if not 1 <= value <= MOST:
            raise RLinfError(f"{key} = {value} is not within 1 .. {MOST}", "write how many there are")
        return value

    def write(self, setting: str, value: Any, *keys: str, why: str = "") -> None:
        """Write a setting whose value follows from `keys`; those that are absent are left out."""
        present = [key for key in keys if key in self.source.values]
        self.converted |= {key for key in present if not is_open(self.source.values[key])}
        note = " and ".join(self.written[key] for key in present)
        self.lines[setting] = Line(value, ": ".join(filter(None, (note, why))))

    def copy(self, setting: str, key: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        """Write a setting that has the value of one key, if that is there."""
        if (value := self.get(key, MISSING)) is not MISSING:
            self.write(setting, self.number(key, 0.0) if convert is float else convert(value), key)

    def switch(self, setting: str, value: Any, key: str, why: str = "") -> bool:
        """Write a setting that a key asks for, if it does; returns whether it does."""
        if asks := bool(self.get(key)):
            self.write(setting, value, key, why=why)
        return asks

    def differ(self, key: str, why: str) -> None:
        """Account for a key that cannot be converted, if it is there."""
        if key in self.source.values:
            self.differs[key] = why

    @property
    def dead(self) -> dict[str, str]:
        """Keys without effect in RLinf, and the reason."""
        left = self.source.values.keys() - self.converted - self.differs.keys()
        return {key: why for key, why in DEAD.items() if key in left}

    @property
    def needless(self) -> dict[str, str]:
        """Keys for which there is nothing to set here, and the reason."""
        return {key: why for key, (needless, why) in self._explained() if needless}

    @property
    def without_counterpart(self) -> dict[str, str]:
        """Keys that have none here, or one that is not quite the same, and the reason if it is known."""
        return {key: why for key, (needless, why) in self._explained() if not needless} | self.differs

    def _explained(self) -> list[tuple[str, tuple[bool, str]]]:
        """Return keys that are left, whether there is nothing to set for each, and the reason: both depend on its
        value."""
        known = {*self.converted, *self.differs, *DEAD}
        return [(key, self._explain(key, value)) for key, value in self.source.values.items() if key not in known]

    def _explain(self, key: str, value: Any) -> tuple[bool, str]:
        for patterns, note in NOTES.items():
            if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns.split()):
                return note.of(value)
        for theirs, (ours, why) in TWINS.items():
            twin = ours + key.removeprefix(theirs)
            if key.startswith(theirs) and value not in ABSENT:
                there = self.source.values.get(twin)
                return (True, why) if value == there else (False, f"{why}, and {twin} = {there}")
        if is_open(value):
            return False, OPEN
        asks_for_nothing = value is False or value in ABSENT or value == -1
        return asks_for_nothing, "off, or not given" if asks_for_nothing else UNKNOWN


def shown(value: Any) -> str:
    """Return a value of a stranger's file as short text for a message."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
