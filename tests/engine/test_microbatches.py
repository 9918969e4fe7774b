"""Gradients of micro-batches add up to that of their minibatch, whatever is descended."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from engines import SPEC, make_batch, make_engine, make_policy
from torch.utils._python_dispatch import TorchDispatchMode

from embodyrl.algorithms.aggregation import token_weights
from embodyrl.config.schema import Aggregation, Level
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.minibatch import Columns, observation_from, pack, rows, split_minibatch, to_columns
from embodyrl.engine.update_metrics import mean_kl, summarize
from embodyrl.envs import Observation
from embodyrl.methods.on_policy.scoring import numbered
from embodyrl.models import PolicyObservation, build_policy
from embodyrl.models.mlp.options import MLPConfig
from embodyrl.registry import LOSSES

SIZE = 22
TERMS = {"entropy_coef": 0.1, "kl_coef": 0.3, "value_clip": 0.2, "value_huber": 0.5}
"""Everything that a loss may have beside the policy's."""


def prepared(engine: HybridEngine, how: Aggregation) -> Columns:
    """A batch of unequal episodes, in no order, decided by a policy that was elsewhere."""
    batch = make_batch(engine, SIZE)
    draw = torch.Generator().manual_seed(3)
    batch["sequence"] = torch.tensor([0] * 2 + [4] * 7 + [9] * 5 + [1] * 8)[torch.randperm(SIZE, generator=draw)]
    batch["valid"] = torch.rand(SIZE, generator=draw) < 0.8
    batch["old_logprobs"] += 0.3 * torch.randn(SIZE, generator=draw)
    batch["old_values"] += 0.5 * torch.randn(SIZE, generator=draw)
    batch["weights"] = token_weights(batch["valid"], batch["sequence"], how, longest=8)
    columns = to_columns(batch, engine.device)
    columns["reference_logprobs"] = columns["old_logprobs"] - 0.2
    columns["proximal_logprobs"] = columns["old_logprobs"] + 0.1
    return columns


def gradients(loss: str, how: Aggregation, size: int | None) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    engine = make_engine(loss=loss, engine={"micro_batch_size": size}, **TERMS)
    step = engine.learner._backward(prepared(engine, how), ["push"], 0.5)
    found = torch.cat([parameter.grad.flatten() for parameter in engine.optimizer.parameters])
    metrics = summarize([step], engine.ranks, engine.version)
    assert float(mean_kl(step, engine.ranks)) == pytest.approx(float(metrics["approx_kl"]), rel=1e-6)
    return found, step.loss, {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(("loss", "how"), [*itertools.product(LOSSES.names(), Aggregation)])
def test_micro_batches_give_the_gradient_and_the_metrics_of_their_minibatch(loss: str, how: Aggregation) -> None:
    wanted, whole, metrics = gradients(loss, how, None)
    assert wanted.abs().max() > 0.01
    for size in (1, 5, 13):
        found, descended, of_parts = gradients(loss, how, size)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(descended, whole, atol=1e-6, rtol=1e-6)
        assert of_parts == pytest.approx(metrics, abs=1e-6)
    assert {"policy_loss", "value_loss", "entropy", "reference_kl", "approx_kl", "ratio", "ratio_max"} <= metrics.keys()


def test_minibatches_of_several_numbers_per_decision_are_exact_too() -> None:
    def found(size: int | None) -> torch.Tensor:
        engine = make_engine(loss="gspo", logprob_level=Level.action, engine={"micro_batch_size": size}, value_coef=0.0)
        columns = prepared(engine, Aggregation.seq_mean_token_mean)
        for name in ("old_logprobs", "advantages", "valid", "weights"):
            columns[name] = columns[name].unsqueeze(1)
        engine.learner._backward(columns, ["push"], 1.0)
        return torch.cat([each.grad.flatten() for each in engine.optimizer.parameters if each.grad is not None])

    torch.testing.assert_close(found(6), found(None), atol=1e-6, rtol=1e-6)


def test_an_update_in_micro_batches_learns_the_same() -> None:
    learned = []
    for size in (None, 3):
        engine = make_engine(engine={"micro_batch_size": size}, policy=make_policy(normalize_observations=False))
        metrics = engine.learner.update(make_batch(engine), ["push"])
        learned.append((torch.nn.utils.parameters_to_vector(engine.policy.parameters()), metrics))
    (one, of_one), (other, of_other) = learned
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert of_one == pytest.approx(of_other, abs=1e-5)


@pytest.mark.parametrize("size", [1, 4, 10])
def test_imitation_in_micro_batches_has_the_gradient_of_the_minibatch(size: int) -> None:
    def found(size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        engine = make_engine(engine={"micro_batch_size": size})
        draw = np.random.default_rng(0)
        seen = Observation(proprio=draw.normal(size=(10, 3)).astype(np.float32), task_descriptions=["push"] * 10)
        actions = torch.from_numpy(draw.uniform(-1, 1, (10, 1, 1)).astype(np.float32))
        loss = engine.learner.imitation._sft_backward(engine.policy.preprocess(PolicyObservation.of(seen)), actions)
        return loss, torch.cat([each.grad.flatten() for each in engine.optimizer.parameters if each.grad is not None])

    (loss, gradient), (whole, wanted) = found(size), found(None)
    torch.testing.assert_close(loss, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-6)
    assert wanted.abs().max() > 0.01


def test_micro_batches_hold_every_decision_once_and_no_more_than_fit() -> None:
    columns: Columns = {"task_index": torch.arange(7), "trace": {"sample": torch.arange(7)}}
    parts = list(split_minibatch(columns, 3, whole=False))
    assert [part["task_index"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6]]
    assert all(torch.equal(part["trace"]["sample"], part["task_index"]) for part in parts)
    assert [*split_minibatch(columns, None, whole=True)] == [columns] == [*split_minibatch(columns, 7, whole=False)]
    assert torch.equal(rows(columns, torch.tensor([5]))["trace"]["sample"], torch.tensor([5]))


def test_episodes_stay_whole_where_a_loss_compares_them() -> None:
    sequence = torch.tensor([3, 8, 3, 8, 5, 3, 5])
    columns: Columns = {"task_index": torch.arange(7), "sequence": sequence}
    parts = [part["sequence"].tolist() for part in split_minibatch(columns, 4, whole=True)]
    assert parts == [[3, 3, 3], [8, 8, 5, 5]]
    assert [*pack([9, 1, 2, 3, 1], 4)] == [[0], [1, 2], [3, 4]], "an episode that is too long is on its own"


def test_images_wait_for_their_micro_batch() -> None:
    seen: list[int] = []
    policy = build_policy(MLPConfig(name="mlp", hidden_sizes=[8]), SPEC, chunk_size=1, seed=1)
    original = policy.preprocess

    def noting(observation: Observation) -> Any:
        seen.append(len(observation.task_descriptions))
        return original(observation)

    engine = make_engine(policy=policy, engine={"micro_batch_size": 4}, epochs=1, minibatches=2)
    batch = make_batch(engine)
    policy.preprocess = noting  # type: ignore[method-assign]
    engine.learner.update(batch, ["push"])
    assert seen == [16], "states are prepared once"
    batch["images"] = torch.zeros(16, 1, 4, 4, 3, dtype=torch.uint8)
    seen.clear()
    engine.learner.update(batch, ["push"])
    assert seen == [4, 4, 4, 4, 16], "the last one is for the normalisation"


class Reading(TorchDispatchMode):
    """Counts the numbers that are read from tensors; on a GPU each of them is waited for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("target_kl", [None, 1e9])
def test_an_optimiser_step_waits_for_the_gpu_once_and_once_more_for_a_target(target_kl: float | None) -> None:
    counts = []
    for epochs in (2, 7):
        engine = make_engine(minibatches=3, epochs=epochs, target_kl=target_kl, engine={"micro_batch_size": 2})
        batch = make_batch(engine)
        with Reading() as reading:
            assert engine.learner.update(batch, ["push"])["train/epochs"] == epochs
        counts.append(reading.count)
    epochs_more, steps_more = 5, 15
    # Besides, the number of units is read once per epoch, which is on the CPU for any device.
    assert counts[1] - counts[0] == epochs_more + steps_more * (1 if target_kl is None else 2)


def test_micro_batches_are_taken_without_reading_the_device() -> None:
    """On torch's meta device, whose tensors have no numbers to read."""
    engine = make_engine()
    columns = numbered(to_columns(make_batch(engine), torch.device("meta")))
    drawn = engine.learner._draw_minibatches(columns)
    for index, _ in drawn:
        for part in split_minibatch(rows(columns, index), 3, whole=False):
            assert part["proprio"].device.type == part["number"].device.type == "meta"
            assert observation_from(part, ["push"]).task_descriptions == ["push"] * len(part["proprio"])
