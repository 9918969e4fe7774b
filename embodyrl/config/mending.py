"""Remedies that are values of settings, tried out together: what else they make necessary, and the lines to write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from embodyrl.config.build import inline
from embodyrl.config.compose import Composed, Settings
from embodyrl.config.edit import as_lines
from embodyrl.config.files import Origin
from embodyrl.config.issues import COMMAND_LINE, LEAVE_OUT, ConfigIssue, KeyPath, Location, dotted, key_path

ROUNDS = 8
"""Most rounds of remedies that make others necessary."""


def fixes_of(faults: Sequence[ConfigIssue]) -> dict[KeyPath, Any]:
    """Return the values with which faults are fixed, of several for a setting the first."""
    found: dict[KeyPath, Any] = {}
    for fault in faults:
        for name, value in fault.fix.items():
            found.setdefault(key_path(name), value)
    return found


def mend(
    faults: Sequence[ConfigIssue], check: Callable[[Mapping[KeyPath, Any]], list[ConfigIssue]]
) -> tuple[dict[KeyPath, Any], list[ConfigIssue]]:
    """Try the remedies of faults, and those of the faults that these lead to.

    Args:
        faults: of the config as it is.
        check: returns the faults with these values.

    Returns:
        The values, and the faults that follow from them.
    """
    fix, more = fixes_of(faults), []
    known = {fault.message for fault in faults}
    for _ in range(ROUNDS):
        new = [fault for fault in check(fix) if fault.message not in known]
        more += [replace(fault, message=f"then {fault.message}") for fault in new]
        known |= {fault.message for fault in new}
        values = {path: value for path, value in fixes_of(new).items() if path not in fix}
        if not values:
            break
        fix |= values
    return fix, more


def apply_fix(settings: Settings, fix: Mapping[KeyPath, Any], whole: Location) -> None:
    """Set the values of a fix, each in the place of the one that it replaces, else of the file as a whole."""
    for path, value in fix.items():
        if value is not LEAVE_OUT:
            settings.put(path, value, settings.origins.get(path, Origin(whole, whole)))
        elif path in settings.origins:
            settings.take(path)


def paste(fix: Mapping[KeyPath, Any], faults: Sequence[ConfigIssue], composed: Composed) -> str:
    """Return the lines that fix faults, for the user to copy; empty where the faults' own remedies say as much."""
    values = {path: value for path, value in fix.items() if value is not LEAVE_OUT}
    if len(values) < 2:
        return ""
    if any(fault.location is not None and fault.location.file == COMMAND_LINE for fault in faults):
        words = " ".join(f"{dotted(path)}={inline(value)}" for path, value in values.items())
        return f"add to the command line: {words}"
    data: dict[str, Any] = {}
    for path, value in values.items():
        section = data
        for key in path[:-1]:
            section = section.setdefault(str(key), {})
        section[str(path[-1])] = value
    chosen = [composed.chosen[fault.location] for fault in faults if fault.location in composed.chosen]
    swap = f" (or: embodyrl swap {chosen[0]} {composed.files[0]})" if chosen else ""
    return f"to paste into {composed.files[0]}{swap}:\n{as_lines(data, '  ')}"
