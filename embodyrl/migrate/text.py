"""Text of a converted config, and what became of RLinf's keys."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from embodyrl.config.build import inline
from embodyrl.migrate.rlinf import Migration
from embodyrl.screen import counted

WIDTH = 80
NOTE = 44
"""Column at which comments begin, where there is room."""


def to_yaml(found: Migration) -> str:
    """Write the settings, each with the keys that it comes from."""
    lines = [
        f"# Converted by `embodyrl migrate` from {found.source.path.name} of RLinf; behind each setting its source."
    ]
    lines += [
        "defaults:",
        *(f"  - {group}: {found.groups[group]}" for group in ("env", "model", "algorithm")),
        "  - _self_",
    ]
    tree: dict[str, Any] = {}
    for name, line in found.lines.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise AssertionError(f"{name} is below a value")
        node[last] = line
    order = ("seed", "run", "env", "eval", "model", "rollout", "algorithm", "engine", "tracking")
    return "\n".join([*lines, *_section({key: tree[key] for key in order if key in tree}, "")]) + "\n"


def _section(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _section(value, f"{indent}  ")
        else:
            setting = f"{indent}{key}: {inline(value.value)}"
            note = " ".join(value.note.split())
            yield f"{setting:<{NOTE}}  # {note}" if note else setting


def account(found: Migration) -> list[str]:
    """Return what became of the keys, for a terminal of 80 columns."""
    groups = ", ".join(f"{group}: {choice}" for group, choice in found.groups.items())
    lines = [f"converted: {counted(sum(key in found.source.values for key in found.converted), 'key')}, and {groups}"]
    for name in found.source.missing:
        lines += _wrapped("", f"{name} is not beside it: what it says is unknown")
    for title, keys in (
        ("without effect in RLinf", found.dead),
        ("without an exact counterpart here", found.without_counterpart),
    ):
        said = {found.written.get(key, key): f"= {found.source.values[key]}; {why}" for key, why in keys.items()}
        lines += _listed(title, said)
    reasons: dict[str, list[str]] = {}
    for key, why in found.needless.items():
        reasons.setdefault(why, []).append(found.written.get(key, key))
    if reasons:
        lines += ["", _titled("nothing to set here", len(found.needless))]
        lines += [line for why, keys in reasons.items() for line in _wrapped("  ", f"{_shortened(keys)}: {why}")]
    return lines


def _shortened(keys: list[str]) -> str:
    """Return keys as text, with those of one section joined."""
    if len(keys) <= 3:
        return ", ".join(keys)
    return f"{keys[0]} and {len(keys) - 1} more"


def _listed(title: str, reasons: Mapping[str, str]) -> list[str]:
    if not reasons:
        return []
    lines = ["", _titled(title, len(reasons))]
    for key, why in reasons.items():
        lines += _wrapped("  ", f"{key} {why}")
    return lines


def _titled(title: str, number: int) -> str:
    return f"{title}: {counted(number, 'key')}"


def _wrapped(indent: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
