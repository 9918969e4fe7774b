"""Which rows of the contract matrix continuous integration plays."""

from __future__ import annotations

from embodyrl.envs.gymnasium.families import FAMILIES

from . import test_simulator
from .backends import BACKENDS
from .conftest import BRIEF, CHECKS, ROWS


def test_every_family_has_a_row_that_ci_plays() -> None:
    played = {each.name for each in BACKENDS if each.name not in BRIEF or each.label in ROWS}
    assert played >= FAMILIES.keys()
    assert {each.label for each in BACKENDS} >= ROWS
    assert all(hasattr(test_simulator, check) for check in CHECKS), "a check has another name"
