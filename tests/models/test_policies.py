"""What every registered policy must do, whatever it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.models import Policy, PolicyError, SupportedModel, build_policy
from embodyrl.models.mlp.options import MLPConfig

MODELS = [entry.name for entry in SupportedModel.entries() if entry.source == "built-in"]
CHUNK = 3


def make_spec(**changes: object) -> SimulatorSpec:
    arguments = {
        "tasks": {"push": "push the cube"},
        "actions": (
            ActionField(name="arm", meaning="delta_position", unit="m", low=(-0.05, -0.1), high=(0.05, 0.3)),
            ActionField(name="gripper", meaning="gripper", unit="1", low=(0.0,), high=(1.0,)),
        ),
        "proprio_dim": 5,
        "max_episode_steps": 10,
        "control_frequency": 20.0,
    }
    return SimulatorSpec(**(arguments | changes))  # type: ignore[arg-type]


CHOICE = (ActionField(name="push", meaning="discrete", unit="1", low=(0.0,), high=(4.0,)),)
CASES = [(name, actions) for name in MODELS for actions in (None, CHOICE)]


def make_policy(name: str, seed: int = 1, actions: tuple[ActionField, ...] | None = None) -> Policy:
    options = SupportedModel.entry(name).load_options()
    assert options is not None
    spec = make_spec() if actions is None else make_spec(actions=actions)
    policy = build_policy(options(name=name), spec, chunk_size=CHUNK, seed=seed)
    policy.update_statistics(policy.preprocess(make_observation(64, seed=7)))
    return policy


def make_observation(batch: int, seed: int = 3) -> Observation:
    draw = np.random.default_rng(seed)
    proprio = (draw.normal(size=(batch, 5)) * 3 + 1).astype(np.float32)
    return Observation(proprio=proprio, tasks=["push the cube"] * batch)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{'continuous' if case[1] is None else 'discrete'}")
def policy(request: pytest.FixtureRequest) -> Policy:
    name, actions = request.param
    return make_policy(name, actions=actions)


def test_evaluate_reproduces_the_logprobs_of_act(policy: Policy) -> None:
    inputs = policy.preprocess(make_observation(16))
    acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
    scored = policy.evaluate(inputs, acted.trace)
    torch.testing.assert_close(scored.logprobs, acted.logprobs, atol=1e-5, rtol=0)
    assert scored.entropy.shape == scored.logprobs.shape
    if acted.values is not None:
        assert scored.values is not None
        torch.testing.assert_close(scored.values, acted.values, atol=1e-5, rtol=0)


def test_actions_are_in_the_simulators_range_and_shape(policy: Policy) -> None:
    output = policy.act(policy.preprocess(make_observation(200)), "train", torch.Generator().manual_seed(0))
    spec = make_spec() if policy.spec.kind == "gaussian" else make_spec(actions=CHOICE)
    assert output.actions.shape == (200, CHUNK, spec.action_dim) and output.actions.dtype == torch.float32
    low, high = torch.from_numpy(spec.action_low), torch.from_numpy(spec.action_high)
    assert bool((output.actions >= low - 1e-6).all()) and bool((output.actions <= high + 1e-6).all())
    assert len(output.actions[:, 0].unique(dim=0)) > (100 if policy.spec.kind == "gaussian" else 4)


def test_gradients_are_finite_and_reach_every_parameter(policy: Policy) -> None:
    inputs = policy.preprocess(make_observation(16))
    trace = policy.act(inputs, "train", torch.Generator().manual_seed(0)).trace
    output = policy.evaluate(inputs, {key: value.detach() for key, value in trace.items()})
    total = output.logprobs.sum() + (0 if output.values is None else output.values.square().sum())
    total.backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()) and bool((parameter.grad != 0).any()), name


def test_a_batch_equals_its_rows_one_by_one(policy: Policy) -> None:
    observation = make_observation(6)
    together = policy.act(policy.preprocess(observation), "eval", None)
    for row in range(6):
        alone = Observation(proprio=observation.proprio[row : row + 1], tasks=observation.tasks[:1])
        output = policy.act(policy.preprocess(alone), "eval", None)
        torch.testing.assert_close(output.actions[0], together.actions[row], atol=1e-5, rtol=1e-5)


def test_eval_mode_is_deterministic_and_draws_nothing(policy: Policy) -> None:
    inputs, generator = policy.preprocess(make_observation(4)), torch.Generator().manual_seed(5)
    before = generator.get_state()
    first, second = (policy.act(inputs, "eval", generator).actions for _ in range(2))
    assert torch.equal(first, second) and torch.equal(before, generator.get_state())


def test_save_and_load_are_exact(policy: Policy, tmp_path: Path) -> None:
    options = SupportedModel.entry(policy.name).load_options()
    assert options is not None
    policy.save(tmp_path, options(name=policy.name))
    other = make_policy(policy.name, seed=2, actions=None if policy.spec.kind == "gaussian" else CHOICE)
    inputs = policy.preprocess(make_observation(64))
    assert not torch.equal(other.act(inputs, "eval", None).actions, policy.act(inputs, "eval", None).actions)
    other.load(tmp_path)
    assert torch.equal(other.act(inputs, "eval", None).actions, policy.act(inputs, "eval", None).actions)


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(123)
    first = make_policy("mlp").state_dict()
    torch.manual_seed(456)
    second = make_policy("mlp").state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["actor.0.weight"], make_policy("mlp", seed=2).state_dict()["actor.0.weight"])


def test_normalisation_changes_only_in_update_statistics_and_equals_numpy() -> None:
    policy = build_policy(MLPConfig(name="mlp"), make_spec(), chunk_size=1, seed=1)
    batches = [make_observation(50, seed=seed) for seed in (1, 2, 3)]
    for observation in batches:
        inputs = policy.preprocess(observation)
        before = policy.act(inputs, "eval", None).actions
        policy.act(inputs, "train", torch.Generator().manual_seed(0))
        assert torch.equal(before, policy.act(inputs, "eval", None).actions)
        policy.update_statistics(inputs)
    everything = np.concatenate([observation.proprio for observation in batches]).astype(np.float64)
    np.testing.assert_allclose(policy.normalizer.mean.numpy(), everything.mean(0), atol=1e-12)
    np.testing.assert_allclose(policy.normalizer.variance.numpy(), everything.var(0), atol=1e-12)


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    config = MLPConfig(name="mlp", hidden_sizes=[16])
    build_policy(config, make_spec(), chunk_size=1, seed=1).save(tmp_path, config)
    with pytest.raises(PolicyError, match=r"do not fit model 'mlp': .*actor\.0\.weight has shape \(16, 5\), expected"):
        build_policy(MLPConfig(name="mlp", checkpoint=str(tmp_path)), make_spec(), chunk_size=1, seed=1)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"holds no model\.safetensors"):
        make_policy("mlp").load(tmp_path)


def test_a_simulator_without_state_is_refused() -> None:
    with pytest.raises(PolicyError, match="needs a state observation"):
        build_policy(MLPConfig(name="mlp"), make_spec(proprio_dim=0), chunk_size=1, seed=1)


def test_categorical_logprobs_and_entropy_by_hand() -> None:
    from embodyrl.models.mlp.heads import CategoricalHead

    head = CategoricalHead(make_spec(actions=CHOICE), chunk_size=1)
    outputs = torch.tensor([[0.1, 0.2, 0.3, 0.4, 1e-9]]).log()
    assert head.logprobs(outputs, torch.tensor([[3]])).exp().item() == pytest.approx(0.4)
    assert head.entropy(outputs).item() == pytest.approx(-sum(p * np.log(p) for p in (0.1, 0.2, 0.3, 0.4)))
    assert head.mode(outputs).tolist() == [[3]]
    drawn = head.sample(outputs.expand(20000, -1), torch.Generator().manual_seed(0))
    assert (drawn == 1).float().mean().item() == pytest.approx(0.2, abs=0.01)
