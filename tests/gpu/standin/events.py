"""What makes the CPU wait for the GPU, and what is copied between them, by the line that asked for it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

OWN = Path(__file__).parent
REPOSITORY = OWN.parents[2]


class Kind(StrEnum):
    """What happened."""

    sync = "sync"
    """The CPU waits until the GPU is done."""
    upload = "upload"
    """Copied from CPU to GPU."""
    download = "download"
    """Copied from GPU to CPU."""


SEEN: Counter[tuple[Kind, str, str]] = Counter()
"""Times by kind, what exactly, and `file:line`."""


def line() -> str:
    """Return `file:line` of the innermost line of the repository, and of the innermost line of a library below it."""
    frame, library = sys._getframe(1), None
    while frame is not None:
        path = frame.f_code.co_filename
        inside = "site-packages" not in path and path.startswith(str(REPOSITORY))
        if inside and not path.startswith(str(OWN)):
            own = f"{Path(path).relative_to(REPOSITORY)}:{frame.f_lineno}"
            return own if library is None else f"{own} ({library})"
        if library is None and "site-packages" in path and "/site-packages/torch/" not in path:
            library = f"{path.rpartition('site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return library or "backward pass"


refuse: Callable[[str], None] | None = None
"""What to do with an event instead, while a graph is recorded."""


def note(kind: Kind, what: str) -> None:
    """Count an event at the line that is running."""
    if refuse is not None:
        refuse(f"{kind}: {what}")
    SEEN[kind, what, line()] += 1


def note_copy(here: str, there: str, waits: bool) -> None:
    """Count a copy between two types of device; one from the GPU that `waits` makes the CPU wait."""
    if there == "cuda" and here != "cuda":
        note(Kind.upload, "copy to the GPU")
    elif here == "cuda" and there != "cuda":
        note(Kind.download, "copy to the CPU")
        if waits:
            note(Kind.sync, "copy to the CPU")


def since(before: Counter[tuple[Kind, str, str]]) -> Counter[tuple[Kind, str, str]]:
    """Return what happened since a copy of `SEEN`."""
    return SEEN - before


def totals(seen: Counter[tuple[Kind, str, str]]) -> tuple[int, int]:
    """Return the numbers of synchronisations and of copies."""
    syncs = sum(times for (kind, _, _), times in seen.items() if kind is Kind.sync)
    return syncs, sum(seen.values()) - syncs


def lines(seen: Counter[tuple[Kind, str, str]]) -> list[str]:
    """Return a line of text for each, the most frequent first."""
    return [f"{times} x {kind}: {what} at {where}" for (kind, what, where), times in seen.most_common()]
