"""Soft actor-critic: each part learns from its own loss alone, what is not learned stays, and ranks add up."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from learning import LearningEngine, learning_engine
from torch import Tensor

from embodyrl.config.schema import CriticUse, EngineConfig, OptimizerConfig
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.methods.replay.config import CriticsConfig
from embodyrl.methods.sac.config import OffPolicyConfig, SACConfig, TemperatureConfig
from embodyrl.models.critics.network import Critics
from embodyrl.models.errors import PolicyError
from embodyrl.models.mlp.options import Distribution, MLPConfig
from embodyrl.models.mlp.policy import MLPPolicy
from embodyrl.rollout.replay import Minibatch

S, D, C, M = 3, 2, 2, 32
SPEC = SimulatorSpec(
    tasks={"push": "push"},
    actions=(ActionField(name="arm", meaning="normalized", unit="1", low=(-2.0, 0.0), high=(2.0, 1.0)),),
    proprio_dim=S,
    max_episode_steps=10,
    control_frequency=1.0,
)


def make_engine(seed: int = 1, head: Distribution = Distribution.squashed, **changes: Any) -> LearningEngine:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "critics": CriticsConfig(hidden_sizes=[16, 16]),
        "temperature": TemperatureConfig(initial=0.1),
    }
    policy = MLPPolicy(MLPConfig(name="mlp", hidden_sizes=[16], head=head), SPEC, C)
    return learning_engine(
        policy,
        config=EngineConfig(optimizer=changes.pop("optimizer", OptimizerConfig(lr=1e-2, max_grad_norm=100.0))),
        algorithm=SACConfig(name="sac", off_policy=OffPolicyConfig(**(options | changes))),
        iterations=10,
        seed=seed,
    )


def minibatch(seed: int = 5, size: int = M) -> Minibatch:
    draw = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, C + 1, (size,), generator=draw)
    executed = torch.arange(C) < steps[:, None]
    return Minibatch(
        columns={
            "proprio": torch.randn(size, S, generator=draw),
            "next_proprio": torch.randn(size, S, generator=draw),
            "actions": torch.rand(size, C, D, generator=draw),
            "rewards": torch.randn(size, C, generator=draw) * executed,
            "success": torch.zeros(size, C, dtype=torch.bool),
            "steps": steps,
            "terminated": torch.rand(size, generator=draw) < 0.2,
            "truncated": torch.rand(size, generator=draw) < 0.2,
        },
        places=torch.arange(size),
        size=size,
    )


def weights(engine: LearningEngine) -> dict[str, Tensor]:
    assert engine.learner is not None
    parts = {"policy": engine.policy, "critics": engine.learner.critics, "targets": engine.learner.targets}
    named = ((f"{part}.{name}", each) for part, module in parts.items() for name, each in module.named_parameters())
    return {name: each.detach().clone() for name, each in named} | {
        "temperature": engine.learner.log_temperature.detach().clone()
    }


def learn(engine: LearningEngine, *minibatches: Minibatch) -> dict[str, float]:
    return engine.learner.learn(minibatches)


def moved(engine: LearningEngine, before: dict[str, Tensor]) -> set[str]:
    return {name.partition(".")[0] for name, each in weights(engine).items() if not torch.equal(each, before[name])}


def test_everything_learns() -> None:
    engine = make_engine()
    before = weights(engine)
    metrics = learn(engine, minibatch())
    assert moved(engine, before) == {"policy", "critics", "targets", "temperature"}
    assert metrics["train/updates"] == 1 and math.isfinite(metrics["train/critic_loss"])
    assert all(not torch.equal(each, before[name]) for name, each in weights(engine).items() if "weight" in name)


def test_it_is_given_a_value_by_a_single_decision() -> None:
    """With gamma 0 the value of an action is its reward, and the policy finds the best one."""
    engine = make_engine(temperature=TemperatureConfig(initial=1e-3, learn=False))
    engine.learner.algorithm = dataclasses.replace(engine.learner.algorithm, gamma=0.0)  # type: ignore[union-attr]
    best, many = torch.tensor([0.5, -0.5]), []
    for number in range(400):
        batch = minibatch(number, 64)
        unit = torch.rand(64, C, D, generator=torch.Generator().manual_seed(number)) * 2 - 1
        batch.columns["actions"] = unit * torch.tensor([2.0, 0.5]) + torch.tensor([0.0, 0.5])
        batch.columns["rewards"] = -(unit - best).square().sum(-1)
        batch.columns["steps"] = torch.full((64,), C)
        batch.columns["terminated"] = torch.zeros(64, dtype=torch.bool)
        many.append(batch)
    learn(engine, *many)
    actions = engine.policy.act({"proprio": torch.randn(20, S)}, "eval").actions
    wanted = best * torch.tensor([2.0, 0.5]) + torch.tensor([0.0, 0.5])
    assert (actions - wanted).abs().mean() < 0.15


def test_gradients_of_critics_are_not_clipped_with_those_of_the_policy_nor_the_other_way_round() -> None:
    """A policy whose loss is a thousand times as large takes the same steps under a clip, and so do the critics."""
    steps: dict[float, dict[str, Tensor]] = {}
    for scale in (1.0, 1e3):
        engine = make_engine(optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=1e9))
        soft = engine.learner
        assert soft is not None
        steps[scale] = {}
        for name, optimizer in soft.optimizers.items():

            def clip(
                name: str = name, original: Any = optimizer.clip, kept: dict[str, Tensor] = steps[scale]
            ) -> Tensor:
                kept[name] = original()
                return kept[name]

            optimizer.clip = clip  # type: ignore[method-assign]
        original = soft.critics.of_actions
        soft.critics.of_actions = lambda *given, s=scale, f=original: s * f(*given)  # type: ignore[method-assign]
        learn(engine, minibatch())
    assert torch.equal(steps[1.0]["critic"], steps[1e3]["critic"]), "the policy's loss leaves the critics alone"
    assert steps[1e3]["actor"] > 100 * steps[1.0]["actor"]


def test_the_policys_loss_leaves_no_gradient_with_the_critics() -> None:
    engine = make_engine()
    soft = engine.learner
    assert soft is not None
    learn(engine, minibatch())
    soft.optimizers["critic"].clear()
    looked = soft.encode(minibatch(6))
    soft._learn_actor(minibatch(6), looked, torch.zeros(M, C * D))
    assert not any(bool(each.grad.any()) for each in soft.critics.parameters() if each.grad is not None)


def test_the_slow_copies_follow_by_their_share() -> None:
    engine = make_engine(critics=CriticsConfig(hidden_sizes=[8], tau=0.25))
    before = weights(engine)
    learn(engine, minibatch())
    after = weights(engine)
    for name in (name for name in before if name.startswith("targets.")):
        wanted = torch.lerp(before[name], after[name.replace("targets", "critics")], 0.25)
        torch.testing.assert_close(after[name], wanted)


def test_the_policy_learns_less_often_if_asked_also_across_iterations() -> None:
    engine = make_engine(actor_every=3)
    before = weights(engine)
    learn(engine, minibatch(1), minibatch(2))
    assert moved(engine, before) == {"critics", "targets"}
    learn(engine, minibatch(3))
    assert moved(engine, before) == {"policy", "critics", "targets", "temperature"}


def test_a_temperature_that_is_not_learned_stays() -> None:
    engine = make_engine(temperature=TemperatureConfig(initial=0.3, learn=False))
    before = weights(engine)
    assert learn(engine, minibatch())["train/temperature"] == pytest.approx(0.3)
    assert moved(engine, before) == {"policy", "critics", "targets"}


@pytest.mark.parametrize(
    "change",
    [
        {"critics": CriticsConfig(hidden_sizes=[16, 16], layer_norm=False)},
        {"critics": CriticsConfig(hidden_sizes=[16, 16], count=5)},
        {"critics": CriticsConfig(hidden_sizes=[16, 16], count=5, subset=1)},
        {"critics": CriticsConfig(hidden_sizes=[16, 16], tau=0.1)},
        {"critics": CriticsConfig(hidden_sizes=[16, 16], actor_uses=CriticUse.mean)},
        {"temperature": TemperatureConfig(initial=0.2)},
        {"temperature": TemperatureConfig(initial=0.1, lr=0.1)},
        {"temperature": TemperatureConfig(initial=0.1, target_entropy=1.0)},
        {"temperature": TemperatureConfig(initial=0.1, in_target=False)},
        {"optimizer": OptimizerConfig(lr=1e-2, max_grad_norm=100.0, critic_lr=1e-3)},
    ],
    ids=str,
)
def test_every_number_is_read(change: dict[str, Any]) -> None:
    one, other = make_engine(), make_engine(**change)
    for engine in (one, other):
        learn(engine, *map(minibatch, range(3)))
    found, wanted = weights(other), weights(one)
    assert any(found[name].shape != each.shape or not torch.equal(found[name], each) for name, each in wanted.items())


@pytest.mark.parametrize("name", ["gamma", "reward_scale", "time_penalty", "bootstrap", "discount_per", "reward"])
def test_every_number_of_the_algorithm_is_read(name: str) -> None:
    from embodyrl.config.schema import Bootstrap, DiscountPer, RewardConfig

    value = {
        "gamma": 0.5,
        "reward_scale": 3.0,
        "time_penalty": 1.0,
        "bootstrap": Bootstrap.none,
        "discount_per": DiscountPer.action,
        "reward": RewardConfig(name="success"),
    }[name]
    losses = []
    for change in ({}, {name: value}):
        engine = make_engine()
        algorithm = dataclasses.replace(SACConfig(name="sac", off_policy=engine.learner.algorithm.off_policy), **change)  # type: ignore[attr-defined,arg-type]
        engine = learning_engine(
            engine.policy,
            config=EngineConfig(),
            algorithm=algorithm,
            iterations=10,
            seed=1,
        )
        losses.append(learn(engine, minibatch())["train/critic_loss"])
    assert losses[0] != losses[1]


def test_the_critics_of_a_target_are_drawn_without_repetition() -> None:
    engine = make_engine(critics=CriticsConfig(hidden_sizes=[8], count=4, subset=2))
    soft = engine.learner
    assert soft is not None
    drawn = [tuple(soft._subset().tolist()) for _ in range(200)]  # type: ignore[union-attr]
    assert all(len(set(each)) == 2 for each in drawn)
    assert len({frozenset(each) for each in drawn}) == 6


def test_critics_together_are_what_each_is_alone() -> None:
    config = CriticsConfig(count=3, subset=2, hidden_sizes=[7, 5])
    together = Critics(S + D, config, torch.Generator().manual_seed(1))
    features, actions = torch.randn(6, S), torch.randn(6, D)
    found = together(features, actions)
    for number in range(3):
        hidden = torch.cat([features, actions], 1)
        for layer in range(2):
            hidden = hidden @ together.weights[layer][number] + together.biases[layer][number]
            gain, shift = together.gains[layer][number, 0], together.shifts[layer][number, 0]
            hidden = torch.relu(torch.nn.functional.layer_norm(hidden, hidden.shape[-1:], gain, shift))
        alone = hidden @ together.weights[2][number] + together.biases[2][number]
        torch.testing.assert_close(found[number], alone.squeeze(-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(together(features, actions, torch.tensor([2, 0])), found[[2, 0]])
    torch.testing.assert_close(together.of_actions(features, actions), found)


def test_learning_leaves_statistics_and_small_deviations_are_not_magnified() -> None:
    engine = make_engine()
    seen = torch.randn(500, S)
    seen[:, 1] = 4.0  # constant, until something moves it
    assert isinstance(engine.policy, MLPPolicy)
    assert engine.learner.statistics.add(seen, engine.policy) == 0.0
    assert engine.policy.normalizer is not None
    first = copy.deepcopy(engine.policy.normalizer.state_dict())
    learn(engine, minibatch(7))
    for name, each in engine.policy.normalizer.state_dict().items():
        assert torch.equal(each, first[name])
    pushed = engine.policy.encode({"proprio": torch.tensor([[0.0, 4.01, 0.0]])})
    assert pushed[0, 1].item() == pytest.approx(0.5, rel=1e-2)  # a centimetre, in units of two


def test_what_random_actions_never_showed_can_be_told_apart_once_it_is_seen() -> None:
    """A pole that hangs while actions are random, and stands later."""
    engine = make_engine()
    assert isinstance(engine.policy, MLPPolicy)
    hanging = torch.cat([torch.full((400, 1), -1.0), torch.randn(400, 2)], 1)
    engine.learner.statistics.add(hanging, engine.policy)
    leaning = {"proprio": torch.tensor([[0.6, 0.0, 0.0], [-0.6, 0.0, 0.0]])}
    first, second = engine.policy.encode(leaning)
    assert torch.equal(first, second), "both are clipped"
    upright = torch.cat([torch.rand(100, 1) * 2.0 - 0.7, torch.randn(100, 2)], 1)
    beyond = int((upright[:, 0] > -0.8).sum())  # ten times the smallest deviation
    assert engine.learner.statistics.add(upright, engine.policy) == pytest.approx(beyond / 300)
    assert engine.learner.statistics.add(upright, engine.policy) == 0.0
    first, second = engine.policy.encode(leaning)
    assert first[0] - second[0] > 1.0
    assert engine.learner.statistics.add(torch.zeros(0, S), engine.policy) == 0.0, "nothing was seen"
    normalizer = engine.policy.normalizer
    assert normalizer is not None and normalizer.count == 600
    everything = torch.cat([hanging, upright, upright]).double()
    torch.testing.assert_close(normalizer.mean, everything.mean(0))
    torch.testing.assert_close(normalizer.variance, everything.var(0, unbiased=False))


def test_a_resumed_engine_learns_the_same_bits() -> None:
    whole, half = make_engine(actor_every=2), make_engine(actor_every=2)
    batches = [minibatch(number) for number in range(6)]
    for engine in (whole, half):
        learn(engine, *batches[:3])
    again = make_engine(seed=9, actor_every=2)
    again.policy.load_state_dict(half.policy.state_dict())
    again.load_state_dict(copy.deepcopy(half.state_dict()))
    for engine in (whole, again):
        learn(engine, *batches[3:])
    wanted = weights(whole)
    assert all(torch.equal(each, wanted[name]) for name, each in weights(again).items())


def test_steps_that_are_not_finite_are_left_out() -> None:
    engine = make_engine()
    bad = minibatch()
    bad.columns["rewards"][0] = torch.nan
    before = weights(engine)
    metrics = learn(engine, bad, minibatch(8))
    assert all(math.isfinite(value) for value in metrics.values())
    assert engine.guard.skipped >= 1
    assert metrics["train/skipped_steps"] == engine.guard.skipped and metrics["train/updates"] == 2
    assert moved(engine, before) == {"policy", "temperature", "critics", "targets"}
    assert all(bool(torch.isfinite(each).all()) for each in weights(engine).values())


def test_a_rank_without_a_row_of_a_minibatch_changes_nothing_by_itself() -> None:
    """It has noise and steps as the others, and no loss; nothing of it is NaN."""
    engine = make_engine()
    full = minibatch()
    none = Minibatch(
        columns={name: column[:0] for name, column in full.columns.items()}, places=full.places[:0], size=full.size
    )
    before = weights(engine)
    metrics = learn(engine, none)
    assert moved(engine, before) == set() and engine.guard.skipped == 0
    assert metrics["train/critic_loss"] == metrics["train/q"] == 0.0 and metrics["train/q_max"] == -math.inf


def test_random_actions_are_spread_over_the_range_and_can_be_scored() -> None:
    policy = make_engine().policy
    assert isinstance(policy, MLPPolicy)
    output = policy.explore({"proprio": torch.zeros(4000, S)}, torch.Generator().manual_seed(1))
    for number, (low, high) in enumerate([(-2.0, 2.0), (0.0, 1.0)]):
        found = output.actions[..., number]
        assert low <= float(found.min()) < low + 0.01 and high - 0.01 < float(found.max()) <= high
        assert float(found.mean()) == pytest.approx((low + high) / 2, abs=0.05)
    scored = policy.evaluate({"proprio": torch.zeros(4000, S)}, output.trace)
    assert bool(torch.isfinite(scored.logprobs).all())
    unit = policy.to_unit(output.actions)
    torch.testing.assert_close(unit, output.trace["sample"].tanh(), atol=1e-5, rtol=1e-5)


def test_what_is_drawn_is_what_acting_samples() -> None:
    policy = make_engine().policy
    assert isinstance(policy, MLPPolicy)
    inputs = {"proprio": torch.randn(5, S)}
    output = policy.act(inputs, "train", torch.Generator().manual_seed(3))
    noise = torch.randn(5, C * D, generator=torch.Generator().manual_seed(3))
    unit, logprobs = policy.draw(policy.encode(inputs), noise)
    torch.testing.assert_close(unit, policy.to_unit(output.actions), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(logprobs, output.logprobs.sum(-1))


def test_a_policy_without_its_head_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"cannot learn from a replay: see model\.head"):
        make_engine(head=Distribution.gaussian)
