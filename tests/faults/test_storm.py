"""A little of `benchmarks/storm.py`, which kills runs at random moments and compares them with untouched ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STORM = Path(__file__).parents[2] / "benchmarks" / "storm.py"


@pytest.mark.by_hand(reason="a minute of CPU time; kills at chosen moments are in tests/runner/test_learners.py")
@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_a_short_storm(tmp_path: Path) -> None:
    out = tmp_path / "storm.json"  # two ranks with an MLP, and a tiny pi0, with all that goes and comes
    words = ["--kills", "2", "--seed", "14", "--cases", "3", "5", "--work", str(tmp_path / "work"), "--out", str(out)]
    done = subprocess.run([sys.executable, str(STORM), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["blows"] >= 2 and found["faults"] == []
    assert sum(found["runs_that_ended_as_the_untouched_one"].values()) >= 1
