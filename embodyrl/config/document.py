"""Writes a config as YAML in which every setting carries its documentation."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

import yaml

from embodyrl.config.fields import docs_of
from embodyrl.config.marks import PlainLoader
from embodyrl.config.schema import Config
from embodyrl.config.values import Interpolation, escape

_WIDTH = 110


def to_commented_yaml(config: Config) -> str:
    """The whole config, one key per line, with each setting's documentation above it; it loads as an equal config."""
    return "\n".join(_section(config, "")) + "\n"


def _section(section: Any, indent: str) -> Iterator[str]:
    schema: type = type(section)
    docs = docs_of(schema)
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if not indent and dataclasses.is_dataclass(value):
            yield ""
        width = _WIDTH - len(indent) - 2
        yield from (f"{indent}# {line}" for line in textwrap.wrap(docs.get(field.name, ""), width))
        if dataclasses.is_dataclass(value):
            yield f"{indent}{field.name}:"
            yield from _section(value, indent + "  ")
        else:
            yield from _entry(field.name, value, indent)


def _entry(key: str, value: Any, indent: str) -> Iterator[str]:
    """One key and its value; mappings and lists of sections go below it."""
    if isinstance(value, dict) and value:
        yield f"{indent}{_quoted(key)}:"
        for name, child in value.items():
            yield from _entry(name, child, indent + "  ")
    elif isinstance(value, list) and any(dataclasses.is_dataclass(child) for child in value):
        yield f"{indent}{key}:"
        for child in value:
            first, *others = (
                f"{field.name}: {_inline(getattr(child, field.name))}" for field in dataclasses.fields(child)
            )
            yield f"{indent}  - {first}"
            yield from (f"{indent}    {other}" for other in others)
    else:
        yield f"{indent}{_quoted(key)}: {_inline(value)}"


def _inline(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(key)}: {_inline(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return _text(value.name)
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
    """A text as a value: `${` is kept from being resolved (in keys it means nothing)."""
    return _quoted(escape(text))


def _quoted(text: str) -> str:
    """A text, in quotes where YAML would take it for something else."""
    try:
        listed, mapped = (yaml.load(each, PlainLoader) for each in (f"[{text}]", f"key: {text}"))
        is_plain = listed == [text] and mapped == {"key": text}
    except yaml.YAMLError:
        is_plain = False
    if is_plain and text.isprintable() and not text.startswith("#"):
        return text
    return yaml.dump(text, default_style='"', allow_unicode=True, width=10**9).rstrip("\n")
