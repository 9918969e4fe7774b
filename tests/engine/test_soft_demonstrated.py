"""Critics beside demonstrations: imitation, nearness to the cloned policy, and implicit Q-learning."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

from learning import LearningEngine, learning_engine
from test_soft import SPEC, C, D, M, S, minibatch

from embodyrl.algorithms.off_policy import (
    advantage_weights,
    agreed_values,
    expectile_losses,
    imitation_losses,
    implicit_targets,
)
from embodyrl.config.schema import AlgorithmConfig, CriticUse, EngineConfig, OptimizerConfig
from embodyrl.data.layout import Batch
from embodyrl.envs import Observation
from embodyrl.methods.iql.config import ImplicitConfig, IQLConfig
from embodyrl.methods.iql.learner import ImplicitQ
from embodyrl.methods.replay.config import CriticsConfig
from embodyrl.methods.rlpd.config import DemonstratedConfig, ImitationConfig, RLPDConfig
from embodyrl.methods.rlpd.learner import DemonstratedActorCritic
from embodyrl.methods.sac.config import TemperatureConfig
from embodyrl.models.mlp.options import Distribution, MLPConfig
from embodyrl.models.mlp.policy import MLPPolicy
from embodyrl.rollout.replay import Minibatch


def make(algorithm: AlgorithmConfig, seed: int = 1) -> LearningEngine:
    torch.manual_seed(0)
    policy = MLPPolicy(MLPConfig(name="mlp", hidden_sizes=[16], head=Distribution.squashed), SPEC, C)
    return learning_engine(
        policy,
        config=EngineConfig(optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=100.0)),
        algorithm=algorithm,
        iterations=10,
        seed=seed,
    )


def rlpd(imitation: dict[str, Any] | None = None, **changes: Any) -> LearningEngine:
    settings: dict[str, Any] = {
        "critics": CriticsConfig(hidden_sizes=[16]),
        "temperature": TemperatureConfig(initial=0.1),
        "imitation": ImitationConfig(**(imitation or {})),
    }
    return make(RLPDConfig(name="rlpd", off_policy=DemonstratedConfig(**(settings | changes))))


def iql(**changes: Any) -> LearningEngine:
    settings: dict[str, Any] = {"critics": CriticsConfig(hidden_sizes=[16])}
    return make(IQLConfig(name="iql", off_policy=ImplicitConfig(**(settings | changes))))


def labelled(seed: int = 5, every: int = 2) -> Minibatch:
    """Every `every`-th decision has been demonstrated."""
    batch = minibatch(seed)
    draw = torch.Generator().manual_seed(seed + 100)
    batch.columns["labels"] = torch.rand(M, C, D, generator=draw)
    batch.columns["labelled"] = torch.arange(M) % every == 0
    return batch


def weights(engine: LearningEngine) -> dict[str, Tensor]:
    assert engine.learner is not None
    state = {"policy": dict(engine.policy.state_dict()), "critics": dict(engine.learner.critics.state_dict())}
    return {f"{part}.{name}": each.clone() for part, named in state.items() for name, each in named.items()}


def learned(engine: LearningEngine, *batches: Minibatch) -> dict[str, Tensor]:
    engine.learner.learn(batches)
    return weights(engine)


# ---- in plain Python


def test_the_loss_of_imitation_is_the_mean_error_of_what_was_demonstrated() -> None:
    errors, known = torch.tensor([1.0, 10.0, 3.0, 20.0]), torch.tensor([True, False, True, False])
    found = imitation_losses(errors, known, known.sum(), 4)
    assert found.mean().item() == pytest.approx((1.0 + 3.0) / 2, abs=1e-6)
    parts = [imitation_losses(errors[part], known[part], known.sum(), 4) for part in (slice(0, 1), slice(1, 4))]
    assert sum(float(part.sum()) for part in parts) / 4 == pytest.approx(2.0, abs=1e-6), "what ranks hold adds up"
    assert not imitation_losses(errors, torch.zeros(4, dtype=torch.bool), torch.tensor(0), 4).any()


def test_the_value_of_a_state_is_an_expectile() -> None:
    found = expectile_losses(torch.tensor([2.0, -2.0, 0.0]), expectile=0.7)
    assert found.tolist() == pytest.approx([0.7 * 4, 0.3 * 4, 0.0], abs=1e-6)
    value = torch.zeros(1, requires_grad=True)
    for _ in range(2000):
        worth = torch.tensor([0.0, 1.0])
        [gradient] = torch.autograd.grad(expectile_losses(worth - value, expectile=0.9).sum(), value)
        with torch.no_grad():
            value -= 0.05 * gradient
    assert value.item() == pytest.approx(0.9, abs=1e-3)


def test_targets_and_weights_of_implicit_q_learning() -> None:
    targets = implicit_targets(torch.tensor([1.0, 2.0]), torch.tensor([0.9, 0.0]), torch.tensor([3.0, 5.0]))
    assert targets.tolist() == pytest.approx([1.0 + 0.9 * 3.0, 2.0], abs=1e-6)
    found = advantage_weights(torch.tensor([0.5, -1.0, 50.0]), scale=3.0, largest=100.0)
    assert found.tolist() == pytest.approx([math.exp(1.5), math.exp(-3.0), 100.0], rel=1e-6)
    assert advantage_weights(torch.tensor([7.0]), scale=0.0, largest=100.0).item() == 1.0
    values = torch.tensor([[1.0, 4.0], [3.0, 2.0]])
    assert agreed_values(values, CriticUse.min).tolist() == [1.0, 2.0]
    assert agreed_values(values, CriticUse.mean).tolist() == [2.0, 3.0]


# ---- RLPD


@pytest.mark.parametrize(
    ("imitation", "changes"),
    [({"coef": 5.0}, {}), ({"cloned_coef": 5.0}, {}), ({"better_only": True}, {}), ({}, {"critics_first": 1})],
    ids=["coef", "cloned_coef", "better_only", "critics_first"],
)
def test_every_number_of_imitation_is_read(imitation: dict[str, Any], changes: dict[str, Any]) -> None:
    found = []
    for one in (rlpd(), rlpd(imitation, **changes)):
        assert one.learner is not None
        one.learner.keep_cloned()
        found.append(learned(one, labelled(1), labelled(2), labelled(3)))
    assert any(not torch.equal(each, found[1][name]) for name, each in found[0].items() if "actor" in name)


def test_only_the_demonstrated_decisions_are_imitated() -> None:
    one, other = rlpd({"coef": 50.0}), rlpd({"coef": 50.0})
    changed = labelled()
    changed.columns["labels"][1::2] = 77.0  # nobody has demonstrated these
    first, second = learned(one, labelled()), learned(other, changed)
    assert all(torch.equal(each, second[name]) for name, each in first.items())


def test_a_policy_that_imitates_much_becomes_what_was_demonstrated_and_one_that_stays_near_does_not_move() -> None:
    engine = rlpd({"coef": 1000.0})
    batch = labelled(every=1)
    features = batch.columns["proprio"]
    before = engine.policy.errors(features, batch.columns["labels"]).mean()  # type: ignore[operator]
    learned(engine, *[batch] * 100)
    assert engine.policy.errors(features, batch.columns["labels"]).mean() < 0.5 * before  # type: ignore[operator]
    moved = []
    for coefficient in (0.0, 1000.0):
        engine = rlpd({"coef": 0.0, "cloned_coef": coefficient})
        assert engine.learner is not None
        engine.learner.keep_cloned()
        first = engine.policy.mode(features).detach()  # type: ignore[operator]
        learned(engine, *map(minibatch, range(30)))
        moved.append((engine.policy.mode(features) - first).abs().mean().item())  # type: ignore[operator]
    assert moved[1] < 0.2 * moved[0]


def test_a_resumed_engine_stays_near_the_same_policy() -> None:
    whole = rlpd({"cloned_coef": 2.0})
    assert whole.learner is not None
    whole.learner.keep_cloned()
    learned(whole, labelled(1), labelled(2))
    again = rlpd({"cloned_coef": 2.0})
    again.policy.load_state_dict(whole.policy.state_dict())
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    wanted = learned(whole, labelled(3))
    assert all(torch.equal(each, wanted[name]) for name, each in learned(again, labelled(3)).items())
    learner = again.learner
    assert isinstance(learner, DemonstratedActorCritic) and learner.cloned is not None


# ---- IQL


@pytest.mark.parametrize(
    "change",
    [
        {"expectile": 0.9},
        {"advantage_scale": 10.0},
        {"largest_weight": 1.0},
        {"critics": CriticsConfig(hidden_sizes=[16], tau=0.5)},
        {"critics": CriticsConfig(hidden_sizes=[16], count=3)},
        {"critics": CriticsConfig(hidden_sizes=[16], actor_uses=CriticUse.mean)},
    ],
    ids=str,
)
def test_every_number_of_implicit_q_learning_is_read(change: dict[str, Any]) -> None:
    one, other = iql(), iql(**change)
    batches = [minibatch(number) for number in range(4)]
    wanted, found = learned(one, *batches), learned(other, *batches)
    assert any(found[name].shape != each.shape or not torch.equal(found[name], each) for name, each in wanted.items())


def test_of_two_actions_the_better_one_is_imitated() -> None:
    """In the same state one action pays 1 and the other nothing: cloning ends between them, this near the better."""
    ends = {}
    for scale in (0.0, 10.0):
        engine = iql(advantage_scale=scale, expectile=0.5)
        batch = minibatch(size=64)
        better = torch.arange(64) % 2 == 0
        batch.columns["proprio"] = torch.zeros(64, S)
        actions = torch.where(better[:, None, None], torch.tensor(0.5), torch.tensor(-0.5)).expand(-1, C, D)
        batch.columns["actions"] = actions * torch.tensor([2.0, 0.5]) + torch.tensor([0.0, 0.5])
        batch.columns["rewards"] = better[:, None].float().expand(-1, C) / C
        batch.columns["steps"] = torch.full((64,), C)
        batch.columns["terminated"] = torch.ones(64, dtype=torch.bool)
        learned(engine, *[batch] * 300)
        ends[scale] = float(engine.policy.mode(torch.zeros(1, S)).mean())  # type: ignore[operator]
    assert abs(ends[0.0]) < 0.1 and ends[10.0] > 0.4


def test_what_a_demonstrator_wanted_is_imitated_not_what_a_push_made_of_it() -> None:
    """Half of the decisions were pushed: the policy imitates what was wanted in these, the critics what was done."""
    ends = []
    for known in (True, False):
        engine = iql(advantage_scale=0.0)
        batch = minibatch(size=64)
        pushed = torch.arange(64) % 2 == 0
        batch.columns["proprio"] = torch.zeros(64, S)
        scale, centre = torch.tensor([2.0, 0.5]), torch.tensor([0.0, 0.5])
        wanted = torch.full((64, C, D), 0.5)
        batch.columns["actions"] = torch.where(pushed[:, None, None], -wanted, wanted) * scale + centre
        batch.columns["labels"] = wanted * scale + centre
        batch.columns["labelled"] = torch.full((64,), known)
        learned(engine, *[batch] * 300)
        ends.append(float(engine.policy.mode(torch.zeros(1, S)).mean()))  # type: ignore[operator]
    assert ends[0] == pytest.approx(0.5, abs=0.05) and ends[1] == pytest.approx(0.0, abs=0.05)


def test_the_policy_waits_until_critics_have_learned_something() -> None:
    engine = iql(critics_first=3)
    for number in range(5):
        before = weights(engine)
        metrics = engine.learner.learn([minibatch(number)])
        changed = {name.split(".")[0] for name, each in weights(engine).items() if not torch.equal(each, before[name])}
        assert changed == ({"critics", "policy"} if number >= 3 else {"critics"})
        assert ("train/actor_loss" in metrics) == (number >= 3) and metrics["train/updates"] == number + 1


def test_critics_never_ask_for_actions_of_the_policy() -> None:
    engine, batch = iql(), minibatch()

    def refuse(*given: Any) -> Any:
        raise AssertionError("it draws no action")

    engine.policy.draw = refuse  # type: ignore[method-assign,assignment]
    metrics = engine.learner.learn([batch])
    assert math.isfinite(metrics["train/value_loss"]) and math.isfinite(metrics["train/critic_loss"])
    assert metrics["train/weight"] > 0 and metrics["train/updates"] == 1


def test_the_error_of_imitation_is_that_of_the_most_likely_action() -> None:
    engine = rlpd()
    draw = np.random.default_rng(0)
    batches = [
        Batch(
            observation=Observation(
                images=None, proprio=draw.normal(size=(size, S)).astype(np.float32), task_descriptions=[""] * size
            ),
            actions=draw.uniform(-0.5, 0.5, (size, C, D)).astype(np.float32),
        )
        for size in (3, 5)
    ]
    policy = engine.policy
    assert isinstance(policy, MLPPolicy)
    wanted = np.concatenate([each.actions for each in batches])
    chosen = [policy.act({"proprio": torch.from_numpy(each.observation.proprio)}, "eval").actions for each in batches]
    centre, half = policy._squashed.centre.numpy(), policy._squashed.half_width.numpy()
    unit = ((wanted - centre) / half).clip(-1, 1)
    own = (torch.cat(chosen).detach().numpy() - centre) / half
    error, spread = engine.learner.imitation.errors(batches)
    assert error == pytest.approx(np.square(own - unit).mean(), rel=1e-5)
    assert spread == pytest.approx(unit.var(0).mean(), rel=1e-5)


def test_a_resumed_engine_learns_the_same_bits() -> None:
    whole, again = iql(), iql()
    learned(whole, minibatch(1), minibatch(2))
    again.policy.load_state_dict(whole.policy.state_dict())
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    wanted = learned(whole, minibatch(3))
    assert all(torch.equal(each, wanted[name]) for name, each in learned(again, minibatch(3)).items())
    one, other = whole.learner, again.learner
    assert isinstance(one, ImplicitQ) and isinstance(other, ImplicitQ)
    values = dict(one.values.named_parameters())
    assert all(torch.equal(each, values[name]) for name, each in other.values.named_parameters())


def test_a_rank_without_a_row_changes_nothing_by_itself() -> None:
    for engine in (iql(), rlpd({"coef": 1.0})):
        full = labelled()
        none = dataclasses.replace(
            full, columns={name: each[:0] for name, each in full.columns.items()}, places=full.places[:0]
        )
        before = weights(engine)
        assert all(torch.equal(each, before[name]) for name, each in learned(engine, none).items())
