"""Whole runs whose simulators, optimiser and reference policy are away while nobody needs them (`offload`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_runs import Run, Runs, copy_of, resumed

from embodyrl.engine.offload import refuse_memory_disk
from embodyrl.errors import UserError

SETTINGS = ["algorithm.kl_coef=0.1", "run.iterations=4", "run.save_every=2"]
FREED = {"memory/simulators_freed_mib": "the simulators are gone while the policy learns, which frees"}
FREED_ON_DISK = {
    "memory/optimizer_freed_mib": "the optimiser's state is away while the policy acts",
    "memory/reference_freed_mib": "the reference policy is away but for scoring",
}
"""Metrics of what is offloaded, and what is said about it."""


def without_memory(run: Run) -> dict[int, dict[str, Any]]:
    return {
        number: {name: value for name, value in row.items() if not name.startswith("memory/")}
        for number, row in run.merged().items()
    }


def test_a_run_that_offloads_learns_the_same_says_what_it_frees_and_goes_on_bit_for_bit(
    small_runs: Runs, tmp_path: Path
) -> None:
    freed, engine = dict(FREED), []
    try:
        refuse_memory_disk(tmp_path)
        freed, engine = FREED | FREED_ON_DISK, ["engine.offload=all"]
    except UserError:  # temporary files are kept in memory here: only simulators
        pass
    plain, moves = small_runs(*SETTINGS), small_runs(*SETTINGS, "env.offload=true", *engine)
    again = resumed(copy_of(moves, tmp_path / "again", 2))
    for run in (moves, again):
        assert without_memory(run) == without_memory(plain)
        assert run.contents(4) == plain.contents(4)
        for number in range(1, 5):
            assert run.merged()[number].keys() >= freed.keys(), number
            assert 1 < run.merged()[number]["memory/simulators_freed_mib"] < 2000
    lives = {moves: 1, again: 2}
    for run, count in lives.items():
        for text in freed.values():
            assert run.log().count(f"offload: {text}") == count, f"once in the life of each process: {text}"
    assert {path.name for path in moves.path.iterdir()} == {path.name for path in plain.path.iterdir()}
