"""A method is a folder: no other room imports one, or knows one by its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import embodyrl
from embodyrl.registry import ALGORITHMS

PACKAGE = Path(embodyrl.__file__).parent
FOR_ALL = {"embodyrl.methods.learner", "embodyrl.methods.builtin"}
"""Modules that say what every method is."""
NAMED = {
    "algorithms/builtin.py": "losses, advantages and rewards that are called like methods",
    "api.py": "the method of a config that only makes simulators",
    "cli/collect.py": "the next command of an example",
    "cli/init.py": "what is proposed first",
    "cli/swap.py": "an example",
    "config/renames.py": "words of other libraries",
    "config/schema.py": "the usual policy loss, which is called like a method",
    "data/check.py": "what else demonstrations without rewards are good for",
    "data/transitions.py": "the same",
    "models/flow/steering.py": "the same, of a policy whose noise is chosen",
    "models/judging.py": "the command that makes a classifier",
}
"""Files outside of the methods' folders that name one, and why. Not those that translate configs of other libraries."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """All modules outside of the folders of methods, by their path."""
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        if not path.startswith("methods/"):
            yield path, ast.parse(file.read_text())


def test_no_other_room_imports_a_method() -> None:
    imported = [
        f"{path}:{node.lineno} {name}"
        for path, tree in modules()
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        if name.startswith("embodyrl.methods.") and name not in FOR_ALL
    ]
    assert not imported


def test_no_other_room_names_a_method() -> None:
    names = {entry.name for entry in ALGORITHMS.entries() if entry.source == "built-in"}
    found = set()
    for path, tree in modules():
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs]
        if any(isinstance(text, str) and names.intersection(re.findall(r"[a-z_]+", text)) for text in texts):
            found.add(path)
    translating = {path for path in found if "rlinf" in path or path.startswith("migrate/")}
    assert found - translating == NAMED.keys()
