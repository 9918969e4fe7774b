"""Reads `key=value` of the command line: choices of config groups, and single values."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from embodyrl.config.compose import Settings
from embodyrl.config.fields import find_setting
from embodyrl.config.issues import COMMAND_LINE, ConfigIssue, KeyPath, Location, dotted
from embodyrl.config.values import DEEPEST, check_interpolations

_KEY = re.compile(r"^(\+\+|\+|~)?([\w-]+(?:[./][\w-]+)*)$")


LONGEST = 10_000
"""Most characters of an override."""


@dataclass(frozen=True)
class Override:
    """One value from the command line."""

    path: KeyPath
    text: str
    """The value as it was typed."""
    value: Any
    problem: str
    """Reason why the value cannot be read; empty if it can."""
    adds: bool
    """Whether it was written with + or ++."""


@dataclass
class Overrides:
    """Overrides of the command line."""

    groups: dict[str, str] = field(default_factory=dict)
    """Choices of config groups: `env` -> `maniskill/push_cube`."""
    values: list[Override] = field(default_factory=list)
    faults: list[ConfigIssue] = field(default_factory=list)


def on_command_line(path: KeyPath, message: str, remedy: str) -> ConfigIssue:
    """Return a fault of the command line."""
    return ConfigIssue((path,), message, remedy, Location(COMMAND_LINE))


def parse_overrides(texts: Sequence[str], is_group: Callable[[str], bool]) -> Overrides:
    """Read the overrides of the command line by Hydra's grammar.

    Args:
        texts: arguments of the form `key=value`.
        is_group: whether a key is the name of a config group.
    """
    parsed = Overrides()
    for text in texts:
        key, equals, value = text.partition("=")
        match = _KEY.match(key)
        if match is None or (not equals and match[1] != "~"):
            parsed.faults.append(on_command_line((), f"{text!r} is not an override", _remedy_for_key(key, value)))
        elif len(text) > LONGEST:
            remedy = "write it into the file"
            parsed.faults.append(on_command_line((), f"{match[2]}=... is longer than {LONGEST} characters", remedy))
        elif match[1] == "~":
            remedy = "set it to a value, or leave it out of the file"
            parsed.faults.append(on_command_line((), f"{text!r}: settings cannot be deleted", remedy))
        else:
            _add(parsed, match[2], match[1] is not None, value, is_group)
    return parsed


def _remedy_for_key(key: str, value: str) -> str:
    if "[" in key:
        name = key.partition("[")[0]
        return f"set the whole list, as in '{name}=[a,b]'"
    if "@" in key:
        return f"write {key.partition('@')[0]}={value}"
    return "write key=value, as in run.iterations=50"


def _add(parsed: Overrides, key: str, adds: bool, text: str, is_group: Callable[[str], bool]) -> None:
    """Sort one well-formed override into groups or values."""
    value, problem = _read(text)
    if is_group(key) and isinstance(value, str) and not problem:
        if value in ("", "_self_") or "${" in value:
            message = f"{key}={text} names no option of the group {key!r}"
            parsed.faults.append(on_command_line((key,), message, "`embodyrl list configs` shows them"))
        elif adds:
            message = f"'+{key}={text}' would add to the defaults list"
            parsed.faults.append(on_command_line((), message, f"write {key}={text} to choose another {key}"))
        else:
            parsed.groups[key] = value
    elif "/" in key:
        parsed.faults.append(on_command_line((), f"no config group {key!r}", "`embodyrl list configs` shows them"))
    else:
        parsed.values.append(Override(tuple(key.split(".")), text, value, problem, adds))


def _read(text: str) -> tuple[Any, str]:
    """Read a value by Hydra's grammar; returns it with the reason why it is illegal, or ""."""
    try:
        parsed = OverridesParser.create().parse_override(f"key={text}")
    except HydraException as error:
        why = (str(error).splitlines() or [""])[0]
        return None, why if " while evaluating " in why else _why_illegal(text)
    except RecursionError:
        return None, "nested too deeply"
    if parsed.is_sweep_override():
        return None, "several values; a list needs brackets, and one run takes one value"
    return parsed.value(), ""


def _why_illegal(text: str) -> str:
    """Return why a text is no value, in other words than the parser's, which are those of its grammar."""
    if text.startswith("="):
        return "a second equals sign"
    for mark in "'\"":
        if text.count(mark) % 2:
            return f"the quote {mark} is not closed"
    for opening, closing in ("[]", "{}", "()"):
        if text.count(opening) != text.count(closing):
            return f"{opening} and {closing} do not match"
    return "a character in it has a meaning of its own"


def apply_override(settings: Settings, override: Override, schema: type) -> ConfigIssue | None:
    """Apply one override to the settings; returns a fault if it is illegal."""
    setting, is_inside_map = find_setting(schema, settings.data, override.path)
    above = find_setting(schema, settings.data, override.path[:-1])[0]
    if above is not None and above.section is None and not is_inside_map:
        name, key = dotted(override.path[:-1]), override.path[-1]
        message = f"{name} is a single setting and has no {key!r} below it"
        return on_command_line(override.path, message, f"write {name}={override.text}")
    if override.adds and not is_inside_map:
        name = dotted(override.path)
        if setting is not None:
            return on_command_line(override.path, f"'+{name}' would add a setting that exists", f"write {name}=...")
        remedy = "only free-form maps take new keys (`embodyrl run --print-config` shows all settings)"
        return on_command_line(override.path, f"'+{name}' would add a setting that nothing reads", remedy)
    value = override.value
    if setting is not None and setting.kinds == (str,) and not is_inside_map:
        if override.problem or not (isinstance(value, str) or (value is None and setting.nullable)):
            value = override.text
    elif override.problem:
        name = dotted(override.path)
        message = f"the value of {name}={override.text} cannot be read ({override.problem})"
        plain = override.text.lstrip("= ")
        remedy = f"write {name}={plain}" if plain != override.text else "put it in quotes, or in [brackets] for a list"
        return on_command_line(override.path, message, remedy)
    if len(override.path) + _depth(value) > DEEPEST:
        message = f"{override.path[0]} is nested more than {DEEPEST} deep"
        return on_command_line(override.path[:1], message, "flatten it")
    problem = check_interpolations(value) if isinstance(value, str) else None
    if problem is not None:
        return on_command_line(override.path, f"{dotted(override.path)} {problem.message}", problem.hint)
    settings.override(override.path, value)
    return None


def _depth(value: Any) -> int:
    """Return the nesting depth of mappings and lists in a value."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(_depth, children), default=0)
