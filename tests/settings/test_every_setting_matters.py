"""No dead keys: changing any setting of model, rollout, algorithm or optimiser changes what is learned."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from embodyrl.algorithms.options import GRPOConfig
from embodyrl.config import load_config
from embodyrl.config.compose import components
from embodyrl.config.fields import choices_of, registry_of, settings_of
from embodyrl.config.schema import (
    Config,
    EngineConfig,
    GuardConfig,
    LoraConfig,
    MachinesConfig,
    OptimizerConfig,
    PlacementConfig,
    RolloutConfig,
    RolloutWorkersConfig,
)
from embodyrl.envs.manager import EnvManager
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.models.mlp.options import MLPConfig
from embodyrl.pipelines.build import build_pipeline
from embodyrl.pipelines.pipeline import Iteration
from embodyrl.runner.build import build_method
from embodyrl.runner.share import LocalEnvs, LocalRollouts

BASE = [
    "env.num_envs=8",
    "env.workers=1",
    "env.max_episode_steps=16",
    "env.success_return=-105.0",
    "rollout.num_chunks=12",
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
GROUPS = [*WHOLE, "rollout.group_size=2"]
MIXED = ["rollout.episodes=whole", "rollout.group_size=4", "model.log_std_init=1.0"]
"""Groups with successes and failures."""
DAPO = [*MIXED, "algorithm=dapo"]
ACCURACY = [*DAPO, "algorithm.filter.name=accuracy"]
SRPO = [*MIXED, "algorithm=srpo"]
STALE = [*ACCURACY, "rollout.group_size=2", "algorithm.filter.accuracy_low=0.0", "algorithm.reward=dense"]
"""More groups are kept than an iteration learns from; the others are a version old when the next one does."""
DECOUPLED = [*STALE, "algorithm.loss=decoupled_ppo"]
ACTIONS = ["rollout.episodes=whole", "algorithm=reinforce_pp", "algorithm.logprob_level=action"]

CHANGES = {
    "model.hidden_sizes": ["model.hidden_sizes=[9]"],
    "model.activation": ["model.activation=relu"],
    "model.log_std_init": ["model.log_std_init=-1.0"],
    "model.normalize_observations": ["model.normalize_observations=false"],
    "rollout.num_chunks": ["rollout.num_chunks=10"],
    "rollout.chunk_size": ["rollout.chunk_size=1"],
    "rollout.episodes": ["rollout.episodes=whole"],
    "rollout.schedule": ["rollout.schedule=pipeline"],
    "rollout.blocks": ["rollout.blocks=2"],
    "rollout.episodes_per_slot": [*WHOLE, "rollout.group_size=4", "rollout.episodes_per_slot=2"],
    "rollout.group_size": [*WHOLE, "rollout.group_size=2"],
    "algorithm.name": [*WHOLE, "rollout.group_size=4"],
    "algorithm.advantage": [*WHOLE, "rollout.group_size=4"],
    "algorithm.reward": ["algorithm.reward=success", "rollout.episodes=whole"],
    "algorithm.time_penalty": ["algorithm.time_penalty=1.0"],
    "algorithm.reward_scale": ["algorithm.reward_scale=0.01"],
    "algorithm.gamma": ["algorithm.gamma=0.5"],
    "algorithm.discount_per": ["algorithm.discount_per=action"],
    "algorithm.advantage.gae_lambda": ["algorithm.advantage.gae_lambda=0.5"],
    "algorithm.bootstrap": ["algorithm.bootstrap=none"],
    "algorithm.normalize_advantages": ["algorithm.normalize_advantages=false"],
    "algorithm.loss": ["algorithm.loss=cpgd"],
    "algorithm.logprob_level": ["algorithm.logprob_level=action"],
    "algorithm.aggregation": ["algorithm.aggregation=seq_mean_token_mean"],
    "algorithm.epochs": ["algorithm.epochs=3"],
    "algorithm.minibatches": ["algorithm.minibatches=4"],
    "algorithm.loss.clip_low": ["algorithm.loss.clip_low=0.01"],
    "algorithm.loss.clip_high": ["algorithm.loss.clip_high=0.01"],
    "algorithm.value_coef": ["algorithm.value_coef=0.1"],
    "algorithm.value_clip": ["algorithm.value_clip=0.001"],
    "algorithm.value_huber": ["algorithm.value_huber=0.1"],
    "algorithm.kl_coef": ["algorithm.kl_coef=0.1"],
    "algorithm.entropy_coef": ["algorithm.entropy_coef=0.1"],
    "algorithm.target_kl": ["algorithm.target_kl=1.0e-9"],
    "engine.precision": ["engine.precision=bfloat16"],
    "engine.optimizer.lr": ["engine.optimizer.lr=0.02"],
    "engine.optimizer.critic_lr": ["engine.optimizer.critic_lr=0.02"],
    "engine.optimizer.schedule": ["engine.optimizer.schedule=linear"],
    "engine.optimizer.warmup": ["engine.optimizer.warmup=1"],
    "engine.optimizer.betas": ["engine.optimizer.betas=[0.5,0.999]"],
    "engine.optimizer.eps": ["engine.optimizer.eps=0.1"],
    "engine.optimizer.weight_decay": ["engine.optimizer.weight_decay=0.5"],
    "engine.optimizer.max_grad_norm": ["engine.optimizer.max_grad_norm=0.01"],
}

ELSEWHERE = {
    "model.head": "tests/engine/test_soft.py, as all of algorithm.off_policy: only a replay learns a squashed one",
    "model.denoising_steps": "tests/methods/test_qc.py: only a flow head has such steps",
    "rollout.delay": "tests/rollout/test_action_queue.py, where a run has its hooks",
    "rollout.ready_slots": "tests/rollout/test_schedules.py",
    "rollout.observe": "tests/rollout/test_schedules.py: what is kept, not what is learned",
    "engine.device": "tests/engine/test_hybrid.py, on a machine without a GPU",
    "engine.micro_batch_size": "tests/engine/test_microbatches.py: what is learned stays the same",
    "engine.deterministic": "tests/engine/test_determinism.py: on the CPU what is learned stays the same",
    "engine.guard.max_skipped": "tests/engine/test_guard.py",
    "engine.guard.dumps": "tests/engine/test_guard.py",
    "engine.optimizer.name": "tests/engine/test_optimizer.py, where bitsandbytes is installed",
    "engine.gradient_checkpointing": "tests/engine/test_recompute.py: what is learned stays the same",
    "engine.cuda_graphs": "tests/engine/test_graphs.py: how fast, not what is decided",
    "engine.lora.rank": "tests/engine/test_lora.py, with a model that has layers",
    "engine.lora.alpha": "tests/engine/test_lora.py",
    "engine.lora.targets": "tests/engine/test_lora.py",
    "engine.offload": "tests/engine/test_offload.py: what is learned stays the same, bit for bit",
    "engine.parallel": "how fast, not what is learned",
    "rollout.mode": "tests/runner/test_async.py",
    "rollout.max_staleness": "tests/runner/test_async.py",
    "placement.rollout.workers": "tests/placement/test_run_plan.py: who rolls out, not what is learned",
    "placement.rollout.share_gpus": "tests/placement/test_run_plan.py: on which GPUs, not what is learned",
    "placement.backend": "tests/cluster/inside/test_runs.py: what starts processes, not what is learned",
    "placement.address": "tests/cluster/inside/test_runs.py",
    "placement.ranks.nodes": "tests/placement/test_run_plan.py: on which machines, not what is learned",
    "placement.rollout.nodes": "tests/placement/test_run_plan.py: on which machines, not what is learned",
    "placement.simulators.nodes": "tests/cluster/inside/test_runs.py: on which machines, not what is learned",
    "placement.on_loss": "tests/cluster/inside/test_runs.py: what follows when a machine is lost",
    "placement.start_timeout_s": "tests/cluster/inside/test_runs.py: how long one waits",
    "placement.rollout.timeout_s": "tests/faults/test_rollout_workers_that_fail.py: how long one waits",
    "algorithm.old_logprobs": "tests/engine/test_old_logprobs.py: another rounding",
    "engine.threads": "how fast, not what is learned",
    "engine.optimizer.master_weights": "tests/engine/test_optimizer.py: only matters for weights in bfloat16",
    "model.name": "tests/cli/test_commands.py runs another model",
    "model.checkpoint": "tests/models/test_policies.py",
    **dict.fromkeys(
        ("algorithm.reward.path", "algorithm.reward.threshold", "algorithm.reward.ends_episodes"),
        "tests/runner/test_reward_classifier.py: needs a classifier",
    ),
    "algorithm.reward.pays": "tests/methods/test_reward_progress.py",
    **dict.fromkeys(
        (
            *("algorithm.reward.url", "algorithm.reward.model", "algorithm.reward.key_variable"),
            *("algorithm.reward.gives", "algorithm.reward.rubric", "algorithm.reward.temperature"),
            *("algorithm.reward.cameras", "algorithm.reward.pixels", "algorithm.reward.concurrency"),
            *("algorithm.reward.deadline_s", "algorithm.reward.retries", "algorithm.reward.backoff_s"),
            *("algorithm.reward.max_calls", "algorithm.reward.max_tokens", "algorithm.reward.max_answer_tokens"),
            *("algorithm.reward.max_cost", "algorithm.reward.price_in", "algorithm.reward.price_out"),
            *("algorithm.reward.max_disagreement", "algorithm.reward.disagreement_episodes"),
            "algorithm.reward.answers_from",
        ),
        "tests/runner/test_asked_rewards.py and tests/test_chat.py: needs a server",
    ),
    "algorithm.reward.encoder": "tests/pipelines/test_stages.py registers another one",
    "algorithm.reward.compat": "tests/algorithms/test_rewards.py: only matters where successes form clusters",
}

TOGETHER = {
    "engine.optimizer.lr_floor": (["engine.optimizer.schedule=linear"], "engine.optimizer.lr_floor=0.5"),
    "algorithm.reward.frames": (SRPO, "algorithm.reward.frames=2"),
    "algorithm.reward.dim": (SRPO, "algorithm.reward.dim=1"),
    "algorithm.reward.scale": (SRPO, "algorithm.reward.scale=0.1"),
    "algorithm.reward.steepness": (SRPO, "algorithm.reward.steepness=0.1"),
    "algorithm.filter": (DAPO, "algorithm.filter={name:accuracy,accuracy_low:0.3}"),
    "algorithm.filter.metric": (DAPO, "algorithm.filter.metric=total_reward"),
    "algorithm.filter.accuracy_low": (ACCURACY, "algorithm.filter.accuracy_low=0.0"),
    "algorithm.filter.accuracy_high": (ACCURACY, "algorithm.filter.accuracy_high=1.0"),
    "algorithm.max_collections": (DAPO, "algorithm.max_collections=1"),
    "algorithm.advantage.mean_level": (GROUPS, "algorithm.advantage.mean_level=batch"),
    "algorithm.advantage.std_level": (GROUPS, "algorithm.advantage.std_level=batch"),
    "algorithm.advantage.leave_one_out": (GROUPS, "algorithm.advantage.leave_one_out=true"),
    "algorithm.advantage.unbiased": (GROUPS, "algorithm.advantage.unbiased=false"),
    "algorithm.advantage.eps": (GROUPS, "algorithm.advantage.eps=10.0"),
    "algorithm.reward_level": (ACTIONS, "algorithm.reward_level=action"),
    "algorithm.loss.dual_clip": (["algorithm.epochs=8"], "algorithm.loss.dual_clip=1.001"),
    "algorithm.proximal": (DECOUPLED, "algorithm.proximal=loglinear"),
    "algorithm.loss.behaviour_cap": (DECOUPLED, "algorithm.loss.behaviour_cap=0.5"),
    "algorithm.loss.behaviour_excess": (
        [*DECOUPLED, "algorithm.loss.behaviour_cap=0.99"],
        "algorithm.loss.behaviour_excess=clamp",
    ),
    "algorithm.loss.drift_coef": (["algorithm.loss=cpgd"], "algorithm.loss.drift_coef=0.1"),
    "algorithm.kl_estimator": (["algorithm.kl_coef=0.1"], "algorithm.kl_estimator=k2"),
}
"""Settings that only matter together with others: those, and the change."""

VALUES = {
    "algorithm.reward": [*GROUPS, "algorithm.reward={}"],
    "algorithm.loss": [*STALE, "algorithm.loss={}"],
    "algorithm.aggregation": ["algorithm.aggregation={}"],
    "algorithm.kl_estimator": [*GROUPS, "algorithm.kl_coef=0.1", "algorithm.kl_estimator={}"],
    "algorithm.advantage.mean_level": [*GROUPS, "algorithm.advantage.mean_level={}"],
    "algorithm.advantage.std_level": [*GROUPS, "algorithm.advantage.std_level={}"],
}
"""Settings each of whose values is to give something else."""


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
    learner = build_method(config, manager, weights=None)
    engine, pipeline = learner.engine, build_pipeline(config)
    collector = LocalRollouts(LocalEnvs(config, manager, engine))
    for _ in range(3):
        pipeline.run(Iteration(config=config, learner=learner, collector=collector, engine=engine))
    return torch.nn.utils.parameters_to_vector(engine.policy.parameters()).detach()


def test_the_same_settings_learn_the_same(managers: dict[int, EnvManager]) -> None:
    assert torch.equal(learn(load(), managers), learn(load(), managers))


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_changes_what_is_learned(name: str, managers: dict[int, EnvManager]) -> None:
    before, after = learn(load(), managers), learn(load(*CHANGES[name]), managers)
    assert before.shape != after.shape or not torch.equal(before, after)


@pytest.mark.parametrize("name", TOGETHER)
def test_a_setting_changes_what_is_learned_together_with_others(name: str, managers: dict[int, EnvManager]) -> None:
    base, change = TOGETHER[name]
    assert not torch.equal(learn(load(*base), managers), learn(load(*base, change), managers))


@pytest.mark.parametrize("name", VALUES)
def test_every_value_learns_something_else(name: str, managers: dict[int, EnvManager]) -> None:
    section, _, key = name.rpartition(".")
    setting = settings_of({"algorithm": OnPolicyConfig, "algorithm.advantage": GRPOConfig}[section])[key]
    registry = None if setting.section is None else registry_of(setting.section)
    values = registry.names() if registry else [member.value for member in setting.kinds[0]]
    needing = {"classifier", "progress", "vlm"} if name == "algorithm.reward" else set()  # files, or a server
    values = [value for value in values if value not in needing]
    learned = {value: learn(load(*(each.format(value) for each in VALUES[name])), managers) for value in values}
    for one, other in itertools.combinations(learned, 2):
        assert not torch.equal(learned[one], learned[other]), (one, other)


def test_group_size_alone_changes_what_grpo_learns(managers: dict[int, EnvManager]) -> None:
    two, four = (learn(load(*WHOLE, f"rollout.group_size={size}"), managers) for size in (2, 4))
    assert not torch.equal(two, four)


def test_no_setting_was_forgotten() -> None:
    sections = {
        "model": MLPConfig,
        "rollout": RolloutConfig,
        "algorithm": OnPolicyConfig,
        "engine": EngineConfig,
        "engine.guard": GuardConfig,
        "engine.lora": LoraConfig,
        "engine.optimizer": OptimizerConfig,
        "placement": PlacementConfig,
        "placement.ranks": MachinesConfig,
        "placement.rollout": RolloutWorkersConfig,
        "placement.simulators": MachinesConfig,
    }
    every = {f"{section}.{field.name}" for section, kind in sections.items() for field in dataclasses.fields(kind)}
    for path, base in components().items():
        options = {field.name for kind in choices_of(base) for field in dataclasses.fields(kind)} - {"name"}
        every |= {".".join((*map(str, path), name)) for name in options}
    assert every - sections.keys() == CHANGES.keys() | ELSEWHERE.keys() | TOGETHER.keys()
