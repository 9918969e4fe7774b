"""Running graphs: order, threads, and nodes that do not keep to what they declare."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from embodyrl.errors import RunError
from embodyrl.pipelines.graph import Graph, Node, Stage
from embodyrl.pipelines.iteration import Iteration
from embodyrl.pipelines.pipeline import NodeError
from embodyrl.rollout.batch import BatchError
from tests.pipelines.conftest import COLUMNS, B, K, begin

Run = Callable[[Graph], Iteration]

DEADLINE_S = 20.0
BEGIN = Node("begin", begin, writes=COLUMNS, changes=("simulators",))


def columns(iteration: Iteration) -> list[str]:
    assert iteration.batch is not None
    return sorted(iteration.batch.columns())


def add(name: str, value: float = 1.0) -> Stage:
    """A stage that writes a column."""

    def stage(iteration: Iteration) -> None:
        assert iteration.batch is not None
        iteration.batch[name] = torch.full((K, B), value)

    return stage


def end(iteration: Iteration) -> None:
    """A stage that reports everything it sees."""
    assert iteration.batch is not None
    for name in iteration.batch.columns():
        iteration.metrics[f"sum/{name}"] = float(iteration.batch[name].sum())


def test_independent_nodes_run_at_once(run: Run) -> None:
    """Each waits until the other has begun, which never happens if they run one after the other."""
    begun = {"left": threading.Event(), "right": threading.Event()}

    def meet(mine: str, other: str) -> Stage:
        def stage(iteration: Iteration) -> None:
            begun[mine].set()
            assert begun[other].wait(DEADLINE_S), f"{other} did not begin while {mine} ran"
            add(mine)(iteration)

        return stage

    left = Node("left", meet("left", "right"), reads=("valid",), writes=("left",))
    right = Node("right", meet("right", "left"), reads=("valid",), writes=("right",))
    iteration = run(Graph([BEGIN, left, right, Node("end", end, reads=("left", "right"))]))
    assert iteration.metrics["sum/left"] == iteration.metrics["sum/right"] == K * B


@pytest.mark.parametrize("resource", ["policy", "thread"])
def test_a_node_waits_for_its_own_inputs_alone(run: Run, resource: str) -> None:
    """`slow` does not end before `second` has run, which only hangs on `first`; also while the caller's thread works
    on `slow`."""
    done = threading.Event()

    def slow(iteration: Iteration) -> None:
        assert done.wait(DEADLINE_S), "there is a barrier between the nodes"

    def second(iteration: Iteration) -> None:
        done.set()

    nodes = [
        BEGIN,
        Node("slow", slow, reads=("valid",), changes=("policy",) if resource == "policy" else ()),
        Node("first", add("x"), reads=("valid",), writes=("x",)),
        Node("second", second, reads=("x",)),
    ]
    assert "time/node/slow" in run(Graph(nodes)).metrics


def test_what_changes_a_resource_runs_in_the_callers_thread(run: Run) -> None:
    threads = []

    def note(iteration: Iteration) -> None:
        threads.append(threading.current_thread())

    simulate = Node("simulate", note, changes=("simulators",))
    think = Node("think", note, after=("simulate",))
    learn = Node("learn", note, changes=("policy",), after=("think",))
    run(Graph([simulate, think, learn]))
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False, True]


@pytest.mark.parametrize("ends_last", ["a", "b"])
def test_results_do_not_depend_on_who_is_done_first(run: Run, ends_last: str) -> None:
    """Two nodes report the same metric; the later one in the graph's order counts, whichever ends last."""
    other_is_done = threading.Event()

    def report(name: str) -> Stage:
        def stage(iteration: Iteration) -> None:
            if name == ends_last:
                assert other_is_done.wait(DEADLINE_S)
            iteration.metrics["who"] = float(ord(name))
            other_is_done.set()

        return stage

    assert run(Graph([Node("a", report("a")), Node("b", report("b"))])).metrics["who"] == ord("b")


def test_every_node_is_timed(run: Run) -> None:
    """Times of nodes that run one by one add up to no more than the whole."""
    start = time.perf_counter()
    metrics = run(Graph([BEGIN, Node("x", add("x"), reads=("valid",), writes=("x",)), Node("end", end, reads=("x",))]))
    whole = time.perf_counter() - start
    times = {name: value for name, value in metrics.metrics.items() if name.startswith("time/")}
    assert times.keys() == {"time/node/begin", "time/node/x", "time/node/end"}
    assert min(times.values()) > 0.0 and sum(times.values()) < whole


def test_a_node_sees_what_it_declares_and_nothing_else(run: Run) -> None:
    seen = []

    def look(iteration: Iteration) -> None:
        seen.append(columns(iteration))

    run(Graph([BEGIN, Node("look", look, reads=("rewards", "steps", "images?"))]))
    assert seen == [["rewards", "steps"]]
    with pytest.raises(BatchError, match=r"no column 'rewards' \(has: steps\)") as caught:
        run(Graph([BEGIN, Node("sum", lambda iteration: iteration.batch["rewards"], reads=("steps",))]))
    assert caught.value.__notes__ == ["(in node 'sum' of the iteration)"]


def test_a_resource_that_is_not_declared_cannot_be_used(run: Run) -> None:
    with pytest.raises(NodeError, match=r"node 'sneak' uses 'policy' of a resource that it does not declare"):
        run(Graph([Node("sneak", lambda iteration: iteration.engine.policy)]))
    with pytest.raises(NodeError, match=r"node 'sneak' uses 'collect' of a resource"):
        run(Graph([Node("sneak", lambda iteration: iteration.collector.collect(), reads=("policy",))]))


def test_writing_what_is_not_declared_names_node_and_column(run: Run) -> None:
    with pytest.raises(NodeError, match=r"node 'x' writes column 'y', which it does not declare \(declared: x\)"):
        run(Graph([BEGIN, Node("x", add("y"), reads=("valid",), writes=("x",)), Node("end", end, reads=("x",))]))


@pytest.mark.parametrize("in_place", [True, False])
def test_changing_what_is_only_read_names_node_and_column(run: Run, in_place: bool) -> None:
    def double(iteration: Iteration) -> None:
        assert iteration.batch is not None
        if in_place:
            iteration.batch["rewards"] *= 2.0
        else:
            iteration.batch["rewards"] = iteration.batch["rewards"] * 2.0

    with pytest.raises(NodeError, match="node 'double' changes column 'rewards', which it does not declare"):
        run(Graph([BEGIN, Node("double", double, reads=("rewards",))]))
    changed = run(Graph([BEGIN, Node("double", double, changes=("rewards",)), Node("end", end, reads=("rewards",))]))
    assert changed.metrics["sum/rewards"] == 2 * K * B


def test_changing_what_the_policy_left_in_its_trace_is_noticed(run: Run) -> None:
    def spoil(iteration: Iteration) -> None:
        assert iteration.batch is not None
        iteration.batch["trace"]["sample"].add_(1.0)

    with pytest.raises(NodeError, match="node 'spoil' changes column 'trace'"):
        run(Graph([BEGIN, Node("spoil", spoil, reads=("trace",))]))


def test_not_writing_what_is_declared_names_node_and_column(run: Run) -> None:
    lazy = Node("x", lambda iteration: None, reads=("valid",), writes=("x", "y", "z?"))
    nodes = [BEGIN, lazy, Node("end", end, reads=("x", "y"))]
    with pytest.raises(NodeError, match="node 'x' declares that it writes 'x', 'y', but did not"):
        run(Graph(nodes))


def test_another_number_of_slots_must_be_declared_for_every_column(run: Run) -> None:
    def halve(iteration: Iteration) -> None:
        assert iteration.batch is not None
        iteration.batch = iteration.batch.split([B // 2, B - B // 2], "B")[0]

    watch = Node("end", end, reads=("valid", "rewards"))
    run_all = run(Graph([BEGIN, Node("halve", halve, changes=COLUMNS), watch]))
    assert run_all.batch is not None and run_all.batch.size == (K, B // 2)
    assert run_all.metrics["sum/valid"] == K * B // 2
    with pytest.raises(NodeError, match=r"'halve' changes the batch from \[K, B\] = \[3, 4\] to \[3, 2\], but leaves "):
        run(Graph([BEGIN, Node("halve", halve, changes=("valid",)), watch]))


def test_an_exception_keeps_its_type_and_names_the_node(run: Run) -> None:
    after = []

    def fail(iteration: Iteration) -> None:
        raise RunError("the cable snapped")

    with pytest.raises(RunError, match="the cable snapped") as caught:
        run(Graph([BEGIN, Node("fail", fail, reads=("valid",)), Node("later", after.append, after=("fail",))]))
    assert caught.value.__notes__ == ["(in node 'fail' of the iteration)"] and not after


def test_of_two_failures_the_first_by_order_is_raised_and_the_other_told(run: Run) -> None:
    barrier = threading.Barrier(2, timeout=DEADLINE_S)

    def fail(name: str) -> Stage:
        def stage(iteration: Iteration) -> None:
            barrier.wait()
            raise ValueError(name)

        return stage

    with pytest.raises(ValueError, match="one") as caught:
        run(Graph([Node("a", fail("one")), Node("b", fail("two"))]))
    assert caught.value.__notes__ == ["(in node 'a' of the iteration)", "(meanwhile in node 'b': ValueError('two'))"]


def test_the_batch_may_not_be_spoiled(run: Run) -> None:
    def wrong(iteration: Iteration) -> None:
        assert iteration.batch is not None
        iteration.batch["advantages"] = torch.zeros(B, K)

    with pytest.raises(BatchError, match="'advantages' is float32"):
        spoil = Node("wrong", wrong, writes=("advantages",), after=("begin",))
        run(Graph([BEGIN, spoil, Node("end", end, reads=("advantages",))]))
