from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engines import make_batch, make_engine, weights
from safetensors import safe_open

from embodyrl.config.schema import GuardConfig
from embodyrl.data.layout import Batch
from embodyrl.engine.guard import NumericsError
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import Observation


def poisoned(engine: HybridEngine, value: float = float("nan")) -> object:
    """A batch of which one decision cannot be learned from; it is in one of two minibatches of each pass."""
    batch = make_batch(engine)
    batch["returns"][3] = value
    return batch


def guarded(folder: Path | None = None, **guard: int) -> HybridEngine:
    return make_engine(engine={"guard": GuardConfig(**guard)}, folder=folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_step_that_is_no_number_is_left_out_and_counted_and_the_others_are_made(value: float) -> None:
    engine = guarded()
    before = weights(engine)
    metrics = engine.learner.update(poisoned(engine, value), ["push"])
    after = weights(engine)
    assert bool(after.isfinite().all()) and not torch.equal(before, after)
    assert metrics["train/skipped_steps"] == engine.guard.skipped == 2, "one minibatch in each of two passes"
    assert all(np.isfinite(list(metrics.values()))), "metrics are of the steps that were made"
    assert all(bool(each.isfinite().all()) for each in engine.optimizer.inner.state_dict()["state"][0].values())


def test_a_loss_that_is_infinite_beside_a_finite_gradient_counts_too() -> None:
    engine = guarded()
    engine.learner.algorithm = make_engine(value_huber=1.0).learner.algorithm
    engine.learner.update(poisoned(engine, float("inf")), ["push"])
    assert engine.guard.skipped == 2


def test_too_many_end_the_run_with_the_cause_and_leave_the_weights() -> None:
    engine = guarded(max_skipped=2)
    engine.learner.update(poisoned(engine), ["push"])
    batch = poisoned(engine)
    batch["returns"][:] = float("nan")
    before = weights(engine)
    message = r"gradient norm is nan in update 2 .*; returns of the batch are not finite.*step 3 .*max_skipped is 2"
    with pytest.raises(NumericsError, match=message):
        engine.learner.update(batch, ["push"])
    assert torch.equal(before, weights(engine))


def test_none_may_be_left_out_if_so_wanted() -> None:
    engine = guarded(max_skipped=0)
    with pytest.raises(NumericsError, match=r"Lower engine\.optimizer\.lr"):
        engine.learner.update(poisoned(engine), ["push"])


def test_what_could_not_be_learned_from_is_written_the_first_times(tmp_path: Path) -> None:
    engine = guarded(tmp_path, dumps=1)
    batch = poisoned(engine)
    engine.learner.update(batch, ["push"])
    (path,) = (tmp_path / "not_finite").iterdir()
    assert path.name == "update_000001_01.safetensors" and engine.guard.skipped == 2
    with safe_open(path, "pt") as file:
        assert {"returns", "advantages", "trace.sample", "proprio", "weights"} <= set(file.keys())
        returns = file.get_tensor("returns")
        assert len(returns) == 8 and int(returns.isnan().sum()) == 1
        assert file.metadata()["loss"] == "nan"


def test_no_file_is_written_if_none_is_wanted(tmp_path: Path) -> None:
    engine = guarded(tmp_path, dumps=0)
    engine.learner.update(poisoned(engine), ["push"])
    assert not list(tmp_path.iterdir()) and engine.guard.skipped == 2


def test_imitation_is_guarded_as_well(tmp_path: Path) -> None:
    engine = guarded(tmp_path)
    seen = Observation(proprio=np.ones((4, 3), np.float32), task_descriptions=["push"] * 4)
    good, bad = np.zeros((4, 1, 1), np.float32), np.full((4, 1, 1), np.nan, np.float32)
    metrics = engine.learner.imitation.learn([Batch(observation=seen, actions=each) for each in (bad, good)])
    assert metrics["train/skipped_steps"] == 1 and np.isfinite(metrics["train/loss"])
    assert bool(weights(engine).isfinite().all())


def test_the_count_goes_on_after_a_resume() -> None:
    first, second = guarded(), guarded()
    first.learner.update(poisoned(first), ["push"])
    second.load_state_dict(first.state_dict())
    assert second.guard.skipped == 2


def test_metrics_of_an_update_tell_how_far_the_policy_moved() -> None:
    engine = make_engine()
    batch = make_batch(engine)
    batch["old_logprobs"] -= 0.1 * torch.arange(16) / 16
    metrics = engine.learner.update(batch, ["push"])
    assert metrics["train/ratio_max"] > metrics["train/ratio"] > 1.0
    assert metrics["train/approx_kl"] > 0 and metrics["train/grad_norm"] > 0 and "train/clip_fraction" in metrics
