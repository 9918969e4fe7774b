"""FPO and negative-aware fine-tuning: flow policies of every family learn from velocities, alike in parts and after a
restart; and what they refuse."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learning import LearningEngine, learning_engine

from embodyrl.config import ConfigError, load_config
from embodyrl.config.build import build_section
from embodyrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.methods.fpo.config import FPOConfig
from embodyrl.methods.nft.config import Contrast, NFTConfig
from embodyrl.models import PolicyError, build_policy
from embodyrl.models.policy import PolicyObservation

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

M, C, D, IMAGE = 8, 2, 2, 32
TEXTS = ["push the cube", "pull it"]
SPEC = SimulatorSpec(
    tasks={text.split()[0]: text for text in TEXTS},
    actions=(ActionField(name="arm", meaning="normalized", unit="1", low=(-2.0, 0.0), high=(2.0, 1.0)),),
    proprio_dim=3,
    max_episode_steps=10,
    control_frequency=1.0,
    cameras=("front",),
    image_size=(IMAGE, IMAGE),
)
MODELS: dict[str, dict[str, Any]] = {
    "pi0": {"scratch": {"layers": 1}},
    "pi05": {"scratch": {"layers": 1}},
    "smolvla": {"scratch": {"layers": 2, "vision_layers": 1}},
    "gr00t": {"scratch": {"layers": 1}},
    "gr00t_n17": {"scratch": {"layers": 2}},
}
METHODS = {
    "fpo": FPOConfig(name="fpo", points=3, epochs=2, minibatches=2),
    "nft": NFTConfig(name="nft", points=3, epochs=2, minibatches=2),
}


def make_engine(
    model: str = "pi0", method: str = "nft", *, micro: int | None = None, lr: float = 1e-3, **changes: Any
) -> LearningEngine:
    section = {"name": model, "denoising_steps": 2, "noise_method": "none", **MODELS[model]}
    settings = METHODS[method]
    return learning_engine(
        build_policy(build_section(ModelConfig, section), SPEC, chunk_size=C, seed=1),
        config=EngineConfig(optimizer=OptimizerConfig(lr=lr), micro_batch_size=micro),
        algorithm=type(settings)(**{**vars(settings), **changes}),
        iterations=10,
        seed=1,
        simulator=SPEC,
    )


def make_batch(engine: LearningEngine) -> dict[str, Any]:
    """Chunks of the engine's own policy, of which the first half was good; the last has executed one action."""
    draw = np.random.default_rng(3)
    observation = Observation(
        images=draw.integers(0, 256, (M, 1, IMAGE, IMAGE, 3), dtype=np.uint8),
        proprio=draw.normal(size=(M, 3)).astype(np.float32),
        task_descriptions=[TEXTS[number % 2] for number in range(M)],
    )
    output = engine.act(observation, "train")
    assert "chain" not in output.trace and not output.logprobs.any(), "nothing is random but the first noise"
    executed = torch.ones(M, C, dtype=torch.bool)
    executed[-1, 1] = False
    return {
        "images": torch.from_numpy(observation.images),
        "proprio": torch.from_numpy(observation.proprio),
        "task_index": torch.arange(M) % 2,
        "trace": {name: each.clone() for name, each in output.trace.items()},
        "version": torch.full((M,), engine.version),
        "sequence": torch.arange(M),
        "executed": executed,
        "valid": torch.ones(M, dtype=torch.bool),
        "weights": torch.full((M,), 1.0 / M),
        "advantages": torch.tensor([1.0] * 4 + [-1.0] * 4),
    }


def flow_errors(engine: LearningEngine, batch: dict[str, Any]) -> torch.Tensor:
    """Errors of flow matching of each chunk, at 16 points."""
    draws = engine.policy.imitation_draws(M * 16, torch.Generator().manual_seed(7))
    images, states = batch["images"].clone(), batch["proprio"].clone()
    texts = [TEXTS[number % 2] for number in range(M)]
    with torch.no_grad():
        inputs = engine.prepare(PolicyObservation(images=images, proprio=states, task_descriptions=texts))
        found = engine.policy.match(
            inputs, batch["trace"], {name: each.unflatten(0, (M, 16)) for name, each in draws.items()}
        )
    return (found.velocities - found.wanted).square().mean((1, 2))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_good_chunks_become_likelier_than_bad_ones(model: str, method: str) -> None:
    engine = make_engine(model, method, lr=3e-4, points=8)
    batch = make_batch(engine)
    before = flow_errors(engine, batch)
    for number in range(3):
        found = engine.learner.update(batch, TEXTS)
        assert found["train/ratio_error_first_minibatch"] == 0.0, "velocities are those of the same forward pass"
        assert found["train/grad_norm"] > 0.0 and found["train/epochs"] == 2.0, number
    change = flow_errors(engine, batch) - before
    assert change[:4].mean() < change[4:].mean()


@pytest.mark.parametrize("method", METHODS)
def test_parts_of_minibatches_and_a_restart_change_nothing(method: str) -> None:
    whole, parts, again = (make_engine(method=method, micro=size) for size in (None, 3, None))
    batches = [make_batch(engine) for engine in (whole, parts, again)]
    for engine, batch in zip((whole, parts), batches, strict=False):
        engine.learner.update(batch, TEXTS)
    for one, other in zip(whole.policy.parameters(), parts.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    again.policy.load_state_dict(whole.policy.state_dict())
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    for engine in (whole, again):
        engine.learner.update(batches[0], TEXTS)
    assert all(map(torch.equal, whole.policy.state_dict().values(), again.policy.state_dict().values()))


def test_ranking_learns_too() -> None:
    engine = make_engine(contrast=Contrast.ranking, points=8, lr=3e-4)
    batch = make_batch(engine)
    before = flow_errors(engine, batch)
    for _ in range(3):
        engine.learner.update(batch, TEXTS)
    change = flow_errors(engine, batch) - before
    assert change[:4].mean() < change[4:].mean()


def test_a_policy_without_random_steps_has_no_log_probs() -> None:
    policy = make_engine().policy
    with pytest.raises(PolicyError, match="actions have no log-probs"):
        policy.evaluate({}, {})


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["model.noise_method=flow_sde"], "needs no log-probs of actions, and model.noise_method = flow_sde"),
        (["algorithm=dapo"], "learns by log-probs of actions, which they do not have"),
        (["algorithm.advantage=gae"], "advantage 'gae' uses a critic, and algorithm 'nft' is made for one without"),
        (["model.joint_logprob=true"], "with model.noise_method = none no step is random"),
        (["rollout.group_size=1"], "compares the episodes of a group, but rollout.group_size is 1"),
        (["rollout.mode=async", "placement.rollout.workers=1"], "the policy that an update starts from"),
        (["algorithm.points=0"], "algorithm.points"),
    ],
)
def test_what_does_not_fit_is_a_fault(settings: list[str], fault: str, tmp_path: Path) -> None:
    make_engine().policy.save(tmp_path, make_engine().policy.config)
    with pytest.raises(ConfigError, match=fault):
        load_config("experiment/tiny_pi0_nft", [f"model.checkpoint={tmp_path}", *settings])


def test_an_advantage_that_must_be_another_is_not_a_fault_of_groups_too() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("experiment/metaworld_reach_grpo", ["algorithm.advantage=gae"])
    assert [fault.path for fault in refused.value.faults] == [("algorithm", "advantage", "name")]


def test_a_model_without_a_flow_is_a_fault() -> None:
    with pytest.raises(ConfigError, match="learns from the velocities of a flow policy, and model 'mlp' is none"):
        load_config("experiment/metaworld_reach_grpo", ["algorithm=fpo"])
