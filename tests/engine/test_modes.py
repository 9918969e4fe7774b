from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from engines import make_batch, make_engine, make_policy, weights

from embodyrl.engine.hybrid import Mode, Modes, Preparation
from embodyrl.envs import Observation
from embodyrl.tracking.clock import Clock


def traced() -> tuple[Modes, list[str]]:
    modes, events = Modes(Clock()), []

    def preparation(name: str) -> Preparation:
        @contextmanager
        def prepare() -> Iterator[None]:
            events.append(f"+{name}")
            try:
                yield
            finally:
                events.append(f"-{name}")

        return prepare

    modes.around[Mode.rollout] = [preparation("weights")]
    modes.around[Mode.train] = [preparation("weights"), preparation("moments")]
    return modes, events


def test_what_a_mode_needs_is_ready_once_however_often_it_is_entered() -> None:
    modes, events = traced()
    with modes.enter(Mode.rollout), modes.enter(Mode.rollout):
        events.append("act")
    with modes.enter(Mode.train), modes.enter(Mode.train):
        events.append("learn")
    assert events == ["+weights", "act", "-weights", "+weights", "+moments", "learn", "-moments", "-weights"]
    assert modes.current is None


def test_a_mode_inside_the_other_lasts_for_its_block() -> None:
    modes, events = traced()
    with modes.enter(Mode.train):
        with modes.enter(Mode.rollout):
            assert modes.current is Mode.rollout
        assert modes.current is Mode.train
    assert events == ["+weights", "+moments", "+weights", "-weights", "-moments", "-weights"]


def test_an_exception_leaves_the_mode_and_undoes_its_preparations() -> None:
    modes, events = traced()
    with pytest.raises(ValueError, match="broken"), modes.enter(Mode.train):
        raise ValueError("broken")
    assert modes.current is None and events == ["+weights", "+moments", "-moments", "-weights"]


def test_changing_the_mode_changes_no_number() -> None:
    plain, restless = make_engine(), make_engine()
    for engine in (plain, restless):
        for _ in range(2):
            batch = make_batch(engine)
            if engine is restless:
                with engine.train_mode(), engine.rollout_mode(), engine.train_mode():
                    torch.randn(3)  # noise of others is none of the engine's
                with engine.rollout_mode():
                    engine.act(
                        Observation(
                            proprio=batch["proprio"].numpy(), task_descriptions=["push"] * len(batch["task_index"])
                        ),
                        "eval",
                    )
            with engine.train_mode():
                engine.learner.update(batch, ["push"])
    assert torch.equal(weights(plain), weights(restless))


def test_acting_records_no_gradients_and_learning_does_inside_rollout_mode_too() -> None:
    engine = make_engine()
    with engine.rollout_mode():
        batch = make_batch(engine)
        assert not batch["old_logprobs"].requires_grad
        before = weights(engine)
        engine.learner.update(batch, ["push"])
    assert not torch.equal(before, weights(engine))


def test_dropout_does_not_come_between_a_rollout_and_its_update() -> None:
    policy = make_policy()
    policy.actor.insert(1, torch.nn.Dropout(0.5))
    engine = make_engine(policy=policy.train(), epochs=1, minibatches=1)
    metrics = engine.learner.update(make_batch(engine), ["push"])
    assert metrics["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)
