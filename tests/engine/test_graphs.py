"""Decisions as graphs, with graphs that run on the CPU; tests/gpu has those of a stand-in for CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engines import make_batch, make_engine

from embodyrl.engine import graphs as module
from embodyrl.engine.graphs import Act
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import Observation
from embodyrl.models.policy import ActOutput


class Again:
    """Repeats the function itself, into the same memory."""

    def record(self, act: Act, generator: torch.Generator) -> ActOutput:
        self.function, self.output = act, act()
        return self.output

    def replay(self) -> None:
        for name, value in module._tensors(self.function()).items():
            module._tensors(self.output)[name].copy_(value)


class Refused(Again):
    def record(self, act: Act, generator: torch.Generator) -> ActOutput:
        act()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")


class Wrong(Again):
    def replay(self) -> None:
        super().replay()
        self.output.actions.add_(1e-6)


class Idle(Again):
    """Forgets to draw random numbers."""

    def replay(self) -> None:
        pass


def engine_with(graph: type[Again] | None) -> HybridEngine:
    engine = make_engine()
    engine.graphs._make = graph
    return engine


def decide(engine: HybridEngine, sizes: tuple[int, ...], *, mode: Any = "train") -> list[ActOutput]:
    draw = np.random.default_rng(0)
    with engine.rollout_mode():
        return [
            engine.act(
                Observation(proprio=draw.normal(size=(n, 3)).astype(np.float32), task_descriptions=["push"] * n), mode
            )
            for n in sizes
        ]


def alike(found: list[ActOutput], wanted: list[ActOutput]) -> bool:
    """Compared at the end: no decision may be overwritten by a later one."""
    return all(module._equal(*pair) for pair in zip(found, wanted, strict=True))


SIZES = (3, 5, 3, 3, 5, 5, 3, 2)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_replays_decide_as_the_policy_does_and_leave_the_random_stream_where_it_would_be(mode: str) -> None:
    plain, engine = engine_with(None), engine_with(Again)
    assert alike(decide(engine, SIZES, mode=mode), decide(plain, SIZES, mode=mode))
    states = [each.noise[0].get_state() for each in (plain, engine)]
    assert torch.equal(*states) and engine.graphs.warning is None


def test_a_size_is_recorded_when_it_comes_back_and_the_graphs_end_with_the_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_with(Again)
    recorded: list[int] = []
    record = Again.record
    monkeypatch.setattr(Again, "record", lambda *given: recorded.append(1) or record(*given))
    with engine.rollout_mode():
        decide(engine, SIZES)
        assert len(recorded) == len(engine.graphs._recorded) == 2
        decide(engine, SIZES, mode="eval")
        assert len(recorded) == 4
    assert not engine.graphs._recorded
    decide(engine, (3, 3, 3))
    assert len(recorded) == 5
    for _ in range(3):  # each is a rollout of its own
        decide(engine, (3,))
    assert len(recorded) == 5


def test_learning_within_a_rollout_drops_the_graphs() -> None:
    plain, engine = engine_with(None), engine_with(Again)
    for each in (plain, engine):
        with each.rollout_mode():
            decide(each, SIZES)
            each.learner.update(make_batch(each), ["push"])
            assert not each.graphs._recorded
    assert alike(decide(engine, SIZES), decide(plain, SIZES))


def test_no_more_graphs_than_memory_is_meant_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 1)
    plain, engine = engine_with(None), engine_with(Again)
    with engine.rollout_mode():
        assert alike(decide(engine, SIZES), decide(plain, SIZES))
        assert len(engine.graphs._recorded) == 1


@pytest.mark.parametrize(
    ("graph", "why"),
    [(Refused, "operation not permitted when stream is capturing"), (Wrong, "other numbers"), (Idle, "other numbers")],
)
def test_a_graph_that_fails_or_errs_is_not_used_and_changes_nothing(graph: type[Again], why: str) -> None:
    plain, engine = engine_with(None), engine_with(graph)
    assert alike(decide(engine, SIZES), decide(plain, SIZES))
    assert engine.graphs.warning is not None and engine.graphs.warning.endswith(why)
    assert torch.equal(engine.noise[0].get_state(), plain.noise[0].get_state())
    assert not engine.graphs._recorded and engine.graphs._make is None


def test_there_are_no_graphs_on_the_cpu() -> None:
    assert make_engine().graphs._make is None
