"""`embodyrl migrate`: writes a config of RLinf as one of embodyrl, and accounts for every key of it."""

from __future__ import annotations

import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from embodyrl.cli.arguments import CommandLineError, check_place
from embodyrl.config import ConfigUse, load_config
from embodyrl.config.build import inline
from embodyrl.config.issues import ConfigError
from embodyrl.config.rlinf import Migration, convert
from embodyrl.config.rlinf_files import read_rlinf
from embodyrl.config.rules import public_checkpoints
from embodyrl.config.schema import LEFT_OPEN
from embodyrl.errors import shell_command, without_controls
from embodyrl.files import write_whole
from embodyrl.screen import counted

WIDTH = 80
NOTE = 44
"""Column at which comments begin, where there is room."""


def migrate(path: Path, out: Path | None) -> int:
    """Convert a config of RLinf and check the result; returns the exit code.

    Args:
        path: the YAML file; files that its `defaults` name are looked up in its folder.
        out: where the result goes; None: to stdout. What is said about it goes to stderr then.

    Raises:
        CommandLineError: `out` exists, or cannot be written.
        RLinfError: the file is no config of RLinf, or has nothing that could be converted.
        ConfigError: a file is not legal YAML, or the result has faults; it is written all the same.
    """
    if out is not None and out.exists():
        raise CommandLineError(f"{out} exists: give a name that is free to --out")
    check_place(out, "--out")
    found = convert(read_rlinf(path))
    text = without_controls(to_yaml(found))
    stream = sys.stderr if out is None else sys.stdout
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "migrated.yaml" if out is None else out
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
        if out is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        print(without_controls("\n".join(account(found))), file=stream)
        try:
            loaded = load_config(file, use=ConfigUse.elsewhere)
        except ConfigError:
            print("\nThe result has faults that the conversion could not decide:", file=stream, flush=True)
            raise
    print(f"\n{out or 'The result'}: OK, {loaded.values} values, 0 faults", file=stream)
    if out is not None:
        known = [*public_checkpoints(loaded.config), "WEIGHTS"]
        weights = f" model.checkpoint={known[0]}" if loaded.config.model.checkpoint == LEFT_OPEN else ""
        print(f"next: {shell_command('plan', out)} --elsewhere, then {shell_command('run', out)}{weights}", file=stream)
    return 0


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
