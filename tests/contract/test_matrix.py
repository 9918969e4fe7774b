"""Which rows of the contract matrix continuous integration plays."""

from __future__ import annotations

from embodyrl.checking.simulators import PROMISES
from embodyrl.envs.gymnasium.families import FAMILIES

from .backends import BACKENDS
from .conftest import BRIEF, CHECKS, ROWS


def test_every_family_has_a_row_that_ci_plays() -> None:
    played = {each.name for each in BACKENDS if each.name not in BRIEF or each.label in ROWS}
    assert played >= FAMILIES.keys()
    assert {each.label for each in BACKENDS} >= ROWS
    assert {str(each) for each in PROMISES} >= CHECKS, "a promise has another name"
