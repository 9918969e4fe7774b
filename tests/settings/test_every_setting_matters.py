"""No dead keys: changing any setting of model, rollout, algorithm or optimiser changes what is learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from embodyrl.config import load_config
from embodyrl.config.schema import AlgorithmConfig, Config, OptimizerConfig, RolloutConfig
from embodyrl.envs.manager import EnvManager
from embodyrl.models.mlp.options import MLPConfig
from embodyrl.pipelines.build import build_pipeline
from embodyrl.pipelines.iteration import Iteration
from embodyrl.registry import ADVANTAGES
from embodyrl.rollout.collector import Collector
from embodyrl.runner.build import build_engine

BASE = [
    "env.num_envs=4",
    "env.workers=1",
    "env.max_episode_steps=16",
    "rollout.chunks=12",
    "rollout.chunk_size=2",
    "algorithm.epochs=2",
    "algorithm.minibatches=2",
    "model.hidden_sizes=[8]",
    "run.iterations=3",
    "engine.optimizer.lr=0.01",
    "engine.optimizer.schedule=constant",
]
"""Episodes are cut off (8 decisions) within every rollout, decisions hold two actions, and steps are large enough to
clip."""

WHOLE = ["rollout.episodes=whole", "algorithm=grpo"]

CHANGES = {
    "model.hidden_sizes": ["model.hidden_sizes=[9]"],
    "model.activation": ["model.activation=relu"],
    "model.log_std_init": ["model.log_std_init=-1.0"],
    "model.normalize_observations": ["model.normalize_observations=false"],
    "rollout.chunks": ["rollout.chunks=10"],
    "rollout.chunk_size": ["rollout.chunk_size=1"],
    "rollout.episodes": ["rollout.episodes=whole"],
    "rollout.schedule": ["rollout.schedule=pipeline"],
    "rollout.group_size": [*WHOLE, "rollout.group_size=2"],
    "algorithm.name": [*WHOLE, "rollout.group_size=4"],
    "algorithm.advantage": [*WHOLE, "rollout.group_size=4"],
    "algorithm.reward_scale": ["algorithm.reward_scale=0.01"],
    "algorithm.gamma": ["algorithm.gamma=0.5"],
    "algorithm.discount_per": ["algorithm.discount_per=action"],
    "algorithm.gae_lambda": ["algorithm.gae_lambda=0.5"],
    "algorithm.bootstrap": ["algorithm.bootstrap=none"],
    "algorithm.normalize_advantages": ["algorithm.normalize_advantages=false"],
    "algorithm.epochs": ["algorithm.epochs=3"],
    "algorithm.minibatches": ["algorithm.minibatches=4"],
    "algorithm.clip_low": ["algorithm.clip_low=0.01"],
    "algorithm.clip_high": ["algorithm.clip_high=0.01"],
    "algorithm.value_coef": ["algorithm.value_coef=0.1"],
    "algorithm.value_clip": ["algorithm.value_clip=0.001"],
    "algorithm.entropy_coef": ["algorithm.entropy_coef=0.1"],
    "algorithm.target_kl": ["algorithm.target_kl=1.0e-9"],
    "engine.optimizer.lr": ["engine.optimizer.lr=0.02"],
    "engine.optimizer.schedule": ["engine.optimizer.schedule=linear"],
    "engine.optimizer.betas": ["engine.optimizer.betas=[0.5,0.999]"],
    "engine.optimizer.eps": ["engine.optimizer.eps=0.1"],
    "engine.optimizer.weight_decay": ["engine.optimizer.weight_decay=0.5"],
    "engine.optimizer.max_grad_norm": ["engine.optimizer.max_grad_norm=0.01"],
}

ELSEWHERE = {
    "rollout.ready_slots": "tests/rollout/test_schedules.py",
    "rollout.observe": "tests/rollout/test_schedules.py: what is kept, not what is learned",
    "model.name": "tests/cli/test_commands.py runs another model",
    "model.checkpoint": "tests/models/test_policies.py",
    "algorithm.loss": "one loss so far; an unknown one is refused in tests/config",
}


def load(*overrides: str) -> Config:
    return load_config("experiment/gym_pendulum", [*BASE, *overrides]).config


@pytest.fixture(scope="module")
def managers() -> Iterator[dict[int, EnvManager]]:
    """Simulators by chunk size; started once."""
    opened: dict[int, EnvManager] = {}
    yield opened
    for manager in opened.values():
        manager.close()


def learn(config: Config, managers: dict[int, EnvManager]) -> torch.Tensor:
    """All weights after three iterations, in one vector."""
    chunk_size = config.rollout.chunk_size
    if chunk_size not in managers:
        managers[chunk_size] = EnvManager(config.env, chunk_size=chunk_size)
    manager = managers[chunk_size]
    engine = build_engine(config, manager, weights=None)
    critic = ADVANTAGES.entry(config.algorithm.advantage).facts["critic"]
    collector = Collector(manager, engine, env=config.env, rollout=config.rollout, critic=critic, seed=config.seed)
    pipeline = build_pipeline(config)
    for _ in range(3):
        pipeline.run(Iteration(config=config, collector=collector, engine=engine))
    return torch.nn.utils.parameters_to_vector(engine.policy.parameters()).detach()


def test_the_same_settings_learn_the_same(managers: dict[int, EnvManager]) -> None:
    assert torch.equal(learn(load(), managers), learn(load(), managers))


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_changes_what_is_learned(name: str, managers: dict[int, EnvManager]) -> None:
    before, after = learn(load(), managers), learn(load(*CHANGES[name]), managers)
    assert before.shape != after.shape or not torch.equal(before, after)


def test_group_size_alone_changes_what_grpo_learns(managers: dict[int, EnvManager]) -> None:
    two, four = (learn(load(*WHOLE, f"rollout.group_size={size}"), managers) for size in (2, 4))
    assert not torch.equal(two, four)


def test_no_setting_was_forgotten() -> None:
    sections = {
        "model": MLPConfig,
        "rollout": RolloutConfig,
        "algorithm": AlgorithmConfig,
        "engine.optimizer": OptimizerConfig,
    }
    every = {f"{section}.{field.name}" for section, kind in sections.items() for field in dataclasses.fields(kind)}
    assert every == CHANGES.keys() | ELSEWHERE.keys()
