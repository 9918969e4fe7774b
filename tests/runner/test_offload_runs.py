"""Whole runs whose optimiser and reference policy are away between updates (`engine.offload`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import Run

from embodyrl.cli import train
from embodyrl.engine.offload import refuse_memory_disk
from embodyrl.errors import UserError

MOVES = ["algorithm.kl_coef=0.1", "engine.offload=all"]
FREED = {"memory/optimizer_freed_mib", "memory/reference_freed_mib"}
WEIGHTS, STATE = "policy/model.safetensors", "trainer/engine.safetensors"


@pytest.fixture(autouse=True)
def on_a_disk(tmp_path: Path) -> None:
    try:
        refuse_memory_disk(tmp_path)
    except UserError:
        pytest.skip("temporary files are kept in memory here")


def test_a_run_that_offloads_its_engine_learns_the_same_and_resumes(small_run: Callable[..., Run]) -> None:
    plain = small_run("plain", MOVES[0], "run.iterations=4")
    moves = small_run("moves", *MOVES, "run.iterations=2")
    assert train.resume(moves.path, ["run.iterations=4"]) == 0
    rows = {row["iteration"]: row for row in Run(moves.path).metrics()}
    for row in plain.metrics():
        assert {name: rows[row["iteration"]][name] for name in row} == row
        assert rows[row["iteration"]].keys() >= FREED or row["iteration"] == 0
    for name in (WEIGHTS, STATE):
        assert plain.digest(4, name) == Run(moves.path).digest(4, name), name
    log = (moves.path / "run.log").read_text()
    for text in ("the optimiser's state is away while the policy acts", "the reference policy is away but for scoring"):
        assert log.count(f"offload: {text}") == 2, "once in each of the two processes' lives"
    assert {path.name for path in moves.path.iterdir()} == {path.name for path in plain.path.iterdir()}
