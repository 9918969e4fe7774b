"""Do the methods of a stranger's class have the names and arguments that they are called with?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from embodyrl.errors import line_of

Fault = tuple[str, str]
"""What is wrong, with its line, and the remedy."""


def wrong_methods(own: type, base: type | None, beside: tuple[str, ...] = ()) -> Iterator[Fault]:
    """Find what a class lacks of its base class or protocol, and the methods that cannot be called as the package calls
    them.

    Args:
        own: the class.
        base: its base class or protocol; None: it is not known.
        beside: further methods to compare.
    """
    expected = {
        name: method
        for name, method in ({} if base is None else _methods(base)).items()
        if not name.startswith("_") or name in beside
    }
    is_protocol = getattr(base, "_is_protocol", False)
    for name, method in expected.items():
        names = list(inspect.signature(method).parameters)[1:]
        found = inspect.getattr_static(own, name, None)
        lacks = found is None if is_protocol else name in getattr(own, "__abstractmethods__", ()) and found is method
        if lacks:
            yield f"{own.__qualname__} lacks {name}(){line_of(own)}", f"write {definition(name, names)}"
        elif found is None or found is method or isinstance(found, staticmethod | classmethod):
            continue
        elif not callable(found):
            message = f"{own.__qualname__}.{name} is a {type(found).__name__}, which cannot be called{line_of(own)}"
            yield message, f"write {definition(name, names)}"
        elif (fault := wrong_signature(found, ["self", *names])) is not None:
            yield f"{own.__qualname__}.{name}{fault}{line_of(found)}", f"write {definition(name, names)}"


def _methods(base: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of a class and its bases, without those of torch and Python."""
    classes = [each for each in reversed(base.__mro__) if each.__module__.startswith("embodyrl.")]
    return {name: each for part in classes for name, each in vars(part).items() if inspect.isfunction(each)}


def wrong_signature(function: Any, names: list[str]) -> str | None:
    """Describe why a function cannot be called with arguments of these names, in this order; None: it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # compiled
        return None
    called = f"is called with ({', '.join(name for name in names if name != 'self')})"
    try:
        signature.bind(*names)
    except TypeError:
        return f"{_short(signature)} {called}"
    for given, name in zip(signature.parameters, names, strict=False):
        if given != name and given in names:
            return f"{_short(signature)} {called}, in this order"
    return None


def _short(signature: inspect.Signature) -> str:
    """Return the names of the arguments as text."""
    stars: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"({', '.join(stars.get(each.kind, '') + each.name for each in signature.parameters.values())})"


def definition(name: str, arguments: list[str]) -> str:
    """Return the first line of a method."""
    return f"def {name}({', '.join(['self', *arguments])})"
