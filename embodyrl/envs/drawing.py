"""How long a simulator's process spends drawing pictures.

`SlotSimulator` and ManiSkill's batch measure it. A simulator that is made otherwise does

    with drawing.measured():
        pictures = ...

around what draws; else its drawing counts as physics.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_total = 0.0


@contextmanager
def measured() -> Iterator[None]:
    """Count the seconds of the block as drawing. Blocks are not nested."""
    global _total
    start = time.perf_counter()
    try:
        yield
    finally:
        _total += time.perf_counter() - start


def total() -> float:
    """Seconds that this process has spent drawing so far."""
    return _total
