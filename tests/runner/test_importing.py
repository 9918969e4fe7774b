"""While torch and simulators are imported no garbage is collected; afterwards it is."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from embodyrl.runner.build import nothing_collected

COLLECTED = """
import gc, weakref
from embodyrl.runner.build import nothing_collected

class Ring:
    "Only the collector can free it."
    def __init__(self):
        self.self = self

with nothing_collected():
    left, imported, before = weakref.ref(Ring()), [[] for _ in range(5000)], gc.get_stats()
few = [[] for _ in range(50)]
assert gc.get_stats() == before, "what is there is looked at again"
assert gc.get_freeze_count() == 0
gc.collect()
assert left() is None, "it is never collected"
"""


def test_what_the_block_left_is_old_and_still_collected() -> None:
    # Of its own: what is forked has frozen what was imported before.
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_as_it_was(collects: bool) -> None:
    before, frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        (gc.enable if collects else gc.disable)()
        with nothing_collected():
            assert not gc.isenabled()
        assert gc.isenabled() is collects
        with pytest.raises(KeyError, match="fails"), nothing_collected():
            raise KeyError("it fails")
        assert gc.isenabled() is collects
        assert gc.get_freeze_count() == frozen, "what somebody has frozen stays so"
    finally:
        (gc.enable if before else gc.disable)()
