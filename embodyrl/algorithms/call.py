"""Call a registered function with just the columns and options that it names."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from embodyrl.errors import UserError, did_you_mean

R = TypeVar("R")


class SignatureError(UserError):
    """Raised when a registered function asks for an argument that nobody provides."""


def options_of(section: Any) -> dict[str, Any]:
    """A component's own options by name, from its section of the config (`config.algorithm.loss`)."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section) if field.name != "name"}


def call_with(function: Callable[..., R], columns: Mapping[str, Any], options: Mapping[str, Any]) -> R:
    """Call `function` with those columns and options that its keyword arguments name.

    A loss, advantage estimator, reward or filter lists what it needs as keyword-only arguments, and nothing else, so
    that its signature is its documentation. `arguments` has looked before the run whether it can have it.

    Args:
        function: of the component.
        columns: what there is of the batch.
        options: the component's own, see `options_of`; no other component's.

    Raises:
        SignatureError: an argument without default is not available; says which are.
    """
    available, arguments = {**columns, **options}, {}
    for name, parameter in _parameters(function).items():
        if name in available:
            arguments[name] = available[name]
        elif parameter.default is inspect.Parameter.empty:
            hint = did_you_mean(name, list(available), lead=" - ")
            raise SignatureError(
                f"{function.__module__}.{function.__qualname__} asks for {name!r}, which is not available{hint} "
                f"(available: {', '.join(sorted(available))})"
            )
    return function(**arguments)


def asks_for(function: Callable[..., Any], name: str) -> bool:
    """Whether a registered function names this argument, so that what costs time is only made where it is used."""
    return name in _parameters(function)


@functools.cache  # looking it up takes as long as several operations on a small minibatch
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
