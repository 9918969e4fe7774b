"""Q-chunking: losses, targets and gradients by hand in float64, what acts, files of a policy, and what is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learning import LearningEngine, learning_engine
from torch import Tensor

from embodyrl.config import ConfigError, load_config
from embodyrl.config.build import build_section
from embodyrl.config.schema import AlgorithmConfig, DiscountPer, EngineConfig, ModelConfig, OptimizerConfig
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.methods.qc.config import BestOfConfig, QCConfig
from embodyrl.methods.qc_fql.config import DistilledConfig, QCFQLConfig
from embodyrl.methods.replay.config import CriticsConfig
from embodyrl.models import build_policy
from embodyrl.models.build import load_policy
from embodyrl.models.errors import PolicyError
from embodyrl.models.policy import PolicyObservation
from embodyrl.rollout.replay import Minibatch

S, D, C, M, N, STEPS = 3, 2, 2, 16, 4, 3
CANDIDATES, GAMMA, ALPHA = 5, 0.9, 3.0
SPEC = SimulatorSpec(
    tasks={"push": "push"},
    actions=(ActionField(name="arm", meaning="normalized", unit="1", low=(-2.0, 0.0), high=(2.0, 1.0)),),
    proprio_dim=S,
    max_episode_steps=10,
    control_frequency=1.0,
)
CRITICS = {"critics": CriticsConfig(hidden_sizes=[8], layer_norm=False)}
SETTINGS = {"gamma": GAMMA, "discount_per": DiscountPer.action}
BEST = QCConfig(name="qc", off_policy=BestOfConfig(candidates=CANDIDATES, **CRITICS), **SETTINGS)
ONE_STEP = QCFQLConfig(name="qc_fql", off_policy=DistilledConfig(distillation=ALPHA, **CRITICS), **SETTINGS)
HEADS = {"qc": "flow", "qc_fql": "one_step"}


def options(algorithm: AlgorithmConfig, **further: Any) -> ModelConfig:
    found = {"name": "mlp", "hidden_sizes": [8], "head": HEADS[algorithm.name], "denoising_steps": STEPS}
    return build_section(ModelConfig, found | further)


def make_engine(algorithm: AlgorithmConfig) -> LearningEngine:
    policy = build_policy(options(algorithm), SPEC, chunk_size=C, seed=1)
    with torch.no_grad():  # the last layer begins near zero, so that all chunks would be alike
        for part in (policy.actor, policy.one_step):
            if part is not None:
                part[-1].weight *= 40.0
    return learning_engine(
        policy,
        config=EngineConfig(optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=1e6)),
        algorithm=algorithm,
        iterations=10,
        seed=1,
    )


def minibatch(seed: int = 5) -> Minibatch:
    draw = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, C + 1, (M,), generator=draw)
    return Minibatch(
        columns={
            "proprio": torch.randn(M, S, generator=draw),
            "next_proprio": torch.randn(M, S, generator=draw),
            "actions": torch.rand(M, C, D, generator=draw),
            "rewards": torch.randn(M, C, generator=draw),
            "success": torch.zeros(M, C, dtype=torch.bool),
            "steps": steps,
            "terminated": steps < C,
            "truncated": torch.zeros(M, dtype=torch.bool),
        },
        places=torch.arange(M),
        size=M,
    )


class ByHand:
    """The networks of an engine in float64, as plain products."""

    def __init__(self, engine: LearningEngine) -> None:
        policy, learner = engine.policy, engine.learner
        self.velocity, self.one_step = copy.deepcopy(policy.actor).double(), copy.deepcopy(policy.one_step)
        if self.one_step is not None:
            self.one_step = self.one_step.double()
        self.critics, self.targets = copy.deepcopy(learner.critics).double(), copy.deepcopy(learner.targets).double()

    def denoise(self, features: Tensor, noise: Tensor) -> Tensor:
        """K steps of 1/K from noise at time 1 to data at time 0."""
        chunk = noise
        for step in range(STEPS):
            time = torch.full((len(chunk), 1), 1.0 - step / STEPS, dtype=torch.float64)
            chunk = chunk - self.velocity(torch.cat([features, chunk, time], 1)) / STEPS
        return chunk.clamp(-1, 1)


def drawn_before(engine: LearningEngine) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(engine.learner.noise.get_state())
    return generator


def gradients(module: torch.nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten().double() for each in module.parameters()])


def flow_loss(hand: ByHand, seen: Any, draw: torch.Generator) -> Tensor:
    shares, noise = torch.rand(M, generator=draw).double(), torch.randn(M, N, generator=draw).double()
    features, wanted = seen.features.double(), seen.actions.double()
    noisy = (1.0 - shares[:, None]) * wanted + shares[:, None] * noise
    errors = (hand.velocity(torch.cat([features, noisy, shares[:, None]], 1)) - (noise - wanted)) ** 2
    executed = torch.arange(N) // D < seen.columns["steps"][:, None]
    return (errors * executed).mean()


def test_the_policy_learns_velocities_from_noise_to_what_was_executed_by_hand_in_float64() -> None:
    engine, found = make_engine(BEST), minibatch()
    hand, seen = ByHand(engine), engine.learner.encode(found)
    loss = flow_loss(hand, seen, drawn_before(engine))
    loss.backward()
    mine = engine.learner.policy_losses(found, seen)["flow_loss"].mean()
    mine.backward()
    assert float(mine.detach()) == pytest.approx(float(loss.detach()), abs=1e-6)
    assert torch.allclose(gradients(engine.policy.actor), gradients(hand.velocity), atol=1e-6)


def test_the_target_is_the_value_of_the_best_of_several_chunks_by_hand_in_float64() -> None:
    engine, found = make_engine(BEST), minibatch()
    with torch.no_grad():  # so that critics and slow copies differ
        engine.learner.targets.weights[0] += 0.3
    hand, seen = ByHand(engine), engine.learner.encode(found)
    noise = torch.randn(M, CANDIDATES, N, generator=drawn_before(engine)).double()
    following, wanted = seen.following.double(), []
    for row in range(M):
        chunks = hand.denoise(following[row].expand(CANDIDATES, -1), noise[row])
        best = hand.critics(following[row].expand(CANDIDATES, -1), chunks).min(0).values.argmax()
        value = hand.targets(following[row : row + 1], chunks[best : best + 1]).min()
        steps = int(found.columns["steps"][row])
        reward = sum(GAMMA**at * float(found.columns["rewards"][row, at]) for at in range(steps))
        ends = bool(found.columns["terminated"][row])
        wanted.append(reward + (0.0 if ends else GAMMA**steps) * value)
    loss = ((hand.critics(seen.features.double(), seen.actions.double()) - torch.stack(wanted)) ** 2).sum(0).mean()
    assert engine.learner.learn([found])["train/critic_loss"] == pytest.approx(float(loss.detach()), abs=1e-6)


def test_one_step_is_distilled_and_taught_by_values_by_hand_in_float64() -> None:
    engine, found = make_engine(ONE_STEP), minibatch()
    hand, seen, draw = ByHand(engine), engine.learner.encode(found), drawn_before(engine)
    noise, features = torch.randn(M, N, generator=draw).double(), seen.features.double()
    made = hand.one_step(torch.cat([features, noise], 1))
    values = hand.critics.of_actions(features, made.clamp(-1, 1)).min(0).values
    distance = ((made - hand.denoise(features, noise).detach()) ** 2).mean(1)
    loss = (ALPHA * distance - values / values.detach().abs().mean()).mean()
    loss.backward()
    losses = engine.learner.policy_losses(found, seen)
    losses["actor_loss"].mean().backward()
    assert float(losses["actor_loss"].mean().detach()) == pytest.approx(float(loss.detach()), abs=1e-6)
    assert torch.allclose(gradients(engine.policy.one_step), gradients(hand.one_step), atol=1e-6)
    for others in (engine.policy.actor, engine.learner.critics):  # none flows through denoising
        assert not any(each.grad is not None and each.grad.any() for each in others.parameters())
    wanted = flow_loss(hand, seen, draw).detach()
    assert float(losses["flow_loss"].mean().detach()) == pytest.approx(float(wanted), abs=1e-6)


@pytest.mark.parametrize("algorithm", [BEST, ONE_STEP], ids=["qc", "qc_fql"])
def test_a_resumed_learner_learns_the_same_bits(algorithm: AlgorithmConfig) -> None:
    whole, again = make_engine(algorithm), make_engine(algorithm)
    whole.learner.learn([minibatch(1), minibatch(2)])
    again.policy.load_state_dict(whole.policy.state_dict())
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    for engine in (whole, again):
        engine.learner.learn([minibatch(3), minibatch(4)])
    for module in ("critics", "targets", "policy"):
        one, other = (getattr(engine.learner, module).state_dict() for engine in (whole, again))
        assert all(torch.equal(one[name], other[name]) for name in one), module


def act(policy: Any, mode: Any = "eval") -> Tensor:
    proprio = torch.randn(6, S, generator=torch.Generator().manual_seed(3))
    inputs = policy.preprocess(PolicyObservation(proprio=proprio, task_descriptions=["push"] * 6))
    with torch.no_grad():
        return policy.act(inputs, mode, torch.Generator().manual_seed(4)).actions


@pytest.mark.parametrize("algorithm", [BEST, ONE_STEP], ids=["qc", "qc_fql"])
def test_a_saved_policy_acts_as_it_did_in_the_run(algorithm: AlgorithmConfig, tmp_path: Path) -> None:
    engine = make_engine(algorithm)
    engine.learner.learn([minibatch(1), minibatch(2)])
    engine.policy.save(tmp_path, options(algorithm))
    found = load_policy("mlp", checkpoint=tmp_path, simulator=SPEC)
    assert torch.equal(act(found), act(engine.policy)) and torch.equal(act(found), act(found))
    assert torch.equal(act(found, "train"), act(engine.policy, "train"))
    assert not torch.equal(act(found), act(found, "train"))


def test_it_acts_by_the_critics_that_are_learned_and_values_what_it_chooses_highest() -> None:
    engine = make_engine(BEST)
    policy, before = engine.policy, act(engine.policy)
    with torch.no_grad():
        engine.learner.critics.weights[-1] *= -1.0  # what was best is worst
    assert not torch.equal(act(policy), before)
    features, noise = torch.randn(4, S), torch.randn(4, CANDIDATES, N)
    chosen, _ = policy.chosen(features, noise)
    best = engine.learner.critics(features, chosen).amin(0)
    for each in noise.unbind(1):
        other = engine.learner.critics(features, policy.draw(features, each)[0]).amin(0)
        assert (best >= other - 1e-6).all()


@pytest.mark.parametrize(
    "damage",
    [{"candidates": 0}, {"hidden_sizes": [9000, 9000]}, {"hidden_sizes": "wide"}, {"count": 3}, {"more": 1}],
    ids=str,
)
def test_a_damaged_description_of_critics_is_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    engine = make_engine(BEST)
    engine.policy.save(tmp_path, options(BEST))
    file = tmp_path / "policy.json"
    described = json.loads(file.read_text())
    described["candidates"] |= damage
    file.write_text(json.dumps(described))
    with pytest.raises(PolicyError):
        load_policy("mlp", checkpoint=tmp_path, simulator=SPEC)


def test_imitation_alone_makes_chunks_like_those_that_were_shown() -> None:
    policy = build_policy(options(ONE_STEP, hidden_sizes=[64]), SPEC, chunk_size=C, seed=1)
    optimizer, draw = torch.optim.Adam(policy.parameters(), 1e-2), torch.Generator().manual_seed(0)
    proprio = torch.randn(256, S, generator=draw)
    wanted = torch.where(proprio[:, :1, None] > 0.0, 0.9, 0.1).expand(-1, C, D)
    inputs = {"proprio": proprio}
    for _ in range(300):
        loss = policy.sft_loss(inputs, wanted, policy.imitation_draws(256, draw))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        made = policy.act(inputs, "eval").actions
        assert (made - wanted).abs().mean() < 0.15
        assert (policy.denoise(proprio, torch.randn(256, N)) - policy.to_unit(wanted)).abs().mean() < 0.3


def issues(*words: str, name: str = "experiment/push_qc") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name, [*words])
    return str(caught.value)


def test_what_it_cannot_learn_from_or_with_is_refused(tmp_path: Path) -> None:
    there = f"data.path={tmp_path}"
    assert "model.head = 'squashed' does not have" in issues("model.head=squashed", there)
    assert "set model.head to one_step" in issues("algorithm=qc_fql", there)
    assert "set model.head to flow" in issues("model.head=one_step", there)
    assert "data.path" in issues("data.path=null")
    assert "candidates" in issues("algorithm.off_policy.candidates=0", there)
    told = issues("algorithm.off_policy.demonstrations=0", "algorithm.off_policy.offline_iterations=0", there)
    assert "nothing is learned from data.path" in told
    assert "a small flow policy beside critics" in issues("model=pi0", "env.cameras=[corner]", there)


@pytest.mark.parametrize("other", ["ppo", "sac", "iql"])
def test_other_methods_refuse_its_head(other: str) -> None:
    told = issues(f"algorithm={other}", "model.head=flow", name="experiment/gym_pendulum")
    assert "model.head = 'flow' does not have" in told


def test_single_actions_and_single_candidates_are_remarked_upon() -> None:
    config = replace(
        load_config("experiment/gym_pendulum").config,
        algorithm=replace(BEST, off_policy=replace(BEST.off_policy, candidates=1)),
    )
    notes = " ".join(config.algorithm.notes(config))
    assert "rollout.chunk_size = 1" in notes and "the critics choose nothing" in notes
