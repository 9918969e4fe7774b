"""Learning from what an expert would have done: the loss of supervised learning, on decisions of a replay."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

from learning import LearningEngine, learning_engine

from embodyrl.config.build import build_section
from embodyrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig
from embodyrl.data.layout import Batch
from embodyrl.engine.parallel import Ranks
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.methods.dagger.config import DAggerConfig
from embodyrl.models import build_policy
from embodyrl.rollout.replay import Minibatch

S, D, M, IMAGE = 3, 2, 12, 32
TEXTS = ["push the cube", "pull it"]
PI0 = {"name": "pi0", "denoising_steps": 2, "scratch": {"layers": 1}}
ACT_SIZES = {"backbone_width": 4, "hidden_size": 16, "heads": 2, "feedforward_size": 24, "style_layers": 1}
ACT = {"name": "act", "scratch": ACT_SIZES}
OPENVLA = {"name": "openvla", "scratch": {"image_size": 32, "hidden_size": 32, "layers": 1, "mlp_size": 48}}
MODELS: dict[str, dict[str, Any]] = {
    "gaussian": {"name": "mlp", "hidden_sizes": [16]},
    "squashed": {"name": "mlp", "hidden_sizes": [16], "head": "squashed"},
    "cnn": {"name": "cnn", "encoder": "test_resnet"},
    "act": ACT,
    "openvla": OPENVLA,
    "pi0": PI0,
    "pi0_fast": {"name": "pi0_fast", "scratch": {"layers": 1}},
}


def spec_of(model: dict[str, Any], image: int = IMAGE) -> SimulatorSpec:
    cameras = () if model["name"] == "mlp" else ("front",)
    return SimulatorSpec(
        tasks={text.split()[0]: text for text in TEXTS},
        actions=(ActionField(name="arm", meaning="normalized", unit="1", low=(-2.0, 0.0), high=(2.0, 1.0)),),
        proprio_dim=S,
        max_episode_steps=10,
        control_frequency=1.0,
        cameras=cameras,
        image_size=(image, image) if cameras else (0, 0),
    )


def make_engine(model: dict[str, Any], micro_batch_size: int | None = None) -> LearningEngine:
    return learning_engine(
        build_policy(build_section(ModelConfig, model), spec_of(model), chunk_size=1, seed=1),
        config=EngineConfig(optimizer=OptimizerConfig(lr=1e-2), micro_batch_size=micro_batch_size),
        algorithm=DAggerConfig(name="dagger"),
        iterations=10,
        seed=1,
    )


def minibatch(size: int = M, seed: int = 5) -> Minibatch:
    draw = torch.Generator().manual_seed(seed)
    return Minibatch(
        columns={
            "proprio": torch.randn(size, S, generator=draw),
            "images": torch.randint(0, 256, (size, 1, IMAGE, IMAGE, 3), generator=draw).byte(),
            "task_index": torch.randint(0, 2, (size,), generator=draw),
            "actions": torch.rand(size, 1, D, generator=draw),
            "labels": torch.rand(size, 1, D, generator=draw),
            "labelled": torch.ones(size, dtype=torch.bool),
        },
        places=torch.arange(size),
        size=size,
    )


class OfSeveral(Ranks):
    """A process that says of every count that the others have the rest of it."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.tensor(self.total) if tensor.dtype == torch.int64 else tensor


def weights(engine: LearningEngine) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in engine.policy.named_parameters()}


def of(minibatch: Minibatch, rows: Any) -> Minibatch:
    columns = {name: column[rows] for name, column in minibatch.columns.items()}
    return dataclasses.replace(minibatch, columns=columns, places=minibatch.places[rows])


def pictured(model: dict[str, Any], found: Minibatch) -> Minibatch:
    if model["name"] != "mlp":
        return found
    columns = {name: column for name, column in found.columns.items() if name != "images"}
    return dataclasses.replace(found, columns=columns)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_supervised_learning_on_the_same_decisions(name: str) -> None:
    model, found = MODELS[name], pictured(MODELS[name], minibatch())
    columns = found.columns
    engines = [make_engine(model) for _ in range(2)]
    before = weights(engines[0])
    batch = Batch(
        observation=Observation(
            images=columns["images"].numpy() if "images" in columns else None,
            proprio=columns["proprio"].numpy(),
            task_descriptions=[TEXTS[index] for index in columns["task_index"].tolist()],
        ),
        actions=columns["labels"].numpy(),
    )
    wanted = engines[0].learner.imitation.learn_first([batch])
    metrics = engines[1].learner.imitation.learn_labels([found], TEXTS)
    assert metrics["train/loss"] == pytest.approx(wanted["train/loss"], rel=1e-6)
    after = weights(engines[0])
    assert any(not torch.equal(after[key], before[key]) for key in before), "too easy: nothing was learned"
    for key, each in weights(engines[1]).items():
        assert torch.equal(each, after[key]), key
    assert engines[1].version == 1


@pytest.mark.parametrize("name", ["squashed", "pi0"])
def test_decisions_that_nobody_labelled_do_not_count_and_micro_batches_add_up(name: str) -> None:
    found = pictured(MODELS[name], minibatch())
    found.columns["labelled"][[1, 4, 5, 11]] = False
    spoiled = {"labels": torch.where(found.columns["labelled"][:, None, None], found.columns["labels"], 1e6)}
    whole, parts, spoilt = make_engine(MODELS[name]), make_engine(MODELS[name], 3), make_engine(MODELS[name])
    losses = [engine.learner.imitation.learn_labels([found], TEXTS)["train/loss"] for engine in (whole, parts)]
    spoilt.learner.imitation.learn_labels([dataclasses.replace(found, columns=found.columns | spoiled)], TEXTS)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for key, each in weights(whole).items():
        assert torch.equal(weights(spoilt)[key], each), key
        torch.testing.assert_close(weights(parts)[key], each, atol=1e-5, rtol=1e-3)


def test_what_ranks_hold_adds_up_also_where_one_holds_nothing() -> None:
    """The gradients of the parts of a minibatch sum to that of the whole, with the same noise for the same places."""
    model, found = PI0, minibatch()

    def gradients(part: Minibatch) -> tuple[dict[str, Tensor], float]:
        engine = make_engine(model)
        kept: dict[str, Tensor] = {}
        total = int(found.columns["labelled"].sum())
        engine.ranks = OfSeveral(total)
        step = engine.optimizer.step

        def keep() -> None:
            kept.update(
                {name: each.grad.clone() for name, each in engine.policy.named_parameters() if each.grad is not None}
            )
            step()

        engine.optimizer.step = keep  # type: ignore[method-assign]
        engine.optimizer.clip = lambda: torch.tensor(1.0)  # type: ignore[method-assign]
        loss = engine.learner.imitation.learn_labels([part], TEXTS)["train/loss"]
        return kept, loss

    whole, loss = gradients(found)
    split = [gradients(of(found, rows)) for rows in (slice(0, 5), slice(5, M), slice(0, 0))]
    assert sum(each for _, each in split) == pytest.approx(loss, rel=1e-5)
    assert split[2][0].keys() == whole.keys(), "all ranks exchange the same gradients"
    for name, wanted in whole.items():
        torch.testing.assert_close(sum(each[name] for each, _ in split), wanted, atol=1e-6, rtol=1e-4)
        assert not split[2][0][name].any()


def test_the_policy_becomes_what_the_expert_says() -> None:
    engine = make_engine(MODELS["squashed"])
    target = np.array([[0.5, 0.25]], np.float32)

    def labelled(seed: int) -> Minibatch:
        found = pictured(MODELS["squashed"], minibatch(64, seed))
        sign = found.columns["proprio"][:, :1, None].sign()
        found.columns["labels"] = torch.from_numpy(target) * sign.clamp(min=0.2)
        return found

    engine.learner.imitation.learn_labels([labelled(seed) for seed in range(150)], TEXTS)
    seen = torch.tensor([[1.5, 0.0, 0.0], [-1.5, 0.0, 0.0]])
    actions = engine.policy.act({"proprio": seen}, "eval").actions[:, 0]
    torch.testing.assert_close(actions, torch.from_numpy(np.concatenate([target, 0.2 * target])), atol=0.1, rtol=0.2)
