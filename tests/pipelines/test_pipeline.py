"""Lists of stages: what is wrong with them, running them, drawing them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from embodyrl.errors import RunError
from embodyrl.pipelines.chart import to_mermaid
from embodyrl.pipelines.pipeline import Iteration, Pipeline, PipelineError, Stage, StageError, StageFunction
from embodyrl.rollout.batch import BatchError
from tests.pipelines.conftest import COLUMNS, B, K, begin

Run = Callable[..., Iteration]


def nothing(iteration: Iteration) -> None:
    pass


def stage(name: str, *, reads: str = "", writes: str = "", changes: str = "") -> Stage:
    """A stage; its columns are named in one text."""
    return Stage(name, nothing, tuple(reads.split()), tuple(writes.split()), tuple(changes.split()))


COLLECT = stage("rollout", reads="policy", writes="rewards success values?", changes="simulators")
ADVANTAGE = stage("advantage", reads="rewards values?", writes="advantages")
UPDATE = stage("update", reads="advantages values?", changes="policy")
BEGIN = Stage("begin", begin, writes=COLUMNS, changes=("simulators",))


def issues(*stages: Stage) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        Pipeline(stages)
    return [str(issue) for issue in caught.value.issues]


def test_a_column_that_nobody_writes_is_named_with_a_near_match() -> None:
    assert issues(COLLECT, stage("update", reads="reward")) == [
        "stage 'update' reads column 'reward', which no stage writes - did you mean 'rewards'?"
    ]
    assert issues(stage("shape", changes="xyz")) == [
        "stage 'shape' changes column 'xyz', which no stage writes - one of demonstrations, policy, replay, simulators"
    ]


def test_a_column_is_written_before_it_is_read() -> None:
    assert issues(COLLECT, UPDATE, ADVANTAGE) == [
        "stage 'update' reads column 'advantages' before stage 'advantage' writes it - change their order"
    ]
    assert issues(stage("own", reads="x", writes="x")) == [
        "stage 'own' reads column 'x' before stage 'own' writes it - change their order"
    ]


def test_two_writers_of_a_column_are_named() -> None:
    other = stage("other", writes="rewards", changes="simulators")
    assert issues(COLLECT, other, ADVANTAGE, UPDATE) == [
        "stages 'rollout' and 'other' write the same column 'rewards' - let one write and the others declare it under "
        "`changes`"
    ]
    assert "stage 'a' writes 'policy', which is a resource" in issues(stage("a", writes="policy"))[0]


def test_what_need_not_be_there_may_be_missing() -> None:
    assert len(Pipeline([COLLECT, stage("look", reads="images?"), ADVANTAGE, UPDATE]).stages) == 4


def test_names_are_checked() -> None:
    assert issues(stage("a"), stage("a"), stage("no good")) == [
        "2 stages are called 'a' - rename all but one",
        "'no good' is no name for a stage - use letters, digits and _",
    ]
    assert "stage 'colect' is not registered - did you mean 'collect'?" in issues(Stage("rollout", "colect"))[0]


def test_everything_that_is_wrong_comes_at_once() -> None:
    found = issues(COLLECT, stage("other", writes="rewards"), stage("a", reads="y", writes="x"), stage("b", writes="y"))
    assert len(found) == 2 and "write the same" in found[0] and "before stage 'b' writes it" in found[1]


def test_a_stage_has_what_its_function_declares() -> None:
    declared = Stage("update", "update", reads=("mine",)).declared()
    assert {"trace", "mine"} <= set(declared.reads) and "policy" in declared.changes


def test_mermaid_names_stages_functions_resources_and_columns() -> None:
    stages = [
        stage("rollout", reads="policy", writes="rewards values?", changes="simulators"),
        stage("shape", changes="rewards"),
        stage("learn", reads="rewards values?", changes="policy"),
        Stage("rest", lambda iteration: None),
    ]
    assert to_mermaid(Pipeline(stages).stages).splitlines() == [
        "flowchart TD",
        '  rollout["<b>rollout</b><br/>nothing<br/>reads policy<br/>changes simulators"]',
        '  shape["<b>shape</b><br/>nothing"]',
        '  learn["<b>learn</b><br/>nothing<br/>changes policy"]',
        '  rest["<b>rest</b><br/>&lt;lambda&gt;"]',
        '  rollout -- "rewards" --> shape',
        '  shape -- "rewards" --> learn',
        '  rollout -- "values" --> learn',
        "  learn -.-> rest",
    ]


def add(name: str, value: float = 1.0) -> StageFunction:
    """A function that writes a column."""

    def function(iteration: Iteration) -> None:
        assert iteration.batch is not None
        iteration.batch[name] = torch.full((K, B), value)

    return function


def test_stages_run_in_order_and_share_the_iteration(run: Run) -> None:
    def double(iteration: Iteration) -> None:
        assert iteration.batch is not None
        iteration.batch["x"] = 2 * iteration.batch["x"]

    def report(iteration: Iteration) -> None:
        assert iteration.batch is not None
        iteration.metrics["sum"] = float(iteration.batch["x"].sum())

    stages = [BEGIN, Stage("x", add("x"), writes=("x",)), Stage("double", double, changes=("x",))]
    assert run(*stages, Stage("report", report, reads=("x",))).metrics["sum"] == 2 * K * B


def test_every_stage_is_timed(run: Run) -> None:
    """The times add up to no more than the whole."""
    start = time.perf_counter()
    metrics = run(BEGIN, Stage("x", add("x"), reads=("valid",), writes=("x",))).metrics
    whole = time.perf_counter() - start
    times = {name: value for name, value in metrics.items() if name.startswith("time/")}
    assert times.keys() == {"time/stage/begin", "time/stage/x"}
    assert min(times.values()) > 0.0 and sum(times.values()) < whole


def test_not_writing_what_is_declared_names_stage_and_column(run: Run) -> None:
    lazy = Stage("x", nothing, reads=("valid",), writes=("x", "y", "z?"))
    with pytest.raises(StageError, match="stage 'x' declares that it writes 'x', 'y', but did not"):
        run(BEGIN, lazy)


def test_an_exception_keeps_its_type_and_names_the_stage(run: Run) -> None:
    after: list[Iteration] = []

    def fail(iteration: Iteration) -> None:
        raise RunError("the cable snapped")

    with pytest.raises(RunError, match="the cable snapped") as caught:
        run(BEGIN, Stage("fail", fail, reads=("valid",)), Stage("later", after.append))
    assert caught.value.__notes__ == ["(in stage 'fail' of the iteration)"] and not after


def test_the_batch_may_not_be_spoiled(run: Run) -> None:
    def wrong(iteration: Iteration) -> None:
        assert iteration.batch is not None
        iteration.batch["advantages"] = torch.zeros(B, K)

    with pytest.raises(BatchError, match="'advantages' is float32"):
        run(BEGIN, Stage("wrong", wrong, writes=("advantages",)))
