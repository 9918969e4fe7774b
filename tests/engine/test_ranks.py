"""Two ranks learn what one learns: every loss, all or part of the weights, and when a run goes on with other ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import programs
import pytest
from slow import rest_slow

from embodyrl.engine.parallel import check_devices
from embodyrl.errors import UserError

PROGRAM = Path(__file__).with_name("rank_program.py")
RANKS = {"small": 2, "models": 2, "machines": 4}


@pytest.fixture(scope="module", params=rest_slow(["small", "models", "machines"]))
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What was wrong in each case; nothing if it went well."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(PROGRAM.parents[2]), str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    words = [[str(PROGRAM), str(rank), str(folder), request.param] for rank in range(RANKS[request.param])]
    processes = [programs.Program(each, env=environment, stderr=subprocess.PIPE, text=True) for each in words]
    errors = [process.communicate(timeout=290)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    found: dict[str, str] = json.loads((folder / "0.json").read_text())
    return found


def test_there_are_cases_that_went_well(results: dict[str, str]) -> None:
    assert len(results) >= 7
    wrong = {name: error for name, error in results.items() if error}
    assert not wrong, "\n\n".join(f"--- {name}\n{error}" for name, error in wrong.items())


def test_ranks_that_would_share_a_gpu_or_do_not_all_have_one() -> None:
    check_devices(["cpu", "cpu"])
    check_devices(["cuda 0 a here", "cuda 1 b here", "cuda 0 a there"])
    check_devices(["cuda MIG-a u here", "cuda MIG-b u here"])  # slices of one GPU
    check_devices(["cuda 0 a here", "cuda 0 b here"])  # a scheduler shows each its own
    with pytest.raises(UserError, match="ranks 1 and 2 would share one GPU: start as many ranks as there are GPUs"):
        check_devices(["cuda 0 a here", "cuda 1 b here", "cuda 1 b here"])
    with pytest.raises(UserError, match="rank 1 finds no CUDA device, and rank 0 computes on one: start as many"):
        check_devices(["cuda 0 a here", "cpu"])
