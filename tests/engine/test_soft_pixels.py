"""Soft actor-critic from images: the encoder learns from the critics alone, and shifts are the same on every rank."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from learning import LearningEngine, learning_engine

from embodyrl.algorithms.shifts import draw_shifts, shifted
from embodyrl.config.schema import EngineConfig, OptimizerConfig
from embodyrl.data.layout import Batch
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.methods.replay.config import CriticsConfig
from embodyrl.methods.rlpd.config import DemonstratedConfig, ImitationConfig, RLPDConfig
from embodyrl.methods.rlpd.learner import DemonstratedActorCritic
from embodyrl.methods.sac.config import OffPolicyConfig, SACConfig, TemperatureConfig
from embodyrl.models.cnn.options import CNNConfig, Encoders
from embodyrl.models.cnn.policy import CNNPolicy
from embodyrl.models.mlp.options import Activation, Distribution
from embodyrl.planning.dry_run import trace
from embodyrl.planning.shapes import LiveBytes
from embodyrl.rollout.replay import Minibatch

S, D, C, M, V, H, W = 3, 2, 2, 16, 2, 20, 24
SPEC = SimulatorSpec(
    tasks={"push": "push"},
    actions=(ActionField(name="arm", meaning="normalized", unit="1", low=(-2.0, 0.0), high=(2.0, 1.0)),),
    proprio_dim=S,
    max_episode_steps=10,
    control_frequency=1.0,
    cameras=("front", "hand"),
    image_size=(H, W),
)
SMALL: dict[str, Any] = {
    "encoder": "drq",
    "channels": [4, 6],
    "strides": [2, 2],
    "head": Distribution.squashed,
    "image_features": 10,
    "state_features": 5,
    "hidden_sizes": [16],
}


def make_policy(**model: Any) -> CNNPolicy:
    torch.manual_seed(0)
    return CNNPolicy(CNNConfig(name="cnn", **(SMALL | model)), SPEC, C)


def make_engine(seed: int = 1, model: dict[str, Any] | None = None, **changes: Any) -> LearningEngine:
    options: dict[str, Any] = {
        "critics": CriticsConfig(hidden_sizes=[16]),
        "temperature": TemperatureConfig(initial=0.1),
        "augment_pixels": 2,
    }
    optimizer = changes.pop("optimizer", OptimizerConfig(lr=1e-2, max_grad_norm=100.0))
    return learning_engine(
        make_policy(**(model or {})),
        config=EngineConfig(optimizer=optimizer),
        algorithm=SACConfig(name="sac", off_policy=OffPolicyConfig(**(options | changes))),
        iterations=10,
        seed=seed,
    )


def minibatch(seed: int = 5, size: int = M) -> Minibatch:
    draw = torch.Generator().manual_seed(seed)
    # Smooth, so that a shift changes something, but not everything.
    images = torch.rand(2, size, V, 5, 6, 3, generator=draw).repeat_interleave(4, 3).repeat_interleave(4, 4)
    now, following = (images * 255).to(torch.uint8)
    return Minibatch(
        columns={
            "images": now,
            "next_images": following,
            "proprio": torch.randn(size, S, generator=draw),
            "next_proprio": torch.randn(size, S, generator=draw),
            "actions": torch.rand(size, C, D, generator=draw),
            "rewards": torch.randn(size, C, generator=draw),
            "success": torch.zeros(size, C, dtype=torch.bool),
            "steps": torch.full((size,), C),
            "terminated": torch.rand(size, generator=draw) < 0.2,
            "truncated": torch.zeros(size, dtype=torch.bool),
        },
        places=torch.arange(size),
        size=size,
    )


def part(whole: Minibatch, places: slice) -> Minibatch:
    columns = {name: column[places] for name, column in whole.columns.items()}
    return dataclasses.replace(whole, columns=columns, places=whole.places[places])


def weights(engine: LearningEngine) -> dict[str, Tensor]:
    assert engine.learner is not None
    parts = {"policy": engine.policy, "critics": engine.learner.critics, "targets": engine.learner.targets}
    named = ((f"{part}.{name}", each) for part, module in parts.items() for name, each in module.named_parameters())
    return {name: each.detach().clone() for name, each in named}


def moved(engine: LearningEngine, before: dict[str, Tensor], start: str) -> set[bool]:
    after = weights(engine)
    return {not torch.equal(after[name], each) for name, each in before.items() if name.startswith(start)}


def test_the_encoder_learns_with_the_critics_and_not_with_the_policy() -> None:
    engine = make_engine(actor_every=2)
    soft = engine.learner
    assert soft is not None
    encoder = engine.policy.encoder_parameters()  # type: ignore[operator]
    assert encoder and not {*encoder} & {*engine.optimizer.parameters}
    assert {*encoder} < {*soft.optimizers["critic"].parameters}
    assert {*encoder} | {*engine.optimizer.parameters} == {*engine.policy.parameters()}
    before = weights(engine)
    engine.learner.learn([minibatch(1)])  # a step of the critics alone
    assert moved(engine, before, "policy.features.") == {True} and moved(engine, before, "policy.actor.") == {False}
    soft.optimizers["critic"].clear()
    looked, before = soft.encode(minibatch(2)), weights(engine)
    soft._learn_actor(minibatch(2), looked, torch.zeros(M, C * D))
    assert moved(engine, before, "policy.features.") == {False} and moved(engine, before, "policy.actor.") == {True}
    assert not any(bool(each.grad.any()) for each in encoder if each.grad is not None)


def test_no_gradient_comes_back_through_the_targets_or_the_policys_features() -> None:
    soft = make_engine().learner
    assert soft is not None
    looked = soft.encode(minibatch())
    assert looked.encoded.requires_grad and torch.equal(looked.encoded, looked.features)
    assert not looked.features.requires_grad and not looked.following.requires_grad


def test_gradients_of_the_encoder_are_clipped_with_those_of_the_critics() -> None:
    """A policy whose loss is a thousand times as large leaves the norm as it is."""
    norms: dict[float, dict[str, Tensor]] = {}
    for scale in (1.0, 1e3):
        soft = (engine := make_engine()).learner
        assert soft is not None
        norms[scale] = {}
        for name, optimizer in soft.optimizers.items():

            def clip(name: str = name, original: Any = optimizer.clip, kept: Any = norms[scale]) -> Tensor:
                kept[name] = original()
                return kept[name]

            optimizer.clip = clip  # type: ignore[method-assign]
        original = soft.critics.of_actions
        soft.critics.of_actions = lambda *given, s=scale, f=original: s * f(*given)  # type: ignore[method-assign]
        engine.learner.learn([minibatch()])
    assert torch.equal(norms[1.0]["critic"], norms[1e3]["critic"])
    assert norms[1e3]["actor"] > 100 * norms[1.0]["actor"]
    looked = soft.encode(minibatch())
    soft.optimizers["critic"].clear()
    soft.critics(looked.encoded, looked.actions).square().sum().backward()
    own = [each.grad for each in soft.critics.parameters()]
    beside = [each.grad for each in engine.policy.encoder_parameters()]  # type: ignore[operator]
    wanted = torch.stack([each.norm() for each in (*own, *beside) if each is not None]).norm()
    torch.testing.assert_close(soft.optimizers["critic"].clip(), wanted)


def demonstrations(count: int) -> list[Batch]:
    draw = np.random.default_rng(count)
    return [
        Batch(
            observation=Observation(
                images=draw.integers(0, 256, (6, V, H, W, 3), dtype=np.uint8),
                proprio=draw.normal(size=(6, S)).astype(np.float32),
                task_descriptions=["push"] * 6,
            ),
            actions=draw.uniform(0, 1, (6, C, D)).astype(np.float32),
            repeated=np.zeros((6, C), np.bool_),
        )
        for _ in range(count)
    ]


def make_imitator(imitation: ImitationConfig | None = None) -> LearningEngine:
    off_policy = DemonstratedConfig(
        critics=CriticsConfig(hidden_sizes=[16]), augment_pixels=2, imitation=imitation or ImitationConfig()
    )
    return learning_engine(
        make_policy(),
        config=EngineConfig(optimizer=OptimizerConfig(lr=1e-2)),
        algorithm=RLPDConfig(name="rlpd", off_policy=off_policy),
        iterations=10,
        seed=1,
    )


def test_imitation_before_the_first_update_trains_the_encoder_too_and_goes_on_where_it_stopped() -> None:
    whole, half = make_imitator(), make_imitator()
    before = weights(whole)
    shown = demonstrations(4)
    whole.learner.imitation.learn_first(shown)
    assert moved(whole, before, "policy.") == {True} and moved(whole, before, "critics.") == {False}
    half.learner.imitation.learn_first(shown[:2])
    again = make_imitator()
    again.policy.load_state_dict(half.policy.state_dict())
    again.load_state_dict(copy.deepcopy(half.state_dict()))
    again.learner.imitation.learn_first(shown[2:])
    for engine in (whole, again):  # what imitated leaves the optimisers of the run as they were
        engine.learner.learn([minibatch(1), minibatch(2)])
    wanted = weights(whole)
    assert all(torch.equal(each, wanted[name]) for name, each in weights(again).items())
    assert not whole.state_dict()["imitator"], "checkpoints of what follows do without its moments"


def test_the_cloned_policy_sees_through_its_own_encoder() -> None:
    """Features move while critics learn; what the cloned policy would do must not."""
    engine = make_imitator(ImitationConfig(cloned_coef=1.0))
    learner = engine.learner
    assert isinstance(learner, DemonstratedActorCritic)
    learner.keep_cloned()
    learner.pixels = 0
    batch = minibatch()
    before = learner.encode(batch)
    assert learner.cloned is not None and not bool(learner._distance(before).any())
    wanted = learner.cloned.mode(learner.features(before.columns, of=learner.cloned))
    engine.learner.learn([minibatch(1), minibatch(2)])
    after = learner.encode(batch)
    assert torch.equal(learner.cloned.mode(learner.features(after.columns, of=learner.cloned)), wanted)
    assert not torch.equal(after.features, before.features) and bool((learner._distance(after) > 0).all())


def test_shifts_repeat_the_edge() -> None:
    draw = np.random.default_rng(1)
    images = torch.from_numpy(draw.integers(0, 256, (7, V, H, W, 3), dtype=np.uint8))
    shifts = draw_shifts(7, 3, torch.Generator().manual_seed(2))
    assert int(shifts.min()) >= 0 and int(shifts.max()) <= 6
    shifts[0], shifts[1], shifts[2] = torch.tensor([3, 3]), torch.tensor([0, 6]), torch.tensor([6, 0])
    found = shifted(images, shifts, 3)
    assert found.dtype is torch.uint8 and torch.equal(found[0], images[0])
    for row, (down, right) in enumerate(shifts.tolist()):
        rows, columns = (np.clip(np.arange(n) + by - 3, 0, n - 1) for n, by in ((H, down), (W, right)))
        wanted = images[row].numpy()[:, rows[:, None], columns]
        np.testing.assert_array_equal(found[row].numpy(), wanted)


def test_shifts_reach_every_offset_and_differ_by_row() -> None:
    shifts = draw_shifts(4000, 2, torch.Generator().manual_seed(1))
    pairs, counts = torch.unique(shifts, dim=0, return_counts=True)
    assert len(pairs) == 25 and int(counts.min()) > 100


def test_what_followed_is_shifted_by_itself() -> None:
    soft = make_engine(augment_pixels=4).learner
    assert soft is not None
    batch = minibatch(size=64)
    batch.columns["next_images"] = batch.columns["images"].clone()
    found = soft.with_shifts(batch.columns, batch)
    same = (found["images"] == found["next_images"]).flatten(1).all(1)
    assert int(same.sum()) < 10
    again = soft.with_shifts(batch.columns, batch)
    assert not torch.equal(again["images"], found["images"]), "each minibatch has shifts of its own"


def test_shifts_do_not_depend_on_the_number_of_ranks() -> None:
    whole, halves = minibatch(), [part(minibatch(), slice(0, 5)), part(minibatch(), slice(5, None))]
    softs = [make_engine().learner for _ in range(3)]
    assert all(softs)
    wanted, *found = (
        soft.with_shifts(batch.columns, batch)  # type: ignore[union-attr]
        for soft, batch in zip(softs, (whole, *halves), strict=True)
    )
    for name, images in wanted.items():
        assert torch.equal(torch.cat([each[name] for each in found]), images)


def test_a_rank_without_a_row_shifts_nothing() -> None:
    engine = make_engine()
    before = weights(engine)
    engine.learner.learn([part(minibatch(), slice(0, 0))])
    assert moved(engine, before, "") == {False} and engine.guard.skipped == 0


def test_a_resumed_engine_learns_the_same_bits() -> None:
    whole, half = make_engine(actor_every=2), make_engine(actor_every=2)
    batches = [minibatch(number) for number in range(5)]
    for engine in (whole, half):
        engine.learner.learn(batches[:3])
    again = make_engine(seed=9, actor_every=2)
    again.policy.load_state_dict(half.policy.state_dict())
    again.load_state_dict(copy.deepcopy(half.state_dict()))
    for engine in (whole, again):
        engine.learner.learn(batches[3:])
    wanted = weights(whole)
    assert all(torch.equal(each, wanted[name]) for name, each in weights(again).items())


@pytest.mark.parametrize(
    "change",
    [
        {"augment_pixels": 3},
        {"augment_pixels": 0},
        {"model": {"channels": [4, 7]}},
        {"model": {"strides": [2, 1]}},
        {"model": {"encoder": "test_resnet"}},
        {"model": {"image_features": 11}},
        {"model": {"state_features": 6}},
        {"model": {"state": False}},
        {"model": {"encoders": Encoders.each}},
        {"model": {"cameras": ["hand"]}},
        {"model": {"hidden_sizes": [17]}},
        {"model": {"activation": Activation.relu}},
        {"model": {"log_std_init": -1.0}},
        {"optimizer": OptimizerConfig(lr=1e-2, max_grad_norm=100.0, critic_lr=1e-3)},
    ],
    ids=str,
)
def test_every_number_is_read(change: dict[str, Any]) -> None:
    one, other = make_engine(), make_engine(**change)
    for engine in (one, other):
        engine.learner.learn([minibatch(1), minibatch(2)])
    found, wanted = weights(other), weights(one)
    assert found.keys() != wanted.keys() or any(
        found[name].shape != each.shape or not torch.equal(found[name], each) for name, each in wanted.items()
    )


class Noted(TorchDispatchMode):
    """Notes what operations on real tensors return."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._live.note(tensor)
        return made


def test_memory_is_planned_with_the_images_of_a_minibatch() -> None:
    """The dry run counts what learning from a minibatch really allocates, beside weights and gradients."""
    size = 256
    engine, batch = make_engine(), minibatch(size=size)
    soft = engine.learner
    assert soft is not None
    engine.learner.learn([batch])
    known = [*engine.policy.parameters(), *soft.critics.parameters(), *soft.targets.parameters()]
    known += [each.grad for each in known if each.grad is not None]
    with LiveBytes([*known, *batch.columns.values()]) as live, Noted(live):
        engine.learner.learn([batch])

    observation = Observation(
        images=np.zeros((2, V, H, W, 3), np.uint8), proprio=np.zeros((2, S), np.float32), task_descriptions=["a"] * 2
    )
    with torch.device("meta"):
        policy = CNNPolicy(CNNConfig(name="cnn", **SMALL), SPEC, C)
    of_method = {"learner": type(engine.learner), "algorithm": engine.learner.algorithm}
    traced = trace(policy, observation, EngineConfig(), cuda=False, **of_method)
    assert traced.lines.learning.at(size) == pytest.approx(live.peak, rel=0.25)
    assert live.peak > 2 * size * V * H * W * 3 * 4
