from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engines import SPEC, make_batch, make_engine, resumed, weights, whole_state
from learning import LearningEngine, learning_engine

from embodyrl.algorithms.losses import OWN_METRICS, LossOutput
from embodyrl.algorithms.options import GIVEN
from embodyrl.config.schema import Device, EngineConfig, LearningRate, OptimizerConfig, Proximal
from embodyrl.data.layout import Batch
from embodyrl.engine.minibatch import draw_minibatches, to_columns
from embodyrl.engine.reference import FrozenCopy
from embodyrl.envs import Observation
from embodyrl.errors import UserError
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.models import build_policy
from embodyrl.models.mlp.options import MLPConfig
from embodyrl.registry import LOSSES


def test_learning_makes_good_decisions_likelier() -> None:
    engine = make_engine()
    batch = make_batch(engine)
    good = batch["advantages"] > 0

    def likelihood() -> torch.Tensor:
        return engine.policy.evaluate({"proprio": batch["proprio"]}, dict(batch["trace"].items())).logprobs.sum(-1)

    before = likelihood()
    metrics = engine.learner.update(batch, ["push"])
    # Normalisation statistics change after an update and move all inputs; compare good with bad, not with before alone.
    change = likelihood() - before
    assert change[good].mean() > change[~good].mean()
    assert metrics["train/epochs"] == 2 and engine.version == 1 and metrics["train/grad_norm"] > 0


def test_target_kl_ends_an_update_before_the_step_that_would_exceed_it() -> None:
    free, bound = make_engine(), make_engine(target_kl=1e-9)
    free.learner.update(make_batch(free), ["push"])
    metrics = bound.learner.update(make_batch(bound), ["push"])
    assert metrics["train/epochs"] == 0 and not torch.equal(weights(free), weights(bound))


def test_a_linear_learning_rate_falls_to_zero_over_the_run() -> None:
    engine = make_engine(optimizer=OptimizerConfig(lr=0.01, schedule=LearningRate.linear))
    rates = [engine.learner.update(make_batch(engine), ["push"])["train/learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def test_state_brings_back_optimiser_and_random_streams() -> None:
    first, second = make_engine(), make_engine()
    first.learner.update(make_batch(first), ["push"])
    second.policy.load_state_dict(first.policy.state_dict())
    resumed(second, whole_state(first))
    for engine in (first, second):
        engine.learner.update(make_batch(engine), ["push"])
    assert torch.equal(weights(first), weights(second)) and first.version == second.version == 2


def test_a_policy_is_told_how_far_the_run_is_also_after_a_resume() -> None:
    first, second = make_engine(), make_engine()
    told: list[float] = []
    first.policy.set_progress = second.policy.set_progress = told.append  # type: ignore[method-assign]
    for _ in range(2):
        first.learner.update(make_batch(first), ["push"])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert told == [0.25, 0.5, 0.5]


def test_the_noise_of_imitation_is_a_stream_of_its_own_that_a_resume_continues() -> None:
    first, second = make_engine(), make_engine()
    drawn: list[torch.Tensor] = []

    def imitation_draws(samples: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"noise": torch.rand(samples, generator=generator)}

    def sft_loss(_: Any, actions: torch.Tensor, draws: dict[str, torch.Tensor]) -> torch.Tensor:
        drawn.append(draws["noise"])
        return sum(parameter.sum() for parameter in first.policy.parameters()) * actions.mean()

    batch = make_batch(first)
    seen = Observation(proprio=batch["proprio"].numpy(), task_descriptions=["push"] * len(batch["task_index"]))
    wanted = np.zeros((len(batch["task_index"]), 1, 1), np.float32)
    for engine in (first, second):
        engine.policy.imitation_draws = imitation_draws  # type: ignore[method-assign]
        engine.policy.sft_loss = sft_loss  # type: ignore[method-assign]
    first.learner.imitation.learn([Batch(observation=seen, actions=wanted)])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for engine in (first, second):
        engine.learner.imitation.learn([Batch(observation=seen, actions=wanted)])
    assert not torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[1], drawn[2])


def test_the_reference_policy_stays_what_the_run_began_with_also_after_a_resume() -> None:
    first = make_engine(kl_coef=0.1)
    before = weights(first)
    first.learner.update(make_batch(first), ["push"])
    # A resumed run builds its engine around weights that have learned.
    second = make_engine(kl_coef=0.1)
    second.policy.load_state_dict(first.policy.state_dict())
    second.reference = FrozenCopy(second.policy)
    resumed(second, whole_state(first))
    for engine in (first, second):
        assert engine.reference is not None
        assert torch.equal(torch.nn.utils.parameters_to_vector(engine.reference.policy.parameters()), before)
        engine.learner.update(make_batch(engine), ["push"])
    assert torch.equal(weights(first), weights(second)) and not torch.equal(weights(first), before)


def test_the_kl_penalty_holds_the_policy_near_its_reference() -> None:
    def distance(coefficient: float) -> float:
        engine = make_engine(kl_coef=coefficient, optimizer=OptimizerConfig(lr=0.003, max_grad_norm=100.0))
        # The critic learns what it likes; only the actor is held.
        before = torch.nn.utils.parameters_to_vector(engine.policy.actor.parameters()).detach().clone()
        for _ in range(10):
            metrics = engine.learner.update(make_batch(engine), ["push"])
        assert ("train/reference_kl" in metrics) == (engine.reference is not None) == (coefficient > 0)
        after = torch.nn.utils.parameters_to_vector(engine.policy.actor.parameters()).detach()
        return float((after - before).norm())

    assert distance(10.0) < distance(1.0) < distance(0.0)


def test_without_a_kl_coefficient_there_is_no_reference_policy() -> None:
    engine = make_engine()
    assert engine.reference is None and "reference" not in engine.state_dict()


def test_a_fresh_batch_has_ratio_one_under_every_loss() -> None:
    for loss in ("ppo", "decoupled_ppo", "cpgd", "gspo"):
        engine = make_engine(loss=loss, optimizer=OptimizerConfig(lr=1e-12))
        metrics = engine.learner.update(make_batch(engine), ["push"])
        assert metrics["train/approx_kl"] == pytest.approx(0.0, abs=1e-6), loss
        assert metrics["train/clip_fraction"] == 0.0, loss


def test_a_loss_gets_all_that_validate_says_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    names, seen = [name for name in GIVEN["loss"] if name != "images"], {}
    scope: dict[str, Any] = {"seen": seen, "LossOutput": LossOutput}
    exec(f"def probe(*, {', '.join(names)}):\n    seen.update(locals())\n    return LossOutput(losses=logprobs)", scope)
    monkeypatch.setattr(LOSSES, "_entries", {entry.name: entry for entry in LOSSES.entries()})
    LOSSES.register("probe", target=scope["probe"], whole=False, summary="a test")
    engine = make_engine(loss="probe", kl_coef=0.1)
    engine.learner.update(make_batch(engine), ["push"])
    assert seen.keys() == set(names)


def mean_loss(*, logprobs: torch.Tensor, advantages: torch.Tensor) -> LossOutput:
    return LossOutput(losses=-(advantages * logprobs).mean())


def mean_metric(*, logprobs: torch.Tensor, advantages: torch.Tensor) -> LossOutput:
    return LossOutput(losses=-advantages * logprobs, metrics={"largest": advantages.max()})


def taken_metric(*, logprobs: torch.Tensor, advantages: torch.Tensor) -> LossOutput:
    return LossOutput(losses=-advantages * logprobs, metrics={"entropy": advantages, "mine": advantages})


def bare_tensor(*, logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return -advantages * logprobs


def test_every_metric_of_the_engine_is_taken() -> None:
    engine = make_engine(kl_coef=0.1)
    found = {name.removeprefix("train/") for name in engine.learner.update(make_batch(engine), ["push"])}
    assert found - OWN_METRICS == {"clip_fraction"}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (mean_loss, r"test_hybrid\.mean_loss returned losses of shape \(\), expected \(8,\).*without `\.mean\(\)`"),
        (mean_metric, r"test_hybrid\.mean_metric returned metrics\['largest'\] of shape \(\), expected \(8,\)"),
        (
            taken_metric,
            r"test_hybrid\.taken_metric returned metrics entropy, which the engine logs itself: choose other",
        ),
        (bare_tensor, r"test_hybrid\.bare_tensor returned a Tensor, expected LossOutput\(losses=\.\.\., metrics="),
    ],
)
def test_a_loss_that_does_not_return_entries_is_named(
    monkeypatch: pytest.MonkeyPatch, loss: Callable[..., Any], message: str
) -> None:
    monkeypatch.setattr(LOSSES, "_entries", {entry.name: entry for entry in LOSSES.entries()})
    LOSSES.register("wrong", target=loss, whole=False, summary="a test")
    engine = make_engine(loss="wrong")
    with pytest.raises(UserError, match=message):
        engine.learner.update(make_batch(engine), ["push"])


def minibatches(engine: LearningEngine) -> list[tuple[list[int], float]]:
    sequence = make_batch(engine)["sequence"]
    drawn = draw_minibatches(sequence, 2, engine.learner.whole_episodes, torch.Generator().manual_seed(0))
    return [(index.tolist(), share) for index, share in drawn]


def test_minibatches_are_drawn_by_decision_or_by_episode_and_cover_the_batch_once() -> None:
    by_decision, by_episode = minibatches(make_engine()), minibatches(make_engine(loss="gspo"))
    for parts in (by_decision, by_episode):
        assert sorted(number for index, _ in parts for number in index) == list(range(16))
        assert [share for _, share in parts] == [0.5, 0.5]
    assert all(len({number // 4 for number in index}) == 2 for index, _ in by_episode), "pieces of episodes"
    assert any(len({number // 4 for number in index}) > 2 for index, _ in by_decision)


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_the_losses_of_minibatches_make_up_the_loss_of_the_batch(loss: str) -> None:
    engine = make_engine(loss=loss, value_coef=0.0, entropy_coef=0.1)
    columns = to_columns(make_batch(engine), engine.device)
    # Entries of different weight, and a policy that has moved.
    columns["weights"] = torch.arange(1.0, 17.0) / 136
    columns["old_logprobs"] = columns["old_logprobs"] + 0.1 * torch.arange(16) / 16
    whole = engine.learner._loss(columns, ["push"], 1.0, 16).loss
    parts = [
        (engine.learner._loss(part, ["push"], share, 16).loss, share)
        for part, share in engine.learner.minibatches(columns, engine.learner._draw_minibatches(columns))
    ]
    assert len(parts) == 2
    torch.testing.assert_close(sum(part * share for part, share in parts), whole)


def test_the_loglinear_proximal_policy_goes_by_the_age_of_a_decision() -> None:
    # Decided one update ago by a policy half as likely to do so: half way to now is a factor of sqrt(2).
    engine = make_engine(loss="decoupled_ppo", proximal=Proximal.loglinear, optimizer=OptimizerConfig(lr=1e-12))
    batch = make_batch(engine)
    batch["old_logprobs"] -= float(torch.tensor(2.0).log())
    engine.version = 1
    metrics = engine.learner.update(batch, ["push"])
    assert metrics["train/behaviour_weight"] == pytest.approx(2**0.5, rel=1e-4)


def test_the_recomputed_proximal_policy_is_the_one_that_the_update_starts_from() -> None:
    # A behaviour policy twice as likely to have decided so: every weight is 1/2, and a cap below masks everything.
    def learned(cap: float | None) -> torch.Tensor:
        engine = make_engine(loss="decoupled_ppo", loss_options={"behaviour_cap": cap}, value_coef=0.0)
        batch = make_batch(engine)
        batch["old_logprobs"] += float(torch.tensor(2.0).log())
        before = weights(engine)
        metrics = engine.learner.update(batch, ["push"])
        assert metrics["train/behaviour_weight"] == pytest.approx(0.5, rel=1e-4)
        return weights(engine) - before

    assert bool(learned(0.6).any()) and not bool(learned(0.4).any())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_that_is_not_there_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"no CUDA device here: .+: set engine\.device=auto or cpu"):
        learning_engine(
            build_policy(MLPConfig(name="mlp"), SPEC, chunk_size=1, seed=1),
            config=EngineConfig(device=Device.cuda),
            algorithm=OnPolicyConfig(name="ppo"),
            iterations=1,
            seed=1,
        )


def cuda_streams(engine: LearningEngine) -> dict[str, Any]:
    """A state as it is saved on a GPU: generators have 16 bytes (seed and offset)."""
    state = whole_state(engine)
    state["streams"] |= {
        "device": "cuda",
        "actions": [torch.zeros(16, dtype=torch.uint8)],
        "imitation": torch.zeros(16, dtype=torch.uint8),
    }
    return state


def noise_of(engine: LearningEngine) -> list[list[float]]:
    streams = engine.streams
    return [torch.rand(4, generator=stream).tolist() for stream in (streams.actions[0], streams.imitation)]


def test_a_run_from_a_gpu_goes_on_on_the_cpu_with_noise_that_begins_anew() -> None:
    first, second, third = make_engine(), make_engine(), make_engine()
    first.learner.update(make_batch(first), ["push"])
    state = cuda_streams(first)
    warning = resumed(second, state)
    assert warning is not None and "saved on cuda and the run continues on cpu" in warning
    resumed(third, state)
    anew = noise_of(second)
    # The same on every resume, and neither the stream of the run's start nor that of another version.
    assert anew == noise_of(third)
    state["version"] = 2
    resumed(third, state)
    for other in (noise_of(make_engine()), noise_of(third)):
        assert all(mine != theirs for mine, theirs in zip(anew, other, strict=True))
    assert torch.equal(second.streams.shuffling.get_state(), first.streams.shuffling.get_state())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_streams_that_do_not_name_their_device_are_known_by_their_length(device: str) -> None:
    first, second = make_engine(), make_engine()
    state = whole_state(first) if device == "cpu" else cuda_streams(first)
    del state["streams"]["device"]
    assert (resumed(second, state) is None) == (device == "cpu")
    assert (noise_of(second) == noise_of(first)) == (device == "cpu")
