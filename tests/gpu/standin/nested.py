"""Arguments and results of operations, which are nested in lists, tuples and dicts alone: torch's own functions for
nested values ask much more of each, and took a third of the time of all that a test computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leaves(value: Any) -> list[Any]:
    """Return the innermost values, in their order."""
    found: list[Any] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    if isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)
    else:
        found.append(value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same lists, tuples and dicts of what a function makes of the innermost values."""
    if isinstance(value, tuple):
        return tuple([mapped(function, each) for each in value])
    if isinstance(value, list):
        return [mapped(function, each) for each in value]
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    return function(value)
