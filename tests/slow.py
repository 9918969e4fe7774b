"""Which cases of a test `make test` runs, and which only `make test-all` and CI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_slow(cases: Iterable[Any], fast: int = 1) -> list[Any]:
    """Cases for `pytest.mark.parametrize`: the first ones as they are, the others marked `slow`."""
    found = list(cases)
    return found[:fast] + [only_slow(case) for case in found[fast:]]


def only_slow(case: Any) -> Any:
    """A case, several values of which are a tuple, of a test that has others which are not: marked `slow`."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
