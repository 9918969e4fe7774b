"""Text of a converted config, and what became of RLinf's keys."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from embodyrl.config.build import inline
from embodyrl.migrate.migration import Migration
from embodyrl.screen import counted

WIDTH = 80
NOTE = 44
"""Column at which comments begin, where there is room."""


SECTIONS = ("seed", "run", "env", "eval", "model", "rollout", "algorithm", "engine", "tracking")


def to_yaml(found: Migration) -> str:
    """Write the settings, each with the keys that it comes from."""
    tree: dict[str, Any] = {name: {} for name in SECTIONS}
    for name, line in found.lines.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = line
    title = f"# Converted by `embodyrl migrate` from {found.source.path.name} of RLinf; behind each setting its source."
    groups = [f"  - {group}: {found.groups[group]}" for group in ("env", "model", "algorithm")]
    return "\n".join([title, "defaults:", *groups, "  - _self_", *_section(tree, "")]) + "\n"


def _section(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if not isinstance(value, dict):
            setting = f"{indent}{key}: {inline(value.value)}"
            note = " ".join(value.note.split())
            yield f"{setting:<{NOTE}}  # {note}" if note else setting
        elif value:
            yield f"{indent}{key}:"
            yield from _section(value, f"{indent}  ")


def account(found: Migration) -> list[str]:
    """Return what became of the keys, for a terminal of 80 columns."""
    groups = ", ".join(f"{group}: {choice}" for group, choice in found.groups.items())
    lines = [f"converted: {counted(len(found.converted & found.source.values.keys()), 'key')}, and {groups}"]
    for name in found.source.missing:
        lines += _wrapped("", f"{name} is not beside it: what it says is unknown")
    for title, keys in (
        ("without effect in RLinf", found.dead),
        ("without an exact counterpart here", found.without_counterpart),
    ):
        lines += ["", f"{title}: {counted(len(keys), 'key')}"] if keys else []
        for key, why in keys.items():
            lines += _wrapped("  ", f"{found.written[key]} = {found.source.values[key]}; {why}")
    reasons: dict[str, list[str]] = {}
    for key, why in found.needless.items():
        reasons.setdefault(why, []).append(found.written[key])
    lines += ["", f"nothing to set here: {counted(len(found.needless), 'key')}"] if reasons else []
    for why, alike in reasons.items():
        shortened = ", ".join(alike) if len(alike) <= 3 else f"{alike[0]} and {len(alike) - 1} more"
        lines += _wrapped("  ", f"{shortened}: {why}")
    return lines


def _wrapped(indent: str, text: str) -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH, indent, f"{indent}    ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False  # keys are copied from here
    return wrapper.wrap(text)
