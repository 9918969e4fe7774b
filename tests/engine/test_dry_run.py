"""What a dry run says a policy needs, against what torch's allocator sees in a real engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engines import SPEC
from learning import PPO, LearningEngine, learning_engine
from measured import peak_bytes
from slow import rest_slow

from embodyrl.config.schema import Device, EngineConfig, LoraConfig, ModelConfig, Precision
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.methods.on_policy.config import OnPolicyConfig
from embodyrl.models import build_policy
from embodyrl.planning.dry_run import trace
from embodyrl.planning.memory import Learning, rollout_need, train_need
from embodyrl.planning.weightless import build_weightless
from embodyrl.registry import SupportedModel

IMAGES = SimulatorSpec(
    tasks={"push": "push the red cube to the left"},
    actions=(ActionField(name="arm", meaning="delta_position", unit="m", low=(-1.0,) * 4, high=(1.0,) * 4),),
    proprio_dim=12,
    max_episode_steps=10,
    control_frequency=1.0,
    cameras=("front",),
    image_size=(48, 48),
)
CASES: dict[str, tuple[str, dict[str, Any], SimulatorSpec, int, int]] = {
    "mlp": ("mlp", {"hidden_sizes": [256, 256]}, SPEC, 1, 4096),
    "openvla_oft": ("openvla_oft", {}, IMAGES, 4, 12),
    "openvla": ("openvla", {}, IMAGES, 1, 12),
    "pi0_fast": ("pi0_fast", {}, IMAGES, 4, 12),
}
"""Model, options, simulator, actions in a chunk, decisions in the batch."""


def make_config(model: str, options: dict[str, Any]) -> ModelConfig:
    entry = SupportedModel.entry(model)
    if missing := entry.missing():
        pytest.skip(f"{model} needs {missing[0].module}: {missing[0].install}")
    make: Any = entry.load_options()
    return make(name=model, **options)


def make_observation(spec: SimulatorSpec, samples: int) -> Observation:
    return Observation(
        images=np.zeros((samples, 1, *spec.image_size, 3), np.uint8) if spec.cameras else None,
        proprio=np.zeros((samples, spec.proprio_dim), np.float32),
        task_descriptions=list(spec.tasks.values()) * samples,
    )


def make_batch(engine: LearningEngine, spec: SimulatorSpec, samples: int) -> dict[str, Any]:
    observation = make_observation(spec, samples)
    decision = engine.act(observation, "train")
    chunk = engine.policy.spec.chunk_size
    columns: dict[str, Any] = {
        "proprio": torch.from_numpy(observation.proprio),
        "task_index": torch.zeros(samples, dtype=torch.int64),
        "trace": {name: tensor.clone().cpu() for name, tensor in decision.trace.items()},
        "version": torch.zeros(samples, dtype=torch.int64),
        "sequence": torch.arange(samples),
        "executed": torch.ones(samples, chunk, dtype=torch.bool) if decision.counted is None else decision.counted,
        "valid": torch.ones(samples, dtype=torch.bool),
        "weights": torch.full((samples,), 1 / samples),
        "advantages": torch.ones(samples),
        "returns": torch.ones(samples),
        "old_logprobs": decision.logprobs.sum(1).cpu(),
        "old_values": decision.values.clone().cpu(),
    }
    if spec.cameras:
        columns["images"] = torch.from_numpy(observation.images)
    return columns


def needs_and_measured(
    case: str, micro: int | None, device: Device = Device.cpu, **engine_settings: Any
) -> dict[str, tuple[int, int]]:
    """For each phase, what was planned and what was measured, beside weights and optimiser [bytes]."""
    model, options, spec, chunk, samples = CASES[case]
    config, cuda = make_config(model, options), device is Device.cuda
    engine_config = EngineConfig(device=device, micro_batch_size=micro, **engine_settings)
    weightless, _ = build_weightless(config, spec, chunk_size=chunk)
    traced = trace(weightless, make_observation(spec, 2), engine_config, cuda=cuda, **PPO)
    settings = Learning(
        deciding_samples=samples,
        minibatch=samples,
        micro_batch=micro or samples,
        reference=False,
        master_weights=True,
    )
    engine = learning_engine(
        build_policy(config, spec, chunk_size=chunk, seed=1),
        config=engine_config,
        algorithm=OnPolicyConfig(name="ppo", minibatches=1, epochs=1),
        iterations=4,
        seed=1,
    )
    own = sum(tensor.nbytes for tensor in [*engine.policy.parameters(), *engine.policy.buffers()])
    assert traced.weights.weight_bytes == own
    batch, observation = make_batch(engine, spec, samples), make_observation(spec, samples)
    task_descriptions = list(spec.tasks.values())
    engine.learner.update(batch, task_descriptions)  # the optimiser makes its state
    on_gpu = sum(tensor.nbytes for tensor in batch.values(True, True)) if cuda else 0
    rollout = rollout_need(traced.weights, traced.lines, 0, settings)
    train = train_need(traced.weights, traced.lines, settings, batch=on_gpu)
    return {
        "rollout": (rollout.parts["activations"], peak_bytes(lambda: engine.act(observation, "eval"), engine.device)),
        "train": (
            sum(train.parts[name] for name in ("gradients", "activations", "batch")),
            peak_bytes(lambda: engine.learner.update(batch, task_descriptions), engine.device),
        ),
    }


@pytest.mark.parametrize("micro", [None, 4], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_within_20_percent_of_what_is_measured(case: str, micro: int | None) -> None:
    micro = micro and micro * CASES[case][4] // 12
    for phase, (planned, measured) in needs_and_measured(case, micro).items():
        assert planned == pytest.approx(measured, rel=0.2), (phase, planned, measured)


@pytest.mark.parametrize(
    "settings",
    rest_slow([{"gradient_checkpointing": True}, {"lora": LoraConfig(rank=4)}, {"precision": Precision.bfloat16}]),
    ids=["checkpointing", "lora", "bfloat16"],
)
def test_so_it_is_with_what_the_engine_changes(settings: dict[str, Any]) -> None:
    plain = needs_and_measured("openvla_oft", None)["train"][0]
    planned, measured = needs_and_measured("openvla_oft", None, **settings)["train"]
    assert planned == pytest.approx(measured, rel=0.2), (planned, measured)
    assert planned < plain


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["openvla_oft", "openvla"])
def test_the_plan_is_within_20_percent_on_a_gpu(case: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for phase, (planned, measured) in needs_and_measured(case, None, Device.cuda).items():
        assert planned == pytest.approx(measured, rel=0.2), (phase, planned, measured)
