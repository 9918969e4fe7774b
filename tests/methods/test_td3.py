"""TD3 and TD3+BC: targets by hand, who learns when, and noise of a fixed size."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learning import LearningEngine, learning_engine

from embodyrl.config import ConfigError, load_config
from embodyrl.config.schema import EngineConfig, OptimizerConfig
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.methods.replay.config import CriticsConfig
from embodyrl.methods.td3.config import DeterministicConfig, TD3Config
from embodyrl.methods.td3.learner import ExplorationNoise
from embodyrl.models.mlp.options import Distribution, MLPConfig
from embodyrl.models.mlp.policy import MLPPolicy
from embodyrl.rollout.hooks import Decision
from embodyrl.rollout.replay import Minibatch

S, D, M = 3, 2, 32
SPEC = SimulatorSpec(
    tasks={"push": "push"},
    actions=(ActionField(name="arm", meaning="normalized", unit="1", low=(-2.0, 0.0), high=(2.0, 1.0)),),
    proprio_dim=S,
    max_episode_steps=10,
    control_frequency=1.0,
)


def make_engine(**changes: Any) -> LearningEngine:
    torch.manual_seed(0)
    options: dict[str, Any] = {"critics": CriticsConfig(hidden_sizes=[16, 16], layer_norm=False)}
    return learning_engine(
        MLPPolicy(MLPConfig(name="mlp", hidden_sizes=[16], head=Distribution.squashed), SPEC, 1),
        config=EngineConfig(optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=100.0)),
        algorithm=TD3Config(name="td3", off_policy=DeterministicConfig(**(options | changes))),
        iterations=10,
        seed=1,
    )


def minibatch(seed: int = 5) -> Minibatch:
    draw = torch.Generator().manual_seed(seed)
    return Minibatch(
        columns={
            "proprio": torch.randn(M, S, generator=draw),
            "next_proprio": torch.randn(M, S, generator=draw),
            "actions": torch.rand(M, 1, D, generator=draw),
            "rewards": torch.randn(M, 1, generator=draw),
            "success": torch.zeros(M, 1, dtype=torch.bool),
            "steps": torch.ones(M, dtype=torch.int64),
            "terminated": torch.rand(M, generator=draw) < 0.2,
            "truncated": torch.zeros(M, dtype=torch.bool),
        },
        places=torch.arange(M),
        size=M,
    )


def test_the_target_is_the_smaller_value_of_the_slow_policys_action_with_noise_that_is_cut() -> None:
    engine = make_engine(target_noise=0.3, target_noise_clip=0.2)
    learner, found = engine.learner, minibatch()
    drawn = copy.deepcopy(learner.noise.get_state())
    with torch.no_grad():
        generator = torch.Generator()
        generator.set_state(drawn)
        noise = (0.3 * torch.randn(M, D, generator=generator)).clamp(-0.2, 0.2)
        seen = learner.encode(found)
        actions = (learner.target_policy.mode(seen.following) + noise).clamp(-1.0, 1.0)
        values = learner.targets(seen.following, actions).min(0).values
        wanted = found.columns["rewards"].squeeze(1) + 0.99 * values * ~found.columns["terminated"]
        loss = (learner.critics(seen.features, seen.actions) - wanted).square().sum(0).mean()
    assert learner.learn([found])["train/critic_loss"] == pytest.approx(float(loss), rel=1e-5)


def test_the_policy_and_all_slow_copies_learn_every_second_time() -> None:
    engine = make_engine(actor_every=2)
    parts = {
        "policy": engine.policy,
        "target_policy": engine.learner.target_policy,
        "critics": engine.learner.critics,
        "targets": engine.learner.targets,
    }

    def moved(number: int) -> set[str]:
        before = {name: [each.clone() for each in part.parameters()] for name, part in parts.items()}
        engine.learner.learn([minibatch(number)])
        return {
            name
            for name, part in parts.items()
            if any(not torch.equal(*pair) for pair in zip(part.parameters(), before[name], strict=True))
        }

    assert moved(1) == {"critics"}
    assert moved(2) == set(parts)


def test_with_little_weight_on_values_the_policy_becomes_what_was_demonstrated() -> None:
    engine = make_engine(cloning=1e-3, actor_every=1)
    shown = replace(minibatch(), demonstrated=torch.ones(M, dtype=torch.bool))
    found = [engine.learner.learn([shown])["train/imitation_loss"] for _ in range(200)]
    assert found[-1] < 0.2 * found[0]
    nobody = replace(minibatch(), demonstrated=torch.zeros(M, dtype=torch.bool))
    assert engine.learner.learn([nobody])["train/imitation_loss"] == 0.0


def test_a_resumed_learner_learns_the_same_bits() -> None:
    whole, again = make_engine(), make_engine()
    whole.learner.learn([minibatch(1), minibatch(2)])
    again.policy.load_state_dict(whole.policy.state_dict())
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    for engine in (whole, again):
        engine.learner.learn([minibatch(3), minibatch(4)])
    for module in ("critics", "targets", "target_policy", "policy"):
        one, other = (getattr(engine.learner, module).state_dict() for engine in (whole, again))
        assert all(torch.equal(one[name], other[name]) for name in one), module


def test_rollouts_have_noise_of_a_fixed_size_within_the_range_but_random_actions_stay() -> None:
    hook, actions = ExplorationNoise(SPEC, 0.1), np.tile(np.array([0.5, 0.95], np.float32), (4000, 1, 1))

    def executed(random: bool) -> np.ndarray:
        decision = Decision(
            slots=np.arange(4000),
            numbers=np.zeros(4000, np.int64),
            observation=Observation(proprio=np.zeros((4000, S), np.float32), task_descriptions=["push"] * 4000),
            actions=actions,
            random=random,
            tracker=None,  # type: ignore[arg-type]
            noise=torch.Generator().manual_seed(1),
        )
        return hook.decide(decision)["actions"]

    assert np.array_equal(executed(random=True), actions)
    noisy = executed(random=False)[:, 0]
    assert (noisy[:, 0] - 0.5).std() == pytest.approx(0.2, rel=0.05), "a tenth of half the range -2 .. 2"
    assert noisy[:, 1].max() == 1.0 and 0.1 < (noisy[:, 1] == 1.0).mean() < 0.25


def test_what_it_learns_from_is_there() -> None:
    settings = ["algorithm=td3", "model.head=squashed"]
    assert load_config("experiment/gym_pendulum", settings).config.algorithm.name == "td3"
    with pytest.raises(ConfigError, match=r"cloning = 2\.5 learns from demonstrations, but data\.path is null"):
        load_config("experiment/gym_pendulum", [*settings, "algorithm.off_policy.cloning=2.5"])
    with pytest.raises(ConfigError, match="differentiable functions of noise"):
        load_config("experiment/metaworld_reach", ["algorithm=td3", "model=pi0", "env.cameras=[corner]"])
