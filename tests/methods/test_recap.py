"""RECAP: returns, values and advantages by hand; what the policy is told, in learning and when it acts; guidance; and
what it refuses."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learning import LearningEngine, learning_engine

from embodyrl.config import ConfigError, load_config
from embodyrl.config.build import build_section
from embodyrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig
from embodyrl.methods.recap.config import JudgedConfig, Lookahead, RecapConfig, ValueConfig
from embodyrl.methods.recap.values import ValueDistribution, scaled_returns
from embodyrl.models import build_policy
from embodyrl.models.policy import PolicyObservation
from embodyrl.rollout.interventions import Source
from embodyrl.rollout.replay import Minibatch
from tests.methods.test_velocities import IMAGE, MODELS, SPEC, TEXTS, C, D

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

M = 12


def make_engine(model: str = "pi0", guidance: float = 1.5, **changes: Any) -> LearningEngine:
    section = {"name": model, "denoising_steps": 2, "indicator": {"guidance": guidance}, **MODELS[model]}
    settings: dict[str, Any] = {"value": ValueConfig(bins=61, hidden_sizes=[32]), "value_steps": 2, "policy_steps": 2}
    return learning_engine(
        build_policy(build_section(ModelConfig, section), SPEC, chunk_size=C, seed=1),
        config=EngineConfig(optimizer=OptimizerConfig(lr=1e-3)),
        algorithm=RecapConfig(name="recap", off_policy=JudgedConfig(**(settings | changes))),
        iterations=10,
        seed=1,
        simulator=SPEC,
    )


def observed(size: int = M, seed: int = 3) -> dict[str, torch.Tensor]:
    draw = np.random.default_rng(seed)
    return {
        "images": torch.from_numpy(draw.integers(0, 256, (size, 1, IMAGE, IMAGE, 3), dtype=np.uint8)),
        "proprio": torch.from_numpy(draw.normal(size=(size, 3)).astype(np.float32)),
    }


def minibatch(seed: int = 5) -> Minibatch:
    """Decisions of two tasks; the first half is of solved episodes, the third is the last of a failure."""
    draw = torch.Generator().manual_seed(seed)
    remaining = torch.randint(3, 9, (M,), generator=draw)
    remaining[[0, 2, 8]] = 2
    columns = {
        **observed(seed=seed),
        **{f"next_{name}": column for name, column in observed(seed=seed + 1).items()},
        "task_index": torch.arange(M) % 2,
        "actions": torch.rand(M, C, D, generator=draw),
        "steps": torch.full((M,), 2),
        "remaining": remaining,
        "solved": torch.arange(M) < M // 2,
    }
    return Minibatch(columns=columns, places=torch.arange(M), size=M)


def test_returns_count_the_actions_that_are_left_and_what_a_failure_costs() -> None:
    remaining, solved = torch.tensor([0, 4, 10, 4, 10, 12]), torch.tensor([True, True, True, False, False, False])
    found = scaled_returns(remaining, solved, failure=30.0, longest=10)
    assert found.tolist() == pytest.approx([0.0, -0.1, -0.25, -34 / 40, -1.0, -1.0])


def test_values_are_means_of_distributions_that_learn_the_bins_of_returns() -> None:
    torch.manual_seed(0)
    values = ValueDistribution(3, [16], bins=5).double()
    features = torch.randn(4, 3).double()
    returns = torch.tensor([-1.0, -0.6, -0.1, 0.0]).double()
    shares = values.network(features).softmax(-1)
    assert values(features).tolist() == pytest.approx(
        (shares @ torch.tensor([-1, -0.75, -0.5, -0.25, 0.0]).double()).tolist()
    )
    wanted = [-shares[row, bin].log().item() for row, bin in enumerate([0, 2, 4, 4])]
    assert values.losses(features, returns).tolist() == pytest.approx(wanted)


def test_advantages_by_hand() -> None:
    for lookahead in Lookahead:
        learner = make_engine(lookahead=lookahead, failure=20.0).learner
        learner.encoder.task_descriptions = TEXTS
        columns = minibatch().columns
        with torch.no_grad():
            now, following = (learner.values(learner._features(columns, prefix)) for prefix in ("", "next_"))
        found, whole = learner.advantages(columns), 30.0
        for row in range(M):
            left, solved = int(columns["remaining"][row]), bool(columns["solved"][row])
            value = -(left if solved else left + 20) / whole
            if lookahead is Lookahead.chunk:
                after = float(following[row]) if left > 2 else 0.0 if solved else -20 / whole
                value = -2 / whole + after
            assert float(found[row]) == pytest.approx(value - float(now[row]), abs=1e-5)


def test_the_better_ones_of_each_task_are_told_so_and_a_share_of_all_is_told_nothing() -> None:
    learner = make_engine(better=0.5, dropout=0.3).learner
    learner.encoder.task_descriptions = TEXTS
    found = [minibatch(number) for number in range(60)]
    metrics = learner.judge(iter(found))
    assert metrics["train/better"] == pytest.approx(0.5, abs=0.02)
    told = torch.cat([learner._told(each, each.columns) for each in found])
    task, advantage = (
        torch.cat([each.columns["task_index"] for each in found]),
        torch.cat([learner.advantages(each.columns) for each in found]),
    )
    assert (told == -1).float().mean() == pytest.approx(0.3, abs=0.05)
    for number in (0, 1):
        here = (task == number) & (told >= 0)
        assert torch.equal(told[here] == 1, advantage[here] > learner.thresholds[number])
    corrected = dataclasses.replace(found[0], columns={**found[0].columns, "source": torch.full((M,), Source.expert)})
    sure = learner._told(corrected, corrected.columns)
    assert set(sure.tolist()) == {1, -1}, "an expert knows better"


@pytest.mark.parametrize("model", MODELS)
def test_the_policy_acts_as_told_and_guided(model: str) -> None:
    policies = {guidance: make_engine(model, guidance).policy for guidance in (0.0, 1.0, 1.5)}
    for policy in policies.values():
        policy.load_state_dict(policies[0.0].state_dict())
    seen = PolicyObservation(**observed(4), task_descriptions=[TEXTS[row % 2] for row in range(4)])
    told = dataclasses.replace(seen, better=torch.ones(4, dtype=torch.int8))
    untold = dataclasses.replace(seen, better=torch.full((4,), -1, dtype=torch.int8))
    with torch.no_grad():
        chosen = {
            guidance: policy.act(policy.preprocess(seen), "eval").actions for guidance, policy in policies.items()
        }
        one = policies[1.0]
        assert torch.equal(chosen[1.0], one.act(one.preprocess(told), "eval").actions)
        assert torch.equal(chosen[0.0], one.act(one.preprocess(untold), "eval").actions)
        assert not torch.equal(chosen[1.0], chosen[0.0]), "it reads the words"
        guided = policies[1.5]
        inputs = guided.preprocess(seen)
        assert any(name.startswith("plain/") for name in inputs)
        condition = guided.contrasted(inputs)
        x, time = torch.randn(4, *guided.start.shape), torch.full((4,), 0.5)
        with_words, without = (
            one.denoise(one.condition(one.preprocess(each)), x, time).velocity for each in (told, untold)
        )
        wanted = without + 1.5 * (with_words - without)
        torch.testing.assert_close(guided.say(condition, x, time).velocity, wanted, rtol=1e-4, atol=1e-5)
        assert not torch.equal(chosen[1.5], chosen[1.0])


def test_what_is_told_in_learning_does_not_depend_on_guidance() -> None:
    one, other = make_engine(guidance=0.0), make_engine(guidance=3.0)
    for engine in (one, other):
        engine.learner.encoder.task_descriptions = TEXTS
        engine.learner.judge([minibatch()])
        engine.learner.learn_policy([minibatch(6)], 1)
    assert all(map(torch.equal, one.policy.state_dict().values(), other.policy.state_dict().values()))


def test_a_resumed_learner_learns_the_same_bits() -> None:
    whole, again = make_engine(augment_pixels=2), make_engine(augment_pixels=2)

    def learn(engine: LearningEngine, seed: int) -> None:
        engine.learner.encoder.task_descriptions = TEXTS
        engine.learner.learn_values([minibatch(seed), minibatch(seed + 1)], 2)
        engine.learner.judge([minibatch(seed)])
        found = engine.learner.learn_policy([minibatch(seed), minibatch(seed + 1)], 2)
        assert found["train/loss"] > 0.0 and found["train/updates"] == engine.learner.made

    learn(whole, 1)
    again.policy.load_state_dict(whole.policy.state_dict())
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    for engine in (whole, again):
        learn(engine, 3)
    for one, other in ((whole.learner.values, again.learner.values), (whole.policy, again.policy)):
        assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["model.indicator={better: so, worse: so}"], "are both 'so', so that a policy is told nothing"),
        (["model.indicator=null"], "tells the policy what is better, but model.indicator is null"),
        (["algorithm.off_policy.updates_per_step=2"], "is not read by algorithm 'recap'"),
        (["algorithm=nft", "data.path=null"], "would learn as if it had not"),
        (["algorithm.off_policy.better=1"], "algorithm.off_policy.better"),
    ],
)
def test_what_does_not_fit_is_a_fault(settings: list[str], fault: str, tmp_path: Path) -> None:
    make_engine().policy.save(tmp_path, make_engine().policy.config)
    usual = [f"model.checkpoint={tmp_path}", f"data.path={tmp_path}"]
    with pytest.raises(ConfigError, match=fault):
        load_config("experiment/tiny_pi0_recap", [*usual, *settings])


def test_a_model_that_cannot_be_told_is_a_fault() -> None:
    with pytest.raises(ConfigError, match="and model 'mlp' is none"):
        load_config("experiment/push_iql", ["algorithm=recap"])
