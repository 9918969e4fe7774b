"""Some of the data sets of `benchmarks/dataset_mutations.py`."""

from __future__ import annotations

import drivers
import pytest
from slow import rest_slow

pytest.importorskip("pyarrow", reason="demonstrations need pyarrow: pip install 'embodyrl[data]'")

EVERY = 11
"""One kind of damage in so many is tried always, the others where slow tests are."""


@pytest.fixture(scope="module")
def driver():
    return drivers.load("dataset_mutations")


@pytest.fixture(scope="module")
def originals(driver, tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    driver.write_originals(folder)
    return folder


def test_the_original_data_sets_are_valid(driver, originals):
    assert [driver.judge(originals / name, is_wrong=False) for name in ("image", "video")] == [("valid", "")] * 2


@pytest.mark.parametrize("first", rest_slow(list(range(EVERY))))
def test_every_damaged_data_set_is_refused_with_words_and_soon(driver, originals, first):
    """In processes with limits of memory and time, of which each is a fork of this one."""
    numbers = [number for number, damage in enumerate(driver.damages()) if not damage.is_heavy][first::EVERY]
    judged = [driver.try_apart(1, number, originals) for number in numbers]
    assert [each for each in judged if each.is_failure] == [] and len(judged) > 15
