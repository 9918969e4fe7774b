"""Converts plain data to the frozen config and back, and writes YAML in which every setting is documented."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import textwrap
import typing
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, cast

import yaml

from embodyrl.config.fields import Setting, class_at, docs_of, settings_of
from embodyrl.config.files import UNREADABLE, PlainLoader
from embodyrl.config.issues import KeyPath
from embodyrl.config.schema import Config
from embodyrl.config.values import Interpolation, choices_in, choose, escape, is_missing, legal_values, nested, written


def build_config(data: Mapping[str, Any]) -> Config:
    """Build the frozen config from checked plain data."""
    return cast(Config, build_section(Config, data))


def build_section(section: type, data: Mapping[str, Any]) -> Any:
    """Build the frozen settings of one section from checked plain data. Sections that choose a component by `name` get
    the options class of that component."""
    chosen = class_at(section, data)
    values = {name: _built(setting, data[name]) for name, setting in settings_of(chosen).items() if name in data}
    return chosen(**values)


def _built(setting: Setting, value: Any) -> Any:
    """Build the value of a setting from plain data: sections from mappings, enums from texts, numbers of the declared
    type, and copies of lists and mappings."""
    if value is None:
        return None
    if setting.section is not None:
        return build_section(setting.section, value)
    if setting.section_of_entries is not None:
        return [build_section(setting.section_of_entries, each) for each in value]
    kinds = typing.get_args(setting.kinds[0])
    if setting.field.metadata.get("alone") and not isinstance(value, list):
        return [_single(kinds, value)]
    if isinstance(value, list):
        return [_single(kinds, each) for each in value]
    if isinstance(value, dict):
        return {key: _single(kinds[1:], each) for key, each in value.items()}
    return _single(setting.kinds, value)


def _single(kinds: tuple[Any, ...], value: Any) -> Any:
    """Build a single value of one of these types."""
    for kind in kinds:
        if isinstance(value, str) and choices_in(kind):
            return choose(kind, value)
    if float in kinds and int not in kinds and isinstance(value, int):
        return float(value)
    return copy.deepcopy(value)


def with_values(node: Any, values: Mapping[KeyPath, Any]) -> Any:
    """Return a config, or a section, mapping or list of it, with other values at some paths. Types are not checked."""
    if () in values:
        return values[()]
    below: dict[str | int, dict[KeyPath, Any]] = {}
    for path, value in values.items():
        below.setdefault(path[0], {})[path[1:]] = value
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return dataclasses.replace(node, **{str(k): with_values(getattr(node, str(k)), v) for k, v in below.items()})
    if isinstance(node, dict):
        return node | {key: with_values(node[key], each) for key, each in below.items()}
    return [with_values(child, below[index]) if index in below else child for index, child in enumerate(node)]


def build_draft(
    data: Mapping[str, Any], doubtful: set[KeyPath], incomplete: Collection[str]
) -> tuple[Config, set[KeyPath]]:
    """Build a config from data with faults, so that the rules can check the rest of it.

    Args:
        data: composed settings.
        doubtful: settings and sections that are wrong.
        incomplete: top-level sections that lack settings because a group file could not be used.

    Returns:
        The config, and every path in it with a stand-in for a wrong or missing value.
    """
    doubtful = set(doubtful)
    usable = _salvage(Config, data, (), doubtful)
    for name in incomplete:
        section = settings_of(Config).get(name)
        if section is not None and section.section is not None:
            doubtful |= set(_not_given(section.section, data.get(name), (name,)))
    return build_config(usable), doubtful


def _not_given(section: type, data: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the paths of a section's settings that `data` lacks."""
    given = data if isinstance(data, dict) else {}
    for name, setting in settings_of(class_at(section, given)).items():
        if setting.section is not None and name in given:
            yield from _not_given(setting.section, given[name], (*path, name))
        elif name not in given:
            yield (*path, name)


def _salvage(section: type, data: Any, path: KeyPath, doubtful: set[KeyPath]) -> dict[str, Any]:
    """Return the usable settings of a section, with stand-ins for required ones; adds these to `doubtful`."""
    given = data if isinstance(data, dict) else {}
    usable: dict[str, Any] = {}
    for name, setting in settings_of(class_at(section, given)).items():
        here = (*path, name)
        is_sound = not any(bad[: len(here)] == here for bad in doubtful)
        if is_sound and any(each is UNREADABLE for each in nested(given.get(name))):
            doubtful.add(here)  # a group file's own fault has a path relative to that file
            is_sound = False
        if setting.section is not None and not (setting.nullable and given.get(name) is None):
            usable[name] = _salvage(setting.section, given.get(name), here, doubtful)
        elif name in given and (is_sound or (setting.kinds == (str,) and _is_text(given[name]))):
            usable[name] = given[name]
        elif setting.required:
            usable[name] = _stand_in(setting.kinds[0])
            doubtful.add(here)
    return usable


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not is_missing(value)


_STAND_INS: dict[Any, Any] = {str: "", int: 1, float: 1.0, bool: False}


def _stand_in(kind: Any) -> Any:
    """Return a legal value of a type, for a required setting that has none."""
    if choices := choices_in(kind):
        return choices[0]
    return _STAND_INS.get(kind, {} if typing.get_origin(kind) is dict else [])


def to_plain(config: Any) -> dict[str, Any]:
    """Convert the config to mappings, lists and single values, in the schema's order."""
    return {field.name: plain_value(getattr(config, field.name)) for field in dataclasses.fields(config)}


def differences(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two configs, by full name, with both values; None where one has no such
    setting."""
    old, new = flat(to_plain(before)), flat(to_plain(after))
    names = dict.fromkeys([*old, *new])
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def flat(section: Mapping[str, Any], prefix: str = "", *, into_lists: bool = False) -> dict[str, Any]:
    """Return nested mappings as one, by full name, for instance `run.name`; with `into_lists` also mappings in lists,
    for instance `parts[0].seed`."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= flat(value, f"{name}.", into_lists=into_lists)
        elif into_lists and isinstance(value, list) and any(isinstance(each, dict) for each in value):
            found |= flat({f"{name}[{number}]": each for number, each in enumerate(value)}, into_lists=True)
        else:
            found[name] = value
    return found


def plain_value(value: Any) -> Any:
    """Convert one value, or section, of the config as `to_plain` does."""
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Enum):
        return written(value)
    if isinstance(value, dict):
        return {key: plain_value(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(child) for child in value]
    return value


def count_settings(config: Any) -> int:
    """Count the single settings of the config."""
    values = (getattr(config, field.name) for field in dataclasses.fields(config))
    return sum(count_settings(value) if dataclasses.is_dataclass(value) else 1 for value in values)


def config_hash(config: Config) -> str:
    """Return the SHA-256 of every setting except the run directory (`run.dir`), which does not change what the run
    computes."""
    plain = to_plain(config)
    del plain["run"]["dir"]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_WIDTH = 110


def to_commented_yaml(config: Config) -> str:
    """Write the whole config, one key per line, with each setting's documentation and limits above it. It loads as an
    equal config."""
    return "\n".join(_section(config, "")) + "\n"


def _section(section: Any, indent: str) -> Iterator[str]:
    schema: type = type(section)
    docs = docs_of(schema)
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if not indent and dataclasses.is_dataclass(value):
            yield ""
        width = _WIDTH - len(indent) - 2
        text = docs.get(field.name, "")
        text = " ".join([text, *_limits(settings_of(schema)[field.name], text)]).strip()
        yield from (f"{indent}# {line}" for line in textwrap.wrap(text, width))
        if dataclasses.is_dataclass(value):
            yield f"{indent}{field.name}:"
            yield from _section(value, indent + "  ")
        else:
            yield from _entry(field.name, value, indent)


def _limits(setting: Setting, docs: str) -> Iterator[str]:
    """Yield the legal values of a setting in brackets, unless its documentation explains every choice."""
    kind = setting.kinds[0]
    entries = () if choices_in(kind) else typing.get_args(kind)
    legal = legal_values(entries or setting.kinds, setting.field.metadata)
    if legal and not all(f"{choice}:" in docs for choice in legal.removeprefix("one of ").split(", ")):
        yield f"[each {legal}]" if entries else f"[{legal}]"


def _entry(key: str, value: Any, indent: str) -> Iterator[str]:
    """Yield the lines of one key and its value. Mappings and lists of sections are indented below the key."""
    if isinstance(value, dict) and value:
        yield f"{indent}{_quoted(key)}:"
        for name, child in value.items():
            yield from _entry(name, child, indent + "  ")
    elif isinstance(value, list) and any(dataclasses.is_dataclass(child) for child in value):
        yield f"{indent}{key}:"
        for child in value:
            first, *others = (
                f"{field.name}: {inline(getattr(child, field.name))}" for field in dataclasses.fields(child)
            )
            yield f"{indent}  - {first}"
            yield from (f"{indent}    {other}" for other in others)
    else:
        yield f"{indent}{_quoted(key)}: {inline(value)}"


def inline(value: Any) -> str:
    """Write a value on one line."""
    if dataclasses.is_dataclass(value):
        value = to_plain(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(key)}: {inline(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return _text(written(value))
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Interpolation):
        return _quoted(str(value))
    return _text(value) if isinstance(value, str) else str(value)


def _float(value: float) -> str:
    text = repr(value)
    if text in ("inf", "-inf", "nan"):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[text]
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else text


def _text(text: str) -> str:
    """Write a text as a value, with `${` escaped so that it is not resolved (keys are never resolved)."""
    return _quoted(escape(text))


@lru_cache(maxsize=4096)
def _quoted(text: str) -> str:
    """Write a text, in quotes where YAML would read it as something else; the same few hundred names each time."""
    try:
        listed, mapped = (yaml.load(each, PlainLoader) for each in (f"[{text}]", f"key: {text}"))
        is_plain = listed == [text] and mapped == {"key": text}
    except yaml.YAMLError:
        is_plain = False
    if is_plain and text.isprintable() and not text.startswith("#"):
        return text
    return yaml.dump(text, default_style='"', allow_unicode=True, width=10**9).rstrip("\n")
