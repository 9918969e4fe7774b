"""While torch and simulators are imported no garbage is collected; afterwards it is."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from embodyrl.registry import nothing_collected

COLLECTED = """
import gc, weakref
from embodyrl.registry import nothing_collected

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

FROZEN = """
import gc
from embodyrl.registry import nothing_collected

kept = [[] for _ in range(5000)]
gc.freeze()
with nothing_collected():
    pass
# Of what is frozen some is freed as everything is, when nobody holds it any more.
assert gc.get_freeze_count() > 5000, "what somebody has frozen is looked at again"
"""

MEANWHILE = """
import sys
from embodyrl.registry import SupportedModel
from embodyrl.runner.build import imported_meanwhile

with imported_meanwhile("mlp"):
    pass
assert "torch" in sys.modules and "embodyrl.models.mlp.policy" in sys.modules

del sys.modules["embodyrl.runner.runner"]
SupportedModel.register("broken", "no_such_module:Policy", summary="none", critic="none")
ended = []
try:
    with imported_meanwhile("broken"):
        ended.append("the block")
except Exception as error:
    assert "no_such_module" in str(error), error
    ended.append("told")
assert ended == ["the block", "told"], ended
"""


# Each of its own: what is forked has frozen what was imported before.
@pytest.mark.parametrize("program", [COLLECTED, FROZEN, MEANWHILE], ids=["collected", "frozen", "meanwhile"])
def test_in_a_program(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_as_it_was(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with nothing_collected():
            assert not gc.isenabled()
        assert gc.isenabled() is collects
        with pytest.raises(KeyError, match="fails"), nothing_collected():
            raise KeyError("it fails")
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
