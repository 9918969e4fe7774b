"""What each algorithm's runs promise: they go on bit for bit where they were cut or killed, two ranks learn what one
does, and neither evaluations nor simulators that end in between change anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from learners import LEARNERS, TWO_RANKS, Learner
from small_runs import Runs, assert_alike, assert_same_run, copy_of, kill_in, resumed

pytestmark = [pytest.mark.usefixtures("own_experts")]

Find = Callable[[str], tuple[Learner, Runs]]


def of_all(*fast: str) -> list[object]:
    """All learners, of which `make test` tries some."""
    return [pytest.param(name, marks=[] if name in fast else [pytest.mark.slow]) for name in LEARNERS]


@pytest.mark.parametrize("name", of_all(*LEARNERS.keys() - {"frames", "weighed"}))
def test_a_run_that_was_cut_goes_on_bit_for_bit(name: str, runs_of: Find, tmp_path: Path) -> None:
    learner, runs = runs_of(name)
    whole = runs()
    learner.shows(whole)
    again = resumed(copy_of(whole, tmp_path / "again", learner.saved))
    assert f"again/checkpoints/{learner.saved:06d}\n" in again.log(), "it began anew"
    assert_same_run(whole, again, learner.iterations)
    learner.shows(again)
    learner.uses(again)


@pytest.mark.faults
@pytest.mark.parametrize(("name", "saving"), [("ppo", "run.save_async=true"), ("sac", "run.save_async=false")])
def test_a_run_that_is_killed_goes_on_bit_for_bit(name: str, saving: str, runs_of: Find, tmp_path: Path) -> None:
    learner, runs = runs_of(name)
    killed = tmp_path / "killed"
    # The last checkpoint may be half written, in the background.
    kill_in(learner.saved + 1, killed, runs.words(killed, saving))
    with (killed / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"iteration": 5, "train/lo')  # as if the kill had come amid a line
    assert_same_run(runs(), resumed(killed), learner.iterations)


@pytest.mark.parametrize("name", of_all("ppo", "sac"))
def test_two_ranks_learn_what_one_does(name: str, runs_of: Find) -> None:
    learner, runs = runs_of(name)
    two = runs(*TWO_RANKS)
    learner.shows(two)
    assert_alike(runs(), two)


@pytest.mark.parametrize("name", ["ppo", pytest.param("sac", marks=pytest.mark.slow)])
def test_two_ranks_go_on_bit_for_bit_and_so_does_one_but_for_rounding(name: str, runs_of: Find, tmp_path: Path) -> None:
    learner, runs = runs_of(name)
    two = runs(*TWO_RANKS)
    assert "trainer/simulators/slot_0003.bin" in two.contents(learner.iterations)
    assert_same_run(two, resumed(copy_of(two, tmp_path / "two", learner.saved)), learner.iterations)
    one = copy_of(two, tmp_path / "one", learner.saved)
    assert_alike(two, resumed(one, "engine.parallel.world_size=1"))


@pytest.mark.parametrize("name", ["sac", "dagger"])
def test_simulators_may_end_while_it_learns_and_evaluations_add_nothing(name: str, runs_of: Find) -> None:
    _, runs = runs_of(name)
    plain, other = runs(), runs("env.offload=true", "run.eval_every=1")
    found = other.weights()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.weights().items())
    last, expected = other.metrics()[-1], plain.metrics()[-1]
    assert last["memory/simulators_freed_mib"] > 0
    assert {key: last[key] for key in expected} == expected
