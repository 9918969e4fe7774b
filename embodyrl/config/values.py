"""Checks single values: type, limits, interpolations."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from embodyrl.config.issues import ConfigIssue
from embodyrl.errors import did_you_mean, has_controls, near_match, without_controls

LARGEST_TEXT = 1_000_000
"""Most characters of a config, and of the values of its interpolations."""
MOST_VALUES = 20_000
"""Most single values, sections and lists of a config."""
DEEPEST = 50
"""Deepest nesting of sections and lists."""
LARGEST_WHOLE = 2**63 - 1
"""Largest whole number: numpy and torch keep them in 64 bits, with a sign."""
MISSING = "???"
"""OmegaConf's mark for a mandatory value, which it treats as missing."""
WITHOUT_CONTROLS = "leave them out: names and task descriptions are shown on screens"
MOST_INTERPOLATIONS = 100
"""Most interpolations in one text."""
_START = r"(?<!\\)(?:\\\\)*\$\{"  # no backslash before it, or an even number of them
REFERENCE = re.compile(_START + r"\s*(\.*)([\w.\[\]-]+)\s*\}")
"""Matches `${section.setting}`, also relative, with dots in front."""
_KNOWN = re.compile(_START + r"\s*(?:\.*[\w.\[\]-]+\s*\}|(?!oc\.(?:select|create|dict|deprecated))[\w.-]+\s*:)")
_ANY = re.compile(_START)


def _wrong(message: str, hint: str) -> ConfigIssue:
    """Return an issue without a path; the caller prints it as `<setting> <message> - <hint>`."""
    return ConfigIssue((), message, hint)


def nested(value: Any) -> Iterator[Any]:
    """Yield a value and all values nested in its mappings and lists."""
    yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nested(child)


def keys(value: Any) -> Iterator[Any]:
    """Yield the keys of all mappings nested in a value."""
    for each in nested(value):
        if isinstance(each, dict):
            yield from each


def is_missing(value: Any) -> bool:
    """Return whether a value is OmegaConf's mark for a mandatory value."""
    return isinstance(value, str) and value == MISSING


class Interpolation(str):
    """A text with `${...}` that is written unchanged, so that it is resolved again when the file is read."""


def escape(value: Any) -> Any:
    """Escape `${` in a resolved value, so that a file with it reads back the same. Texts of type `Interpolation` stay
    unchanged."""
    if isinstance(value, dict):
        return {key: escape(child) for key, child in value.items()}
    if isinstance(value, list):
        return [escape(child) for child in value]
    return value.replace("${", "\\${") if isinstance(value, str) and not isinstance(value, Interpolation) else value


def show(value: Any) -> str:
    """Write a value as in YAML, shortened to 60 characters."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def written(member: Enum) -> str:
    """Return the text that stands for an enum's member in a config: its value, or its name if the value is no text."""
    return member.value if isinstance(member.value, str) else member.name


def choices_in(kind: Any) -> list[str]:
    """Return the texts that are legal for an enum or a `Literal`; empty for other types."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [written(member) for member in kind]
    return list(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else []


def choose(kind: Any, text: str) -> Any:
    """Return the member of an enum or the value of a `Literal` that a text stands for; None if there is none. Names of
    members are read too, because earlier versions wrote them."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        return text if text in choices_in(kind) else None
    return next((member for member in kind if written(member) == text), None) or kind.__members__.get(text)


def check_interpolations(text: str) -> ConfigIssue | None:
    """Return what is wrong with the `${...}` in a text, or None."""
    if "${" in text:
        if text.count("${") > MOST_INTERPOLATIONS:
            return _wrong(f"holds more than {MOST_INTERPOLATIONS} interpolations", "write the value out")
        # Here, because importing it takes longer than a shell may take to complete a word.
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            OmegaConf.create({"text": text})
        except OmegaConfBaseException:
            message = f"= {show(text)} is no complete interpolation"
            return _wrong(message, "write ${section.setting}, or \\${ for the characters themselves")
        if len(_ANY.findall(text)) > len(_KNOWN.findall(text)):
            message = f"= {show(text)} is no interpolation that is known here"
            return _wrong(message, "write ${section.setting}, ${oc.env:NAME}, or \\${ for the characters themselves")
    return None


def check_value(value: Any, kinds: tuple[Any, ...], limits: Mapping[str, Any], example: Any) -> ConfigIssue | None:
    """Return what is wrong with a single value (no section, list or mapping), or None.

    Args:
        value: the value.
        kinds: types it may have, without None.
        limits: metadata of the field, see `config.schema.setting`.
        example: a legal value for the message, or None.
    """
    if has_controls(value):
        return _wrong(f"= {without_controls(show(value))} holds control characters", WITHOUT_CONTROLS)
    words = limits.get("words") or ()
    if words and isinstance(value, str):
        return _check_word(value, words, kinds, limits)
    for kind in kinds:
        if choices_in(kind):
            return _check_choice(value, kind)
    if bool in kinds:
        return None if isinstance(value, bool) else _not_switch(value, words)
    if kinds == (str,):
        return None if isinstance(value, str) else _not_text(value)
    return _check_number(value, kinds, limits, example)


def _not_text(value: Any) -> ConfigIssue:
    quoted = "" if isinstance(value, list | dict) else "put it in quotes"
    return _wrong(f"must be text, got {show(value)}", quoted or "write a single name")


def _not_switch(value: Any, words: tuple[str, ...]) -> ConfigIssue:
    wanted, legal = (f" or {_either(words)}", "true, false") if words else ("", "true or false")
    return _wrong(f"must be a switch{wanted}, got {show(value)}", f"write {legal}{wanted}")


def _check_choice(value: Any, kind: Any) -> ConfigIssue | None:
    allowed = choices_in(kind)
    if isinstance(value, str) and choose(kind, value) is not None:
        return None
    by_lower_case = {each.lower(): each for each in allowed}
    near = near_match(value.lower(), by_lower_case) if isinstance(value, str) else None
    remedy = f"did you mean {by_lower_case[near]!r}?" if near else "choose one of them"
    if isinstance(value, bool):
        remedy = "choose one of them (YAML reads on, off, yes and no as true and false unless they are in quotes)"
    elif str(value) in allowed:
        remedy = "put it in quotes"
    return _wrong(f"must be one of {', '.join(allowed)}; got {show(value)}", remedy)


def _check_word(
    value: str, words: tuple[str, ...], kinds: tuple[Any, ...], limits: Mapping[str, Any]
) -> ConfigIssue | None:
    if value in words:
        return None
    if bool in kinds:
        issue = _not_switch(value, words)
        return dataclasses.replace(issue, hint=did_you_mean(value, words, otherwise=issue.hint))
    wanted = f"{'a number' if float in kinds else 'a whole number'} or {_either(words)}"
    if _as_number(value) is not None:
        return _wrong(f"must be {wanted}, got the text {show(value)}", "remove the quotes")
    remedy = did_you_mean(value, words, otherwise=f"write a number{_range(limits)}, or {_either(words)}")
    return _wrong(f"must be {wanted}, got {show(value)}", remedy)


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(repr(word) for word in words)


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _check_number(value: Any, kinds: tuple[Any, ...], limits: Mapping[str, Any], example: Any) -> ConfigIssue | None:
    is_whole = float not in kinds
    wanted = "a whole number" if is_whole else "a number"
    words = limits.get("words") or ()
    wanted += f" or {_either(words)}" if words else ""
    suggestion = f"write {wanted}, as in {show(example)}" if example is not None else f"write {wanted}{_range(limits)}"
    if isinstance(value, str):
        remedy = "remove the quotes" if _as_number(value) is not None else suggestion
        return _wrong(f"must be {wanted}, got the text {show(value)}", remedy)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _wrong(f"must be {wanted}, got {show(value)}", suggestion)
    if not math.isfinite(value):
        return _wrong(f"must be a finite number, got {show(value)}", suggestion)
    if abs(value) > LARGEST_WHOLE and (is_whole or isinstance(value, int)):
        return _wrong(f"= {show(value)} does not fit into 64 bits", f"use a whole number{_range(_bounded(limits))}")
    if is_whole and isinstance(value, float):
        remedy = f"write {int(value)}" if value == int(value) else f"write {math.floor(value)} or {math.ceil(value)}"
        return _wrong(f"must be {wanted}, got {show(value)}", remedy)
    return _check_range(value, limits)


def _bounded(limits: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return limits with the largest number in place of an upper bound that there is none of."""
    is_bounded = any(limits.get(name) is not None for name in ("high", "below"))
    return limits if is_bounded else {**limits, "high": LARGEST_WHOLE}


def _check_range(value: float, limits: Mapping[str, Any]) -> ConfigIssue | None:
    low, high, above, below = (limits.get(name) for name in ("low", "high", "above", "below"))
    too_small = (low is not None and value < low) or (above is not None and value <= above)
    too_large = (high is not None and value > high) or (below is not None and value >= below)
    if too_small or too_large:
        return _wrong(f"= {show(value)} is too {'small' if too_small else 'large'}", f"use a value{_range(limits)}")
    return None


def legal_values(kinds: tuple[Any, ...], limits: Mapping[str, Any]) -> str:
    """Describe the values that `check_value` accepts, apart from their type; empty if that is all."""
    if choices := [choice for kind in kinds for choice in choices_in(kind)]:
        return f"one of {', '.join(choices)}"
    switch = "true or false" if bool in kinds and limits.get("words") else ""
    parts = (switch, _range(limits).removeprefix(" of").strip(), *(limits.get("words") or ()))
    return ", or ".join(part for part in parts if part)


def _written(limit: float) -> str:
    """Return a limit as people write it: whole numbers with all of their digits."""
    return str(int(limit)) if float(limit).is_integer() else f"{limit:g}"


def _range(limits: Mapping[str, Any]) -> str:
    """Return the legal range as text, with a leading space."""
    parts = [f"of {_written(limits['low'])} or more"] if limits.get("low") is not None else []
    parts += [f"above {_written(limits['above'])}"] if limits.get("above") is not None else []
    parts += [f"up to {_written(limits['high'])}"] if limits.get("high") is not None else []
    parts += [f"below {_written(limits['below'])}"] if limits.get("below") is not None else []
    if limits.get("low") is not None and limits.get("high") is not None:
        return f" from {_written(limits['low'])} to {_written(limits['high'])}"
    return " " + " and ".join(parts) if parts else ""
