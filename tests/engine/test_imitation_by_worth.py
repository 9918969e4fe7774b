"""Implicit Q-learning of policies that show critics nothing: critics look for themselves, and demonstrations weigh in
the policy's own supervised loss."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

from learning import LearningEngine, learning_engine
from test_imitation import ACT_SIZES, IMAGE, TEXTS, D, OfSeveral, S, of, pictured, spec_of

from embodyrl.config.build import build_section
from embodyrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig
from embodyrl.methods.iql.config import ImplicitConfig, IQLConfig
from embodyrl.methods.iql.learner import ImplicitQ
from embodyrl.methods.replay.config import CriticsConfig
from embodyrl.methods.replay.critic_encoder import CODE_SIZE, EYE, LARGEST_SIDE, CriticEncoder
from embodyrl.methods.sac.config import SACConfig
from embodyrl.models import PolicyError, build_policy
from embodyrl.models.policy import SAMPLE_WEIGHTS
from embodyrl.rollout.replay import Minibatch

M = 12
PRISMATIC = {"image_size": 32, "hidden_size": 32, "layers": 1, "mlp_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "gaussian": {"name": "mlp", "hidden_sizes": [16]},
    "cnn": {"name": "cnn", "encoder": "test_resnet"},
    "act": {"name": "act", "scratch": {**ACT_SIZES, "dropout": 0.0}},
    "openvla": {"name": "openvla", "scratch": PRISMATIC},
    "openvla_oft": {"name": "openvla_oft", "scratch": PRISMATIC},
    "openvla_oft_l1": {"name": "openvla_oft", "action_head": "l1", "scratch": PRISMATIC},
    "pi0": {"name": "pi0", "denoising_steps": 2, "scratch": {"layers": 1}},
    "pi0_fast": {"name": "pi0_fast", "scratch": {"layers": 1}},
    "smolvla": {"name": "smolvla", "denoising_steps": 2, "scratch": {"layers": 2, "vision_layers": 1}},
}


def make(name: str, *, micro_batch_size: int | None = None, lr: float = 1e-2, **changes: Any) -> LearningEngine:
    model, spec = MODELS[name], spec_of(MODELS[name])
    policy = build_policy(build_section(ModelConfig, model), spec, chunk_size=1, seed=1)
    algorithm = IQLConfig(
        name="iql", off_policy=ImplicitConfig(**({"critics": CriticsConfig(hidden_sizes=[16])} | changes))
    )
    return learning_engine(
        policy,
        config=EngineConfig(optimizer=OptimizerConfig(lr=lr), micro_batch_size=micro_batch_size),
        algorithm=algorithm,
        iterations=10,
        seed=1,
        simulator=spec,
    )


def minibatch(name: str, seed: int = 5, size: int = M) -> Minibatch:
    draw = torch.Generator().manual_seed(seed)

    def seen(prefix: str) -> dict[str, Tensor]:
        return {
            f"{prefix}proprio": torch.randn(size, S, generator=draw),
            f"{prefix}images": torch.randint(0, 256, (size, 1, IMAGE, IMAGE, 3), generator=draw).byte(),
        }

    found = Minibatch(
        columns={
            **seen(""),
            **seen("next_"),
            "task_index": torch.randint(0, 2, (size,), generator=draw),
            "actions": torch.rand(size, 1, D, generator=draw),
            "rewards": torch.rand(size, 1, generator=draw),
            "success": torch.zeros(size, 1, dtype=torch.bool),
            "steps": torch.ones(size, dtype=torch.int64),
            "terminated": torch.rand(size, generator=draw) < 0.3,
            "truncated": torch.zeros(size, dtype=torch.bool),
        },
        places=torch.arange(size),
        size=size,
    )
    found = pictured(MODELS[name], found)
    found.columns.pop("next_images" if name == "gaussian" else "none", None)
    return found


def weights(engine: LearningEngine) -> dict[str, Tensor]:
    assert engine.learner is not None and engine.learner.critic_encoder is not None
    parts = {"policy": engine.policy, "critics": engine.learner.critics, "onlooker": engine.learner.critic_encoder}
    state = {f"{part}.{name}": each for part, module in parts.items() for name, each in module.named_parameters()}
    return {name: each.detach().clone() for name, each in state.items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_learns_so_and_critics_with_their_encoder_apart_from_it(name: str) -> None:
    engine = make(name)
    before = weights(engine)
    metrics = engine.learner.learn([minibatch(name, 1), minibatch(name, 2)], TEXTS)
    assert metrics["train/updates"] == 2 and metrics["train/actor_loss"] > 0 and metrics["train/weight"] > 0
    after = weights(engine)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    for part in ("policy.", "critics.", *(() if name == "gaussian" else ("onlooker.",))):
        assert any(key.startswith(part) for key in changed), part
    assert isinstance(engine.learner, ImplicitQ) and engine.learner.critic_encoder is not None
    beside = {
        id(each) for part in (engine.learner.critic_encoder, engine.learner.critics) for each in part.parameters()
    }
    assert not beside & {id(each) for each in engine.optimizer.parameters}, "no gradient of theirs is in its norm"


@pytest.mark.parametrize("name", MODELS)
def test_the_step_is_that_of_the_weighted_supervised_loss(name: str) -> None:
    """With a scale of 0 all weigh the same: the loss is that of supervised learning, on what was executed."""
    engine, other = make(name, advantage_scale=0.0), make(name)
    found = minibatch(name)
    loss = engine.learner.learn([found], TEXTS)["train/actor_loss"]
    as_labels = {"labels": found.columns["actions"], "labelled": torch.ones(M, dtype=torch.bool)}
    wanted = other.learner.imitation.learn_labels(
        [dataclasses.replace(found, columns=found.columns | as_labels)], TEXTS
    )
    assert loss == pytest.approx(wanted["train/loss"], rel=1e-6)
    for key, each in other.policy.named_parameters():
        torch.testing.assert_close(dict(engine.policy.named_parameters())[key], each, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", ["gaussian", "openvla_oft", "pi0"])
def test_micro_batches_and_what_ranks_hold_add_up(name: str) -> None:
    found, weigh = minibatch(name), torch.linspace(0.0, 4.0, M)

    def gradients(part: Minibatch, weighs: Tensor, micro: int | None = None) -> tuple[dict[str, Tensor], float]:
        engine = make(name, micro_batch_size=micro)
        kept: dict[str, Tensor] = {}
        engine.ranks, step = OfSeveral(M), engine.optimizer.step

        def keep() -> None:
            found = {key: each.grad for key, each in engine.policy.named_parameters() if each.grad is not None}
            kept.update({key: each.clone() for key, each in found.items()})
            step()

        engine.optimizer.step = keep  # type: ignore[method-assign]
        engine.optimizer.clip = lambda: torch.tensor(1.0)  # type: ignore[method-assign]
        loss = engine.learner.imitation.step_towards(part, part.columns["actions"], TEXTS, weighs)
        assert loss is not None
        return kept, float(loss)

    whole, loss = gradients(found, weigh)
    split = [gradients(of(found, rows), weigh[rows]) for rows in (slice(0, 5), slice(5, M), slice(0, 0))]
    for parts in (split, [gradients(found, weigh, 5)]):
        assert sum(each for _, each in parts) == pytest.approx(loss, rel=1e-5)
        for key, wanted in whole.items():
            summed = sum(each[key] for each, _ in parts)
            torch.testing.assert_close(summed, wanted, atol=2e-6, rtol=1e-3)


@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_of_two_actions_the_better_one_is_imitated(scale: float) -> None:
    """Both were executed as often in the same state, one was paid: with a scale of 0 it goes to the mean of both."""
    engine = make("gaussian", advantage_scale=scale, expectile=0.5, lr=3e-3)

    def pair(seed: int) -> Minibatch:
        found = minibatch("gaussian", seed, 64)
        good = torch.rand(64, generator=torch.Generator().manual_seed(seed)) < 0.5
        paid = {"rewards": good.float()[:, None], "terminated": torch.ones(64, dtype=torch.bool)}
        here = {"proprio": torch.zeros(64, S), "task_index": torch.zeros(64, dtype=torch.int64)}
        chosen = torch.where(good[:, None, None], torch.tensor([1.0, 0.75]), torch.tensor([-1.0, 0.25]))
        return dataclasses.replace(found, columns=found.columns | paid | here | {"actions": chosen})

    engine.learner.learn([pair(seed) for seed in range(400)], TEXTS)
    action = engine.policy.act({"proprio": torch.zeros(1, S)}, "eval").actions[0, 0].tolist()
    wanted = [0.0, 0.5] if scale == 0.0 else [1.0, 0.75]
    assert action == pytest.approx(wanted, abs=0.15)


def test_pushes_are_not_imitated_and_shifted_images_are_what_the_policy_sees() -> None:
    engine = make("pi0", augment_pixels=2)
    found = minibatch("pi0")
    found.columns["labels"] = found.columns["actions"] + 1.0
    found.columns["labelled"] = torch.arange(M) < 3
    seen: list[dict[str, Tensor]] = []
    backward = engine.learner.imitation._imitation_backward

    def look(inputs: dict[str, Tensor], actions: Tensor, *rest: Any) -> Tensor:
        seen.append(inputs | {"wanted": actions})
        return backward(inputs, actions, *rest)

    engine.learner.imitation._imitation_backward = look  # type: ignore[method-assign]
    engine.learner.learn([found], TEXTS)
    wanted = torch.where(found.columns["labelled"][:, None, None], found.columns["labels"], found.columns["actions"])
    assert torch.equal(seen[0]["wanted"], wanted) and SAMPLE_WEIGHTS in seen[0]
    plain = make("pi0")
    plain.learner.imitation._imitation_backward = look  # type: ignore[method-assign]
    plain.learner.learn([found], TEXTS)
    images = [next(each for name, each in inputs.items() if each.dim() >= 4) for inputs in seen]
    assert images[0].shape == images[1].shape and not torch.equal(*images)


@pytest.mark.parametrize("name", ["gaussian", "pi0"])
def test_a_resumed_engine_learns_the_same_bits(name: str) -> None:
    whole, again = make(name), make(name)
    whole.learner.learn([minibatch(name, 1), minibatch(name, 2)], TEXTS)
    again.policy.load_state_dict(whole.policy.state_dict())
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    for engine in (whole, again):
        engine.learner.learn([minibatch(name, 3)], TEXTS)
    wanted = weights(whole)
    assert all(torch.equal(each, wanted[key]) for key, each in weights(again).items())


# ---- what critics see


def test_critics_see_state_images_and_task() -> None:
    onlooker = CriticEncoder(spec_of({"name": "pi0"}, image=96), chunk_size=1, seed=3)
    onlooker.task_descriptions = TEXTS
    found = minibatch("pi0", size=4)
    large = torch.randint(0, 256, (4, 1, 96, 96, 3), generator=torch.Generator().manual_seed(0)).byte()
    stored = {"proprio": found.columns["proprio"], "images": large, "task_index": torch.tensor([0, 0, 1, 1])}
    assert onlooker.scaling is not None and not onlooker.scaling.count
    onlooker.update_statistics({"proprio": torch.randn(50, S) * 3.0 + 1.0})
    assert onlooker.scaling.count == 50
    seen = onlooker.encode_stored(stored)
    assert seen.shape == (4, onlooker.feature_dim) == (4, CODE_SIZE + S + EYE.image_features)
    codes = seen[:, :CODE_SIZE]
    assert torch.equal(codes[0], codes[1]) and not torch.equal(codes[1], codes[2])
    for name in ("proprio", "images"):
        assert not torch.equal(onlooker.encode_stored(stored | {name: stored[name].flip(0)}), seen), name
    # Another order of the descriptions, as in another dataset, changes nothing.
    onlooker.task_descriptions = TEXTS[::-1]
    assert torch.equal(onlooker.encode_stored(stored | {"task_index": torch.tensor([1, 1, 0, 0])}), seen)
    # Large images are made smaller, so that their encoder is that of small ones.
    small = CriticEncoder(spec_of({"name": "pi0"}, image=LARGEST_SIDE), chunk_size=1, seed=3)
    assert [each.shape for each in small.parameters()] == [each.shape for each in onlooker.parameters()]
    unit = onlooker.to_unit(torch.tensor([[[-2.0, 1.0]], [[0.0, 0.5]]]))
    assert unit.tolist() == [[-1.0, 1.0], [0.0, 0.0]]


def test_there_is_none_where_the_policy_shows_what_it_sees() -> None:
    spec = spec_of(MODELS["gaussian"])
    squashed = build_policy(
        build_section(ModelConfig, MODELS["gaussian"] | {"head": "squashed"}), spec, chunk_size=1, seed=1
    )
    gaussian = build_policy(build_section(ModelConfig, MODELS["gaussian"]), spec, chunk_size=1, seed=1)
    options: dict[str, Any] = {"simulator": spec, "config": EngineConfig(), "iterations": 1, "seed": 1}
    assert learning_engine(squashed, algorithm=IQLConfig(name="iql"), **options).learner.critic_encoder is None
    assert isinstance(make("gaussian").learner, ImplicitQ)
    with pytest.raises(PolicyError, match="cannot learn from a replay"):
        learning_engine(
            gaussian,
            config=EngineConfig(),
            algorithm=SACConfig(name="sac"),
            iterations=1,
            seed=1,
        )
