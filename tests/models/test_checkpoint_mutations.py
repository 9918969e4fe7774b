"""Some of the checkpoints and configs of `benchmarks/checkpoint_mutations.py`."""

from __future__ import annotations

import drivers
import pytest

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

FOUND = (
    *(8, 29, 38, 48, 58, 78, 88, 101, 118, 168, 188, 197, 229, 258, 278, 317, 347, 368, 399, 439, 485, 512, 527, 537),
    *(4523, 4713),
)
"""Numbers of checkpoints that once ended in a traceback."""


def test_every_checkpoint_is_loaded_or_refused_in_a_sentence_and_soon() -> None:
    """Takes seconds, most of them for making a tiny checkpoint of every family."""
    driver = drivers.load("checkpoint_mutations")
    outcomes = [*driver.share("checkpoints", 1, FOUND), *driver.share("swap", 1, range(30))]
    assert driver.summary(outcomes)["failures"] == []
    kinds = [outcome.kind for outcome in outcomes]
    assert kinds.count("refused") > 20 and kinds.count("valid") > 5
