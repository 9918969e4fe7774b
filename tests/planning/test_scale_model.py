"""benchmarks/scale_model.py, the page that it writes its tables into, and what real runs were compared with."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "scale_model.py"))


def case(script: dict[str, Any], **changes: Any) -> Any:
    """8 chunks of 2 actions in 4 envs per GPU: 8 s of simulation on 2 cores, 4 s of decisions, 6 s of learning."""
    plain = {"name": "test", "about": "", "cores": 2, "step_s": 0.25, "step_sigma": 0.0, "slots": 4, "chunks": 8}
    costs = {"decide_least_s": 0.1, "decide_s": 0.125, "learn_s": 6 / 32}
    free = dict.fromkeys(("row_gb", "small_gb", "weights_gb", "gradients_gb"), 0.0)
    return script["Case"](**{**plain, **costs, **free, "actions": 2, **changes})


def seconds(script: dict[str, Any], work: Any, ahead: int = 0, **layout: int) -> float:
    machines = script["Machines"](hop_s=0.0, slow_share=0.0)
    found = script["predict"](work, script["Layout"](**{"cores": 2, **layout}), ahead=ahead, machines=machines)
    return round(found.seconds, 6)


@pytest.mark.slow
def test_the_page_has_the_tables(script: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    given = page.partition(script["BEGIN"])[2].partition(script["END"])[0].strip()
    assert given == script["tables"](), "write them with: python benchmarks/scale_model.py --write"


def test_one_process_takes_the_sum_of_its_parts(script: dict[str, Any]) -> None:
    assert seconds(script, case(script), ranks=1) == 8 + 4 + 6
    assert seconds(script, case(script), ranks=2) == 8 + 4 + 6  # twice the GPUs, twice the work
    assert seconds(script, case(script), ranks=1, cores=4) == 4 + 4 + 6


def test_workers_of_their_own_take_turns_or_work_at_the_same_time(script: dict[str, Any]) -> None:
    apart = {"ranks": 1, "workers": 1, "worker_machines": 1}  # the envs of two GPUs in one process
    assert seconds(script, case(script), **apart) == 2 * (8 + 4 + 6)
    assert seconds(script, case(script), ahead=1, **apart) == 2 * (8 + 4)
    assert seconds(script, case(script, learn_s=16 / 32), ahead=1, **apart) == 2 * 16


def test_a_short_decision_takes_as_long_as_its_launches(script: dict[str, Any]) -> None:
    assert seconds(script, case(script, decide_s=0.001), ranks=1) == 8 + 8 * 0.1 + 6


def test_weights_go_out_of_one_network_card(script: dict[str, Any]) -> None:
    work = case(script, weights_gb=12.5)
    before = seconds(script, case(script), ranks=8, workers=32, rank_machines=1, worker_machines=4)
    after = seconds(script, work, ranks=8, workers=32, rank_machines=1, worker_machines=4)
    assert after - before == pytest.approx(32)  # a second for each worker, at 12.5 GB/s


def test_a_batch_leaves_by_the_narrower_side(script: dict[str, Any]) -> None:
    work = case(script, row_gb=12.5 / 32)  # 12.5 GB for each GPU
    machines = script["Machines"](exchange_gb_s=1e9, card_gb_s=12.5, ask_s=0.0)
    layout = script["Layout"](ranks=16, workers=8, rank_machines=2, worker_machines=1, cores=2)
    handed = 24 * 12.5 / 12.5  # through the one card of the workers
    exchanged = 24 / 16 * 12.5 * 15 / 16 / (12.5 / 8)  # ranks of a machine share its card
    assert script["batch_s"](work, layout, 24 * 32, machines) == pytest.approx(handed + exchanged)


def test_small_columns_go_to_every_rank(script: dict[str, Any]) -> None:
    work = case(script, small_gb=1 / 32)
    machines = script["Machines"](exchange_gb_s=1e9, card_gb_s=16.0, line_gb_s=4.0, hop_s=0.0, ask_s=0.0)
    collocated = script["Layout"](ranks=16, rank_machines=2, cores=2)
    assert script["batch_s"](work, collocated, 16 * 32, machines) == 16 / 2  # eight ranks share a card of 16 GB/s
    apart = script["Layout"](ranks=16, workers=8, rank_machines=2, worker_machines=1, cores=2)
    assert script["batch_s"](work, apart, 24 * 32, machines) == 24 * 16 / 16  # all out of one machine
    alone = script["Layout"](ranks=4, workers=4, worker_machines=1, cores=2)
    assert script["batch_s"](work, alone, 8 * 32, machines) == 0  # mapped


def test_episodes_that_end_make_a_rollout_shorter_and_unequal(script: dict[str, Any]) -> None:
    work = case(script, length=4.0, chunks=8)
    simulate, decide, chunks = script["rollouts"](work, 4, 2, 0.0)
    assert 8 > simulate.mean() > 4 and simulate.std() > 0 and 4 > decide.mean() > 2 and 8 * 4 > chunks > 4 * 3
    assert seconds(script, work, ranks=1) < seconds(script, work, ranks=64)  # all wait for the longest


def test_async_follows_each_worker_by_itself(script: dict[str, Any]) -> None:
    work = case(script, length=4.0, learn_s=0.0)
    layout = {"ranks": 8, "workers": 8, "worker_machines": 1}
    assert seconds(script, work, ahead=1, **layout) < seconds(
        script, work, **layout
    )  # a long rollout meets a short one


def test_slow_machines_are_met_the_more_often_the_more_there_are(script: dict[str, Any]) -> None:
    slowest = script["Machines"]().slowest
    assert slowest(1) == pytest.approx(1.003) and slowest(1000) == pytest.approx(1.15)


def test_a_cell_names_what_takes_longest_and_what_has_grown(script: dict[str, Any]) -> None:
    binding = script["CASES"][1]
    alone, many = (script["best"](binding, "collocated", count) for count in (1, 64))
    assert script["cell"](alone, alone).endswith(") simulators")
    assert "simulators; slow machines +" in script["cell"](many, alone)


def test_real_runs_of_sleeping_parts_were_within_15_percent() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "scale_check.json").read_text())["cases"]
    assert {"collocated", "separate, 2 workers", "async, 1 worker"} <= found.keys()
    assert all(0.85 <= each["predicted_of_measured"] <= 1.15 for each in found.values())


def test_real_runs_on_the_page_are_the_measured_ones_and_predicted_by_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    check = runpy.run_path(str(ROOT / "benchmarks" / "scale_check.py"))
    found = json.loads((ROOT / "benchmarks" / "results" / "scale_check.json").read_text())["cases"]
    assert {each.name: round(each.predicted(), 3) for each in check["CHECKS"]} == {
        name: each["predicted_s"] for name, each in found.items()
    }
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert page.partition(check["BEGIN"])[2].partition(check["END"])[0].strip() == check["table"](found)
