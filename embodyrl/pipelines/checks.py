"""Do stages fit together? Checks of their names and columns, before anything runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from embodyrl.config.issues import ConfigIssue
from embodyrl.errors import UnknownNameError, did_you_mean, listed

if TYPE_CHECKING:  # a pipeline checks its stages
    from embodyrl.pipelines.pipeline import Stage

RESOURCES = ("simulators", "policy", "demonstrations", "replay")
"""Available before the first stage: `Iteration.collector`, `Iteration.engine`, `Iteration.demonstrations` and
`Iteration.replay`."""

NAME = re.compile(r"[A-Za-z]\w*")

Where = Callable[[str], tuple[str, ...]]
"""Returns the settings that added a stage, by its name."""


def check_stages(stages: Sequence[Stage], where: Where = lambda name: ()) -> Iterator[ConfigIssue]:
    """Find issues that keep stages from running one after the other: of their names, and if there are none, of their
    columns."""
    issues = list(check_names(stages, where))
    yield from issues or _check_columns([stage.declared() for stage in stages], where)


def check_names(stages: Sequence[Stage], where: Where) -> Iterator[ConfigIssue]:
    """Find names that occur twice or are invalid, and functions that are not registered."""
    names = [stage.name for stage in stages]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield ConfigIssue(where(name), f"{names.count(name)} stages are called {name!r}", "rename all but one")
        if not NAME.fullmatch(name):
            yield ConfigIssue(where(name), f"{name!r} is no name for a stage", "use letters, digits and _")
    for stage in stages:
        try:
            stage.declared()
        except UnknownNameError as error:
            yield ConfigIssue(where(stage.name), f"stage {stage.name!r}: {error}", "name one of them")


def _check_columns(stages: Sequence[Stage], where: Where) -> Iterator[ConfigIssue]:
    """Find columns that are written twice, and those that are read and not written before."""
    for one, other in itertools.combinations(stages, 2):
        if both := [column for column in plain(one.writes) if column in plain(other.writes)]:
            what = f"stages {one.name!r} and {other.name!r} write the same column{'s' if len(both) > 1 else ''}"
            hint = "let one write and the others declare it under `changes`"
            yield ConfigIssue((*where(other.name), *where(one.name)), f"{what} {listed(both)}", hint)
    writers = {column: stage.name for stage in reversed(stages) for column in plain(stage.writes)}
    known, there = sorted({*writers, *RESOURCES}), set(RESOURCES)
    for stage in stages:
        for column in set(RESOURCES).intersection(plain(stage.writes)):
            message = f"stage {stage.name!r} writes {column!r}, which is a resource"
            yield ConfigIssue(where(stage.name), message, "declare it under `changes`")
        wanted = [*(("reads", name) for name in certain(stage.reads))]
        wanted += [("changes", name) for name in certain(stage.changes)]
        for verb, column in wanted:
            what, writer = f"stage {stage.name!r} {verb} column {column!r}", writers.get(column)
            if column not in there and writer is None:
                hint = did_you_mean(column, known, otherwise=f"one of {', '.join(known)}")
                yield ConfigIssue(where(stage.name), f"{what}, which no stage writes", hint)
            elif column not in there:
                yield ConfigIssue(where(stage.name), f"{what} before stage {writer!r} writes it", "change their order")
        there.update(plain(stage.writes))


def plain(names: Iterable[str]) -> tuple[str, ...]:
    """Return each name once, without its question mark."""
    return tuple(dict.fromkeys(name.removesuffix("?") for name in names))


def certain(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that have no question mark."""
    return tuple(name for name in names if not name.endswith("?"))
