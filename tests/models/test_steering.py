"""Steering a frozen flow policy: its own noise gives its own actions, nothing of it learns, and what is stored is all
that learning needs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from learning import LearningEngine, learning_engine

from embodyrl.config import load_config
from embodyrl.config.infos import model_info
from embodyrl.config.schema import EngineConfig, OptimizerConfig
from embodyrl.engine.lora import save_policy
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.methods.dsrl.config import DSRLConfig, SteeredConfig
from embodyrl.methods.replay.config import CriticsConfig
from embodyrl.methods.sac.config import TemperatureConfig
from embodyrl.models import PolicyError, PolicyObservation, build_policy, load_policy
from embodyrl.models.flow.config import FlowInfo, SteeringConfig
from embodyrl.models.flow.steering import SteeredPolicy
from embodyrl.models.policy import PLAN, PLAN_WEIGHTS
from embodyrl.models.saved import STEERING_FILE
from embodyrl.registry import SupportedModel
from embodyrl.rollout.replay import Minibatch

C, D, CHUNKS = 2, 4, 4
SPEC = SimulatorSpec(
    tasks={"push": "push the cube"},
    actions=(ActionField(name="arm", meaning="delta_position", unit="m", low=(-1.0,) * D, high=(1.0,) * D),),
    proprio_dim=5,
    max_episode_steps=10,
    control_frequency=20.0,
    cameras=("front",),
    image_size=(32, 32),
)
SMALL: dict[str, dict[str, Any]] = {
    "pi0": {"scratch": {"image_size": 32, "layers": 2}},
    "pi05": {"scratch": {"image_size": 32, "layers": 2}, "value_from": "prefix"},
    "gr00t": {"scratch": {"image_size": 32, "layers": 1, "vision_layers": 1, "action_layers": 2, "action_horizon": 4}},
    "gr00t_n17": {
        "scratch": {"image_size": 32, "layers": 1, "vision_layers": 1, "action_layers": 3, "action_horizon": 4}
    },
    "smolvla": {"scratch": {"image_size": 32, "layers": 2, "vision_layers": 1}, "frozen": "nothing", "horizon": 4},
}
STEERING = SteeringConfig(limit=0.5, rows=1, hidden_sizes=[16])


@pytest.fixture(scope="module", params=SMALL)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Name of a model, and its checkpoint as a run saves it."""
    return request.param, checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pi0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("pi0", tmp_path_factory.mktemp("pi0"))


def options(name: str, **changes: Any) -> Any:
    given = {"name": name, "denoising_steps": 3, "value_sizes": [8]} | SMALL[name] | changes
    dataclass: Any = SupportedModel.entry(name).load_options()
    types = {each.name: each.type for each in dataclasses.fields(dataclass)}
    scratch = type(dataclass(name=name).scratch)(**given.pop("scratch"))
    for key in ("value_from", "frozen"):
        if key in given and key in types:
            given[key] = type(getattr(dataclass(name=name), key))(given[key])
    return dataclass(**given, scratch=scratch)


def checkpoint(name: str, folder: Path) -> Path:
    config = options(name)
    policy = build_policy(config, SPEC, chunk_size=4 if name in ("pi0", "pi05") else C, seed=1)
    policy.save(folder, config)
    return folder


def steered(folder: Path, name: str = "pi0", steering: SteeringConfig = STEERING, **changes: Any) -> SteeredPolicy:
    config = options(name, checkpoint=str(folder), **changes)
    policy = build_policy(config, SPEC, chunk_size=C, seed=1, steering=steering)
    assert isinstance(policy, SteeredPolicy)
    return policy.eval()


def inputs_of(policy: Any, batch: int = 3, seed: int = 0) -> Any:
    draw = np.random.default_rng(seed)
    return policy.preprocess(
        PolicyObservation(
            images=torch.from_numpy(draw.integers(0, 256, (batch, 1, 32, 32, 3), dtype=np.uint8)),
            proprio=torch.from_numpy(draw.normal(size=(batch, 5)).astype(np.float32)),
            task_descriptions=["push the cube"] * batch,
        )
    )


def begun(policy: SteeredPolicy) -> SteeredPolicy:
    """Give it statistics, and weights that differ from 0 in the last layer."""
    policy.update_statistics(
        {"features": torch.randn(50, policy.feature_dim, generator=torch.Generator().manual_seed(3))}
    )
    with torch.no_grad():
        policy.steering.actor[-1].weight.normal_(std=0.3, generator=torch.Generator().manual_seed(4))
    return policy


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors*")}


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.inference_mode()
def test_the_noise_of_the_frozen_policy_gives_its_actions_bit_for_bit(saved: tuple[str, Path]) -> None:
    name, folder = saved
    policy, inputs = steered(folder, name), None
    base = build_policy(options(name, checkpoint=str(folder)), SPEC, chunk_size=C, seed=1).eval()
    inputs = inputs_of(base)
    usual = base.act(inputs, "eval")
    found = policy.act(inputs_of(policy), "eval")
    assert torch.equal(found.actions, usual.actions)
    assert torch.equal(base.act(inputs, "eval", start=base.start.expand(3, -1, -1)).actions, usual.actions)
    drawn = torch.randn(3, *base.start.shape, generator=generator())
    wanted = base.act(inputs, "eval", start=drawn)
    explored = policy.explore(inputs_of(policy), generator())
    assert torch.equal(explored.actions, wanted.actions) and not torch.equal(wanted.actions, usual.actions)
    assert torch.equal(explored.trace["noise"], drawn[:, :1])
    # Before it begins to learn it draws what the frozen policy draws; afterwards noise is its own.
    assert torch.equal(policy.act(inputs_of(policy), "train", generator()).actions, wanted.actions)
    assert not torch.equal(begun(policy).act(inputs_of(policy), "eval").actions, usual.actions)


@torch.inference_mode()
def test_noise_is_chosen_for_the_first_rows_and_repeated(pi0: Path) -> None:
    policy = begun(steered(pi0, steering=dataclasses.replace(STEERING, rows=2)))
    inputs = inputs_of(policy)
    acted = policy.act(inputs, "train", generator())
    noise = acted.trace["noise"]
    assert noise.shape == (3, 2, D) and float(noise.abs().max()) <= 0.5 < 3 * float(noise.abs().max())
    whole = policy.fill(noise.flatten(1))
    assert whole.shape == (3, CHUNKS, D)
    assert (
        torch.equal(whole[:, :2], noise)
        and torch.equal(whole[:, 2], noise[:, 1])
        and torch.equal(whole[:, 3], noise[:, 1])
    )
    assert torch.equal(policy.base.act(inputs, "eval", start=whole).actions, acted.actions), "no step is random"
    mode = policy.act(inputs, "eval").trace["noise"]
    unit, _ = policy.draw(policy.encode(inputs), torch.zeros(3, policy.decision_size))
    torch.testing.assert_close(mode.flatten(1), unit * 0.5)
    scored = policy.evaluate({}, acted.trace)
    torch.testing.assert_close(scored.logprobs, acted.logprobs, atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_what_is_stored_is_what_was_acted_by_and_tells_observations_apart(saved: tuple[str, Path]) -> None:
    name, folder = saved
    policy = begun(steered(folder, name))
    inputs = inputs_of(policy)
    stored = policy.act(inputs, "train", generator()).trace["features"]
    assert stored.dtype is torch.float16 and stored.shape == (3, policy.feature_dim)
    assert torch.equal(stored, policy.stored_features(inputs))
    assert torch.equal(policy.encode_stored({"features": stored}), policy.encode(inputs))
    other = policy.stored_features(inputs_of(policy, seed=1))
    assert not torch.equal(other, stored) and bool((stored[0] != stored[1]).any())
    # The velocity at zero noise is part of it.
    velocity = policy.base.decide(
        policy.base.condition(inputs), inputs, "eval", start=torch.zeros(3, *policy.base.start.shape)
    )
    chain = velocity.trace["chain"]
    share = policy.base.grid.shares[0] - policy.base.grid.shares[1]
    first = (chain[:, 0] - chain[:, 1])[:, :C, :D].flatten(1) / share
    torch.testing.assert_close(stored[:, -C * D :].float(), first, atol=2e-3, rtol=2e-3)


def test_sizes_are_known_without_building_the_model(saved: tuple[str, Path]) -> None:
    name, folder = saved
    policy = steered(folder, name)
    info = model_info(name)
    assert isinstance(info, FlowInfo) and info.sizes(options(name, checkpoint=str(folder)), C) == policy.base.sizes


def engine_of(policy: SteeredPolicy) -> LearningEngine:
    settings = SteeredConfig(
        critics=CriticsConfig(hidden_sizes=[16]), temperature=TemperatureConfig(initial=0.1), steering=policy.config
    )
    return learning_engine(
        policy,
        config=EngineConfig(optimizer=OptimizerConfig(lr=1e-2)),
        algorithm=DSRLConfig(name="dsrl", off_policy=settings),
        iterations=10,
        seed=1,
    )


def minibatch(policy: SteeredPolicy, size: int = 32) -> Minibatch:
    draw = torch.Generator().manual_seed(5)
    return Minibatch(
        columns={
            "features": torch.randn(size, policy.feature_dim, generator=draw).half(),
            "next_features": torch.randn(size, policy.feature_dim, generator=draw).half(),
            "noise": torch.randn(size, *policy.noise_shape, generator=draw),
            "rewards": torch.randn(size, C, generator=draw),
            "success": torch.zeros(size, C, dtype=torch.bool),
            "steps": torch.full((size,), C),
            "terminated": torch.rand(size, generator=draw) < 0.2,
            "truncated": torch.zeros(size, dtype=torch.bool),
        },
        places=torch.arange(size),
        size=size,
    )


def test_only_the_small_networks_learn_and_the_frozen_one_is_never_run(
    pi0: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = begun(steered(pi0))
    engine = engine_of(policy)
    assert engine.learner is not None
    learned = {id(each) for optimizer in engine.learner.optimizers.values() for each in optimizer.parameters}
    assert not learned & {id(each) for each in policy.base.parameters()}
    assert {id(each) for each in policy.steering.parameters()} == {id(each) for each in engine.optimizer.parameters}
    before = {name: each.detach().clone() for name, each in policy.named_parameters()}
    monkeypatch.setattr(type(policy.base), "condition", lambda *_: pytest.fail("learning looks at an image"))
    metrics = engine.learner.learn([minibatch(policy)] * 3)
    assert np.isfinite(metrics["train/critic_loss"]) and metrics["train/updates"] == 3
    moved = {name for name, each in policy.named_parameters() if not torch.equal(each, before[name])}
    assert moved == {name for name in before if name.startswith("steering.actor.")}
    assert all(each.grad is None and not each.requires_grad for each in policy.base.parameters())


@torch.inference_mode()
def test_a_saved_policy_has_the_public_weights_byte_for_byte(saved: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = saved
    policy = begun(steered(folder, name))
    config = options(name, checkpoint=str(folder))
    first, second, third = (tmp_path / each for each in ("first", "second", "third"))
    for place, before in ((first, None), (second, first), (third, folder / "gone")):
        place.mkdir()
        save_policy(policy, place, config, before)
        assert digests(place) == digests(folder) | {STEERING_FILE: digests(place)[STEERING_FILE]}
    weights = next(path.name for path in folder.glob("model*.safetensors"))
    links = [(place / weights).stat().st_nlink for place in (folder, first, second, third)]
    assert links == [1, 2, 2, 1], "from the checkpoint before they are linked, never from somebody else's"
    again = load_policy(name, checkpoint=second, simulator=SPEC, denoising_steps=3)
    assert isinstance(again, SteeredPolicy) and again.has_begun and again.config == policy.config
    assert torch.equal(again.act(inputs_of(again), "eval").actions, policy.act(inputs_of(policy), "eval").actions)


def test_steering_of_a_checkpoint_goes_on_or_is_refused(pi0: Path, tmp_path: Path) -> None:
    policy = begun(steered(pi0))
    policy.save(tmp_path, options("pi0", checkpoint=str(pi0)))
    assert torch.equal(steered(tmp_path).steering.actor[-1].weight, policy.steering.actor[-1].weight)
    with pytest.raises(PolicyError, match=r"limit = 1.0, but the checkpoint was saved with 0.5"):
        steered(tmp_path, steering=dataclasses.replace(STEERING, limit=1.0))
    with pytest.raises(PolicyError, match=r"steering.rows = 5, but model 'pi0' has a horizon of 4"):
        steered(pi0, steering=dataclasses.replace(STEERING, rows=5))
    (tmp_path / STEERING_FILE).unlink()
    with pytest.raises(PolicyError, match=r"holds no steering\.safetensors"):
        steered(tmp_path)
    description = json.loads((tmp_path / "policy.json").read_text())
    (tmp_path / "policy.json").write_text(json.dumps(description | {"steering": {"limits": 1}}))
    with pytest.raises(PolicyError, match=r"policy.json in .* is damaged"):
        steered(tmp_path)


def test_columns_of_the_replay_follow_from_the_settings(pi0: Path) -> None:
    config = load_config("gym_pendulum_sac", []).config
    policy = steered(pi0)
    algorithm = DSRLConfig(name="dsrl", off_policy=SteeredConfig(steering=SteeringConfig(rows=3)))
    config = dataclasses.replace(config, algorithm=algorithm, rollout=dataclasses.replace(config.rollout, chunk_size=C))
    fields = config.algorithm.fields(config, proprio_dim=5, action_dim=D, flow=policy.base.sizes)
    assert fields["features"].shape == (policy.feature_dim,) and fields["features"].observed
    assert fields["features"].dtype is np.float16 and fields["noise"].shape == (3, D)
    assert not {"images", "proprio", "actions"} & fields.keys()


def test_a_chunk_goes_on_from_the_one_before_also_a_steered_one(saved: tuple[str, Path]) -> None:
    name, folder = saved
    for make in (load, steered):
        policy = make(folder, name, rtc=5.0)
        inputs = inputs_of(policy)
        with torch.inference_mode():
            alone = policy.act(inputs, "eval")
            plan, weights = alone.plan + 0.5, torch.zeros(alone.plan.shape[:2])
            weights[0, :2] = 1.0  # two steps of the first row are held; the others have no plan
            guided = policy.act(inputs | {PLAN: plan, PLAN_WEIGHTS: weights}, "eval")
        assert (guided.plan - plan)[0, :2].abs().mean() < 0.1
        torch.testing.assert_close(guided.actions[1:], alone.actions[1:], atol=1e-5, rtol=1e-5)
        assert make(folder, name).act(inputs, "eval").plan is None


def load(folder: Path, name: str, **changes: Any) -> Any:
    """The flow policy itself."""
    return build_policy(options(name, checkpoint=str(folder), **changes), SPEC, chunk_size=C, seed=1).eval()
