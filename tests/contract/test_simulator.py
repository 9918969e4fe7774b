"""What every simulator promises (`embodyrl.checking.simulators`), tried on every one that is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from slow import only_slow

from embodyrl.checking.promises import Promise, State
from embodyrl.checking.simulators import PROMISES, SimulatorBench
from embodyrl.envs.base import RestoreMismatchWarning
from embodyrl.envs.states import pack, unpack

from . import backends
from .backends import BACKENDS, EPISODE, Backend, missing

SHORT = [
    "metaworld",
    "metaworld-rgb-mixed",
    "maniskill",
    "gymnasium-box",
    "gymnasium-discrete",
    "gymnasium-rgb",
    "custom",
]
"""What `make test` plays: each kind, with and without images, with one task and several, ending in either way."""
PARAMS = [each if each.label in SHORT else only_slow(each) for each in BACKENDS]


@pytest.fixture(scope="module", params=PARAMS, ids=lambda backend: backend.label)
def backend(request: pytest.FixtureRequest) -> Backend:
    """One backend after the other; skipped with the reason where it is not installed."""
    chosen: Backend = request.param
    reason = missing(chosen)
    if reason:
        pytest.skip(reason)
    return chosen


@pytest.fixture(scope="module")
def bench(backend: Backend) -> Iterator[SimulatorBench]:
    """A simulator of two slots, shared by the tests: no promise may depend on what was played before."""
    built = backend.bench()
    yield built
    built.simulator.close()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("promise", PROMISES, ids=str)
def test_it_keeps(promise: Promise[SimulatorBench], bench: SimulatorBench, backend: Backend) -> None:
    finding = bench.try_(promise)
    if finding.state is State.does_not_apply and not (backend.ends_itself and "terminate" in finding.found):
        pytest.skip(finding.found)
    assert finding.state is State.kept, str(finding)


def test_states_that_do_not_come_back_are_named_and_others_are_not(bench: SimulatorBench) -> None:
    simulator = bench.simulator
    bench.start(0, 1)
    simulator.step_chunk([0, 1], np.stack([bench.actions(0)[:3], bench.actions(1)[:3]]))
    states = simulator.get_state([0, 1])
    assert not simulator.set_state([1, 0], states)
    header, arrays = unpack(states[1])
    shown_otherwise = pack({**header, "check": header["check"] ^ 1}, arrays)
    with pytest.warns(RestoreMismatchWarning, match=f"slot 0, step 3 .task '{header['task']}'"):
        assert simulator.set_state([1, 0], [states[0], shown_otherwise]) == [0]


def test_another_process_plays_and_goes_on_bit_for_bit(bench: SimulatorBench, backend: Backend, tmp_path: Path) -> None:
    whole, done, state = bench.half_played(EPISODE)
    np.savez(tmp_path / "whole.npz", *whole.arrays())
    (tmp_path / "state").write_bytes(state)
    files = {"state_file": str(tmp_path / "state"), "whole": str(tmp_path / "whole.npz")}
    job = {"label": backend.label, "done": done, **files}
    command = [sys.executable, "-W", "error::RuntimeWarning", backends.__file__, json.dumps(job)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=240)
