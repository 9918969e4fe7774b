"""Ratios start at one: exactly, where log-probs are computed again as the update does."""

from __future__ import annotations

import functools
from typing import Any

import engines
import numpy as np
import pytest
import torch
from learning import LearningEngine, learning_engine
from vla import CHUNK, SPEC, make_oft

from embodyrl.algorithms.columns import Bound, logprobs_at_level
from embodyrl.config.build import build_section
from embodyrl.config.schema import (
    Device,
    EngineConfig,
    Level,
    LoraConfig,
    LossConfig,
    OldLogprobs,
    OptimizerConfig,
    Precision,
    Proximal,
)
from embodyrl.envs import Observation
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.models import Policy, build_policy
from embodyrl.models.pi.config import ScratchConfig
from embodyrl.registry import LOSSES, SupportedModel

SLOTS, DECISIONS = 1, 8
TASK_DESCRIPTIONS = list(SPEC.tasks.values())
ERROR = "train/ratio_error_first_minibatch"


def tiny_pi0() -> Policy:
    options: Any = SupportedModel.entry("pi0").load_options()
    shape = ScratchConfig(image_size=32, layers=2)
    config = options(name="pi0", denoising_steps=3, value_sizes=[8], scratch=shape)
    return build_policy(config, SPEC, chunk_size=CHUNK, seed=1)


MODELS = {"pi0": tiny_pi0, "oft": make_oft}


def make_engine(policy: Policy, *, algorithm: dict[str, Any] | None = None, **engine: Any) -> LearningEngine:
    settings: dict[str, Any] = {"minibatches": 3, "epochs": 1, "logprob_level": Level.action, "value_coef": 0.0}
    settings |= algorithm or {}
    loss = settings.pop("loss", "ppo")
    return learning_engine(
        policy,
        config=EngineConfig(
            device=Device.cpu, **{"precision": Precision.bfloat16, "optimizer": OptimizerConfig(lr=1e-3)} | engine
        ),
        algorithm=OnPolicyConfig(name="ppo", loss=build_section(LossConfig, {"name": loss}), **settings),
        iterations=4,
        seed=1,
    )


def rollout(engine: LearningEngine) -> dict[str, Any]:
    """Decisions of the engine's policy, `SLOTS` at a time, as a rollout takes them."""
    draw, parts = np.random.default_rng(0), []
    level = engine.learner.algorithm.logprob_level
    for number in range(DECISIONS):
        seen = Observation(
            images=draw.integers(0, 256, (SLOTS, 1, 32, 32, 3), dtype=np.uint8),
            proprio=draw.normal(size=(SLOTS, 3)).astype(np.float32),
            task_descriptions=[TASK_DESCRIPTIONS[slot % 2] for slot in range(SLOTS)],
        )
        output = engine.act(seen, "train")
        executed = torch.ones(SLOTS, CHUNK, dtype=torch.bool)
        old = logprobs_at_level(level, output.logprobs, executed).clone()
        parts.append(
            {
                "images": torch.from_numpy(seen.images),
                "proprio": torch.from_numpy(seen.proprio),
                "task_index": torch.arange(SLOTS) % 2,
                "trace": {name: value.clone() for name, value in output.trace.items()},
                "version": torch.full((SLOTS,), engine.version),
                "sequence": torch.full((SLOTS,), number // 3),
                "executed": executed,
                "valid": torch.ones_like(old, dtype=torch.bool),
                "weights": torch.full_like(old, 1 / (DECISIONS * old.numel())),
                "advantages": torch.linspace(-1, 1, old.numel()).view(old.shape),
                "old_logprobs": old,
            }
        )
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "trace"}
    return joined | {"trace": {name: torch.cat([part["trace"][name] for part in parts]) for name in parts[0]["trace"]}}


def first_error(model: str, how: OldLogprobs, *, algorithm: dict[str, Any] | None = None, **engine: Any) -> float:
    made = make_engine(MODELS[model](), algorithm={"old_logprobs": how} | (algorithm or {}), **engine)
    return made.learner.update(rollout(made), TASK_DESCRIPTIONS)[ERROR]


def test_in_bfloat16_ratios_of_the_rollout_start_elsewhere() -> None:
    """Decisions of one slot at a time, learned from together; float32 rounds too little to notice."""
    one: dict[str, Any] = {"algorithm": {"minibatches": 1}}
    error = first_error("pi0", OldLogprobs.rollout, **one)
    assert 1e-3 < error < 0.5
    assert first_error("pi0", OldLogprobs.rollout, precision=Precision.float32, **one) < 1e-4


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batch_size": 5},
    "one at a time": {"micro_batch_size": 1},
    "checkpointing": {"gradient_checkpointing": True},
    "adapters and a reference": {"lora": LoraConfig(rank=2), "algorithm": {"kl_coef": 0.1}},
    "levels": {"algorithm": {"logprob_level": Level.token, "entropy_coef": 0.01}},
    "whole episodes": {"algorithm": {"loss": "gspo"}, "micro_batch_size": 9},
    "cpgd": {"algorithm": {"loss": "cpgd", "logprob_level": Level.chunk}},
    "float32": {"precision": Precision.float32},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_ratios_to_log_probs_that_are_computed_again_start_at_exactly_one(model: str, case: str) -> None:
    assert first_error(model, OldLogprobs.recompute, **CASES[case]) == 0.0


@pytest.mark.parametrize("model", MODELS)
def test_a_single_step_is_taken_at_ratio_one(model: str) -> None:
    """With one minibatch every ratio of the update is that of the unchanged policy."""
    engine = make_engine(MODELS[model](), algorithm={"old_logprobs": OldLogprobs.recompute, "minibatches": 1})
    metrics = engine.learner.update(rollout(engine), TASK_DESCRIPTIONS)
    assert metrics["train/ratio"] == metrics["train/ratio_max"] == 1.0
    assert metrics["train/approx_kl"] == metrics["train/clip_fraction"] == 0.0


def test_the_proximal_policy_starts_at_exactly_one() -> None:
    seen: list[float] = []
    loss = LOSSES.load("decoupled_ppo")

    @functools.wraps(loss)
    def noting(**columns: Any) -> Any:
        seen.append(float((columns["logprobs"].detach() - columns["proximal_logprobs"]).abs().max()))
        return loss(**columns)

    engine = make_engine(tiny_pi0(), algorithm={"loss": "decoupled_ppo", "proximal": Proximal.recompute})
    engine.learner.loss = Bound(noting, engine.learner.algorithm.loss)
    engine.learner.update(rollout(engine), TASK_DESCRIPTIONS)
    assert seen[0] == 0.0 and seen[1] > 0.0


def test_decisions_of_an_earlier_policy_keep_their_log_probs_and_are_no_error() -> None:
    engine = engines.make_engine(old_logprobs=OldLogprobs.recompute, epochs=1, minibatches=1, value_coef=0.0)
    engine.version = 3
    batch = engines.make_batch(engine)
    batch["version"][:4] = 2
    batch["old_logprobs"][:4] -= 1.0
    batch["old_logprobs"][4:] -= 5.0  # of this policy: computed again
    metrics = engine.learner.update(batch, ["push"])
    assert metrics[ERROR] == 0.0
    assert metrics["train/ratio_max"] == pytest.approx(float(torch.tensor(1.0).exp()), rel=1e-5)


def test_the_error_is_that_of_the_first_minibatch_alone() -> None:
    engine = engines.make_engine(optimizer=OptimizerConfig(lr=0.1))
    batch = engines.make_batch(engine)
    metrics = engine.learner.update(batch, ["push"])
    assert metrics["train/ratio_max"] > 1.01, "the policy moved"
    assert metrics[ERROR] < 1e-5
    batch = engines.make_batch(engine)
    batch["old_logprobs"] -= 0.5
    assert engine.learner.update(batch, ["push"])[ERROR] == pytest.approx(
        float(torch.tensor(0.5).exp()) - 1.0, rel=1e-4
    )
