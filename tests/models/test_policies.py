"""What every registered policy must do, whatever it is."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learning import PPO
from safetensors.torch import load_file, save_file
from slow import only_slow

from embodyrl.checking.policies import PROMISES, PolicyBench
from embodyrl.checking.promises import State
from embodyrl.config import ConfigUse, load_config
from embodyrl.config.infos import model_info
from embodyrl.config.schema import ModelConfig
from embodyrl.envs import ActionField, Observation, SimulatorSpec
from embodyrl.models import Policy, PolicyError, PolicyObservation, SupportedModel, build_policy
from embodyrl.models.act.config import ScratchConfig as ACTScratch
from embodyrl.models.cnn.options import Encoders
from embodyrl.models.flow.config import NoiseMethod
from embodyrl.models.gr00t.config import ScratchConfig as Gr00tScratch
from embodyrl.models.gr00t.config import ValueInput
from embodyrl.models.gr00t_n17.config import ScratchConfig as Gr00tN17Scratch
from embodyrl.models.mlp.heads import build_head
from embodyrl.models.mlp.options import MLPConfig
from embodyrl.models.normalizer import RunningNormalizer
from embodyrl.models.pi.config import ScratchConfig as PiScratch
from embodyrl.models.pi.config import StateInput, ValueFrom
from embodyrl.models.pi0_fast.config import Convention, Decoding
from embodyrl.models.pi0_fast.config import ScratchConfig as FastScratch
from embodyrl.models.pi0_fast.config import ValueFrom as FastValueFrom
from embodyrl.models.policy import SAMPLE_WEIGHTS
from embodyrl.models.prismatic.config import ScratchConfig
from embodyrl.models.smolvla.config import ScratchConfig as SmolVLAScratch
from embodyrl.models.vla.config import Frozen
from embodyrl.models.vla.config import StateInput as NoState

BATCH = 6
FLOW = {"pi0", "pi05", "gr00t", "gr00t_n16", "gr00t_n17", "smolvla"}
DRAWS = FLOW | {"act"}
"""Models that draw random numbers for demonstrations."""


def make_spec(**changes: object) -> SimulatorSpec:
    arguments = {
        "tasks": {"push": "push the cube", "pull": "pull the red cube back"},
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
PI = {"denoising_steps": 3, "value_sizes": [16], "scratch": PiScratch(image_size=32, layers=2)}
PI0_FAST = {"value_sizes": [16], "scratch": FastScratch(image_size=32, layers=2)}
SMALL = {"scratch": ScratchConfig(image_size=32, hidden_size=32, layers=2, mlp_size=48)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with some of its options, and a simulator for it."""

    model: str
    chunk: int = 3
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)
    still: tuple[str, ...] = ()
    """Beginnings of the names of weights that rollouts teach nothing."""
    distinct: int = 100
    """First actions that differ, of 200."""

    @property
    def simulator(self) -> SimulatorSpec:
        return make_spec(**self.spec)

    @property
    def config(self) -> ModelConfig:
        options: Any = SupportedModel.entry(self.model).load_options()
        return options(name=self.model, **self.options)

    def policy(self, seed: int = 1) -> Policy:
        missing = SupportedModel.entry(self.model).missing()
        if missing:
            pytest.skip(f"{self.model} needs {missing[0].module}: {missing[0].install}")
        policy = build_policy(self.config, self.simulator, chunk_size=self.chunk, seed=seed)
        policy.update_statistics(policy.preprocess(self.observation(64, seed=7)))
        return policy

    def observation(self, batch: int, seed: int = 3) -> PolicyObservation:
        return PolicyObservation.of(self.simulated(batch, seed))

    def simulated(self, batch: int, seed: int = 3) -> Observation:
        draw, cameras = np.random.default_rng(seed), len(self.simulator.cameras)
        proprio = (draw.normal(size=(batch, 5)) * 3 + 1).astype(np.float32)
        images = draw.integers(0, 256, (batch, cameras, 40, 40, 3), dtype=np.uint8) if cameras else None
        task_descriptions = list(self.simulator.tasks.values())
        return Observation(
            images=images, proprio=proprio, task_descriptions=[task_descriptions[i % 2] for i in range(batch)]
        )


ONE, TWO = {"cameras": ("front",), "image_size": (40, 40)}, {"cameras": ("front", "hand"), "image_size": (40, 40)}
GR00T = {"scratch": Gr00tScratch(image_size=32, hidden_size=32, layers=1, vision_layers=1, action_layers=2)}
GR00T_N17 = {
    "scratch": Gr00tN17Scratch(
        image_size=32, patch_size=8, hidden_size=32, layers=1, vision_size=32, vision_layers=1, action_layers=3
    )
}
SMOLVLA = {
    "denoising_steps": 3,
    "value_sizes": [16],
    "scratch": SmolVLAScratch(image_size=32, layers=2, vision_layers=1),
}
ACT_SIZES: dict[str, Any] = {"backbone_width": 4, "hidden_size": 16, "heads": 2, "feedforward_size": 24}
ACT: dict[str, Any] = {
    "scratch": ACTScratch(**ACT_SIZES, encoder_layers=2, style_size=3, style_layers=1),
    "dropout": 0.0,  # what is dropped depends on the demonstrations of a micro-batch
    "value_sizes": [16],
}
ACT_STILL = (
    "network.vae_",
    "network.encoder_latent_input_proj.weight",
    "network.decoder.layers.0.self_attn.",
    "network.decoder.layers.0.norm1.weight",
)
"""What demonstrations alone train, what multiplies the latent variable's zero, and attention among actions that are all
zero still."""
CNN: dict[str, Any] = {"encoder": "test_resnet", "image_features": 12, "hidden_sizes": [16]}
N17_STILL = ("network.backbone.language_model.norm.",)
"""The norm after the last layer, which is not applied."""
CASES = {
    "mlp-continuous": Case("mlp"),
    "cnn": Case("cnn", options=CNN, spec=TWO),
    "cnn-apart-without-state-discrete": Case(
        "cnn",
        options=CNN | {"encoders": Encoders.each, "shared": False, "state": False},
        spec=TWO | {"actions": CHOICE},
    ),
    "mlp-discrete": Case("mlp", spec={"actions": CHOICE}),
    "openvla": Case("openvla", chunk=1, options=SMALL, spec=ONE),
    "openvla-top-k": Case("openvla", chunk=1, options=SMALL | {"top_k": 9, "temperature": 1.7}, spec=ONE),
    "openvla_oft": Case("openvla_oft", options=SMALL, spec=ONE),
    "openvla_oft-two-images-and-state": Case(
        "openvla_oft", options=SMALL | {"num_images": 2, "use_proprio": True, "append_stop_token": False}, spec=TWO
    ),
    "pi0": Case("pi0", options=PI, spec=ONE),
    "pi0-joint-noise": Case(
        "pi0", options=PI | {"noise_method": NoiseMethod.flow_noise, "joint_logprob": True}, spec=TWO
    ),
    "pi0-prefix-cps": Case(
        "pi0",
        options=PI | {"noise_method": NoiseMethod.flow_cps, "value_from": ValueFrom.prefix, "relative_action_dims": 2},
        spec=TWO,
    ),
    "pi05": Case("pi05", options=PI, spec=ONE),
    "pi05-frozen-without-state": Case(
        "pi05", options=PI | {"state": StateInput.none, "frozen": Frozen.language}, spec=ONE
    ),
    "openvla_oft-top-p": Case("openvla_oft", options=SMALL | {"top_p": 0.8}, spec=ONE),
    "pi0_fast": Case("pi0_fast", options=PI0_FAST, spec=ONE),
    "pi0_fast-whole-vocabulary": Case(
        "pi0_fast",
        options=PI0_FAST
        | {
            "decoding": Decoding.all,
            "convention": Convention.openpi,
            "value_from": FastValueFrom.mean,
            "detach_critic": False,
            "top_k": 40,
            "temperature": 0.8,
            "relative_action_dims": 2,
        },
        spec=TWO,
        distinct=20,  # most of the vocabulary is no code
    ),
    "gr00t": Case("gr00t", options=GR00T, spec=TWO),
    "gr00t_n17": Case("gr00t_n17", options=GR00T_N17, spec=TWO, still=N17_STILL),
    "gr00t_n16": Case("gr00t_n16", options=GR00T_N17, spec=TWO),
    "smolvla": Case("smolvla", options=SMOLVLA | {"frozen": Frozen.nothing}, spec=TWO),
    "smolvla-frozen-cps": Case("smolvla", options=SMOLVLA | {"noise_method": NoiseMethod.flow_cps}, spec=ONE),
    "smolvla-all-cross-joint-noise": Case(
        "smolvla",
        options=SMOLVLA
        | {
            "noise_method": NoiseMethod.flow_noise,
            "joint_logprob": True,
            "frozen": Frozen.vision,
            "horizon": 5,
            "scratch": SmolVLAScratch(image_size=32, layers=2, vision_layers=1, shuffle=2, self_attention_every=0),
        },
        spec=ONE,
    ),
    "act": Case("act", options=ACT, spec=TWO, still=ACT_STILL),
    "act-without-style-or-state": Case(
        "act",
        options=ACT | {"scratch": ACTScratch(**ACT_SIZES, style=False), "state": NoState.none, "detach_critic": False},
        spec=ONE,
        still=(*ACT_STILL, "network.encoder_robot_state_input_proj.weight"),
    ),
    "gr00t-flow-noise": Case(
        "gr00t",
        options=GR00T | {"noise_method": NoiseMethod.flow_noise, "joint_logprob": True, "value_input": ValueInput.vl},
        spec=ONE,
    ),
    "gr00t_n17-flow-noise": Case(
        "gr00t_n17",
        options=GR00T_N17
        | {"noise_method": NoiseMethod.flow_noise, "joint_logprob": True, "value_input": ValueInput.vl},
        spec=ONE,
        still=N17_STILL,
    ),
}


def make_policy(name: str, seed: int = 1) -> Policy:
    return Case(name).policy(seed)


def make_observation(batch: int, seed: int = 3) -> PolicyObservation:
    return Case("mlp").observation(batch, seed)


FAST = {"mlp-discrete", *{case.model: name for name, case in reversed(CASES.items())}.values()}
"""The first case of each model, and one of choices."""


@pytest.fixture(params=[name if name in FAST else only_slow(name) for name in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def policy(case: Case) -> Policy:
    return case.policy()


def test_every_model_has_a_case() -> None:
    """But those that have no weights here: `tests/serving` has them act."""
    built_in = {entry.name for entry in SupportedModel.entries() if entry.source == "built-in"}
    assert {case.model for case in CASES.values()} == {
        name for name in built_in if model_info(name).untrainable() is None
    }


def test_it_keeps_the_promises_of_every_model(case: Case, policy: Policy) -> None:
    config = load_config("gym_pendulum", use=ConfigUse.show).config
    rollout = dataclasses.replace(config.rollout, chunk_size=case.chunk)
    bench = PolicyBench(dataclasses.replace(config, model=case.config, rollout=rollout), case.simulator)
    findings = [bench.try_(each) for each in PROMISES]
    assert not [str(finding) for finding in findings if finding.state is State.broken]


def test_evaluate_reproduces_the_logprobs_of_act(case: Case, policy: Policy) -> None:
    inputs = policy.preprocess(case.observation(BATCH))
    acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
    scored = policy.evaluate(inputs, acted.trace)
    torch.testing.assert_close(scored.logprobs, acted.logprobs, atol=1e-5, rtol=0)
    assert scored.entropy.shape == scored.logprobs.shape
    if acted.values is not None:
        assert scored.values is not None
        torch.testing.assert_close(scored.values, acted.values, atol=1e-5, rtol=0)


def test_demonstrations_in_parts_have_the_gradient_of_all(case: Case, policy: Policy) -> None:
    inputs = policy.preprocess(case.observation(BATCH))
    wanted = 0.3 * policy.act(inputs, "eval").actions.detach()
    draws = policy.imitation_draws(BATCH, torch.Generator().manual_seed(0))
    assert all(len(drawn) == BATCH for drawn in draws.values()) and bool(draws) == (case.model in DRAWS)

    def gradient(*parts: slice) -> torch.Tensor:
        policy.zero_grad()
        for part in parts:
            seen, drawn = ({name: column[part] for name, column in of.items()} for of in (inputs, draws))
            loss = policy.sft_loss(seen, wanted[part], drawn)
            (loss * len(wanted[part]) / BATCH).backward()
        return torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None])

    whole = gradient(slice(BATCH))
    assert whole.abs().max() > 0
    torch.testing.assert_close(gradient(slice(1), slice(1, BATCH)), whole, atol=1e-5 * float(whole.abs().max()), rtol=0)


def test_a_demonstration_counts_as_much_as_its_weight(case: Case, policy: Policy) -> None:
    assert SupportedModel.entry(case.model).weighs
    inputs = policy.preprocess(case.observation(BATCH))
    wanted = 0.3 * policy.act(inputs, "eval").actions.detach()
    draws = policy.imitation_draws(BATCH, torch.Generator().manual_seed(0))

    def loss(weights: torch.Tensor, actions: torch.Tensor = wanted) -> torch.Tensor:
        return policy.sft_loss(inputs | {SAMPLE_WEIGHTS: weights}, actions, draws).detach()

    close = partial(torch.testing.assert_close, atol=1e-6, rtol=1e-5)
    close(loss(torch.ones(BATCH)), policy.sft_loss(inputs, wanted, draws).detach())
    each = torch.stack([loss(one) for one in torch.eye(BATCH)])
    assert each.min() > 0 and (each.max() - each.min()) / each.max() > 1e-4, "they differ"
    weights = torch.linspace(0.0, 3.0, BATCH)
    close(loss(weights), (weights * each).sum())
    # What weighs nothing is not learned: the loss is the same whatever was demonstrated there.
    others = torch.where(torch.arange(BATCH)[:, None, None] == 2, wanted, wanted.flip(1) * 0.5)
    assert torch.equal(loss(torch.eye(BATCH)[2], others), each[2])


def test_bfloat16_changes_little_and_rollout_and_learning_agree_in_it(case: Case, policy: Policy) -> None:
    # A product has 8 bits. Act and evaluate do the same products, except where one decides token by token with a cache
    # and the other sees all at once: there they round differently.
    tolerance = 0.1 if policy.spec.kind == "ar_token" else 1e-5
    inputs = policy.preprocess(case.observation(BATCH))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
        scored = policy.evaluate(inputs, acted.trace)
        values = policy.act(inputs, "eval").values
    exact = policy.evaluate(inputs, acted.trace)
    torch.testing.assert_close(scored.logprobs, acted.logprobs, atol=tolerance, rtol=0)
    torch.testing.assert_close(scored.logprobs, exact.logprobs, atol=0.5, rtol=0.1)
    assert not torch.equal(scored.logprobs, exact.logprobs)
    for each in (acted.actions, acted.logprobs, acted.values, scored.logprobs, scored.entropy, scored.values, values):
        assert each is None or each.dtype == torch.float32


def test_the_registry_knows_which_models_have_blocks(case: Case, policy: Policy) -> None:
    # Told without building the model: whether `engine.precision=auto` means bfloat16 on a GPU, and what LoRA is for.
    plan = policy.parallel_plan()
    assert bool(plan.blocks) == bool(plan.adaptable) == SupportedModel.entry(case.model).blocks


def test_with_adapters_what_is_beside_them_learns_in_full(case: Case, policy: Policy) -> None:
    plan = policy.parallel_plan()
    heads = {name for head in plan.heads for name, _ in policy.get_submodule(head).named_parameters(prefix=head)}
    if not plan.adaptable:
        assert not heads
        return
    assert any(name.startswith("value_head.") for name in heads)
    below = [f"{layer}.weight" for layer in plan.adaptable]
    assert not heads & set(below) and all(name.startswith(f"{plan.root}.") for name in below)


def test_actions_are_in_the_simulators_range_and_shape(case: Case, policy: Policy) -> None:
    draws = 200
    output = policy.act(policy.preprocess(case.observation(draws)), "train", torch.Generator().manual_seed(0))
    spec = case.simulator
    assert output.actions.shape == (draws, case.chunk, spec.action_dim) and output.actions.dtype == torch.float32
    low, high = torch.from_numpy(spec.action_low), torch.from_numpy(spec.action_high)
    assert bool((output.actions >= low - 1e-6).all()) and bool((output.actions <= high + 1e-6).all())
    assert len(output.actions[:, 0].unique(dim=0)) > (4 if policy.spec.kind == "categorical" else case.distinct)


def test_gradients_are_finite_and_reach_every_parameter(case: Case, policy: Policy) -> None:
    inputs = policy.preprocess(case.observation(BATCH))
    trace = policy.act(inputs, "train", torch.Generator().manual_seed(0)).trace
    output = policy.evaluate(inputs, {key: value.detach() for key, value in trace.items()})
    total = output.logprobs.sum() + (0 if output.values is None else output.values.square().sum())
    total.backward()
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad and not name.startswith(case.still):
            assert parameter.grad is not None, name
            assert bool(parameter.grad.isfinite().all()) and bool((parameter.grad != 0).any()), name


def test_a_batch_equals_its_rows_one_by_one(case: Case, policy: Policy) -> None:
    observation = case.observation(BATCH)
    together = policy.act(policy.preprocess(observation), "eval", None)
    for row in range(BATCH):
        alone = PolicyObservation(
            images=None if observation.images is None else observation.images[row : row + 1],
            proprio=observation.proprio[row : row + 1],
            task_descriptions=observation.task_descriptions[row : row + 1],
        )
        output = policy.act(policy.preprocess(alone), "eval", None)
        torch.testing.assert_close(output.actions[0], together.actions[row], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(output.logprobs[0], together.logprobs[row], atol=1e-5, rtol=1e-5)


def test_eval_mode_is_deterministic_and_draws_nothing(case: Case, policy: Policy) -> None:
    inputs, generator = policy.preprocess(case.observation(4)), torch.Generator().manual_seed(5)
    before = generator.get_state()
    first, second = (policy.act(inputs, "eval", generator).actions for _ in range(2))
    assert torch.equal(first, second) and torch.equal(before, generator.get_state())


def test_save_and_load_are_exact(case: Case, policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path, case.config)
    other = case.policy(seed=2)
    inputs = policy.preprocess(case.observation(BATCH))
    wanted = policy.act(inputs, "eval", None)
    assert not torch.equal(other.act(inputs, "eval", None).values, wanted.values)
    other.load(tmp_path)
    found = other.act(inputs, "eval", None)
    assert torch.equal(found.actions, wanted.actions) and torch.equal(found.logprobs, wanted.logprobs)
    assert torch.equal(found.values, wanted.values)


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
    everything = torch.cat([observation.proprio for observation in batches]).double().numpy()
    np.testing.assert_allclose(policy.normalizer.mean.numpy(), everything.mean(0), atol=1e-12)
    np.testing.assert_allclose(policy.normalizer.variance.numpy(), everything.var(0), atol=1e-12)


def test_a_policy_that_was_saved_before_statistics_could_be_of_demonstrations_is_read(tmp_path: Path) -> None:
    policy = make_policy("mlp")
    policy.update_statistics({"proprio": torch.randn(20, policy.spec.proprio_dim)})
    policy.save(tmp_path, MLPConfig(name="mlp"))
    (file,) = tmp_path.glob("*.safetensors")
    weights = load_file(file)
    del weights["normalizer.demonstrated"]
    save_file(weights, file)
    other, third = make_policy("mlp"), make_policy("mlp")
    other.load(tmp_path)
    third.load_state_dict(weights)  # as a run that is resumed reads its copies
    assert not third.normalizer.of_demonstrations
    assert all(torch.equal(each, policy.state_dict()[name]) for name, each in other.state_dict().items())


def test_what_demonstrations_hardly_vary_is_not_magnified() -> None:
    seen = torch.randn(200, 2)
    seen[:, 1] = 0.4  # the place of an object that a rollout may push
    for demonstrated, largest in ((False, 9999.0), (True, 50.0)):
        normalizer = RunningNormalizer(2)
        if demonstrated:
            normalizer.begin_demonstrations()
        normalizer.update(seen)
        assert normalizer.of_demonstrations == demonstrated
        assert normalizer.scale[1] == pytest.approx(largest, rel=0.01)
        assert normalizer.scale[0] == pytest.approx(1.0, rel=0.2)


def test_only_policies_with_statistics_are_given_whole_batches() -> None:
    assert make_policy("mlp").keeps_statistics
    assert not CASES["openvla_oft"].policy().keeps_statistics


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


def test_choices_start_where_the_simulators_do() -> None:
    found = {}
    for first, last in ((-1, 1), (0, 3), (5, 12)):
        action = ActionField(name="push", meaning="discrete", unit="1", low=(float(first),), high=(float(last),))
        head = build_head(MLPConfig(name="mlp"), make_spec(actions=(action,)), 2)
        outputs = torch.zeros(400, head.outputs)
        sample = head.sample(outputs, torch.Generator().manual_seed(0))
        actions = head.actions(sample, head.logprobs(outputs, sample))
        assert head.entropy(outputs)[0].tolist() == pytest.approx([np.log(last - first + 1)] * 2)
        assert head.errors(outputs, actions) == pytest.approx(-head.logprobs(outputs, sample))
        found[first] = sorted(set(actions.flatten().tolist()))
    assert found == {-1: [-1, 0, 1], 0: [0, 1, 2, 3], 5: [5, 6, 7, 8, 9, 10, 11, 12]}


WITHOUT_WEIGHTS = [
    *("cnn", "openvla", "openvla_oft-two-images-and-state", "pi05", "gr00t", "gr00t_n17", "gr00t_n16", "smolvla"),
    "act",
]
OTHERS = [only_slow(name) for name in CASES if name not in WITHOUT_WEIGHTS]


@pytest.mark.parametrize("case", [*WITHOUT_WEIGHTS, *OTHERS], indirect=True)
def test_its_size_is_known_without_weights(case: Case) -> None:
    """As `embodyrl plan` does it: on tensors without memory, which a model's code must not ask for their numbers."""
    from embodyrl.config.schema import EngineConfig
    from embodyrl.planning.dry_run import trace
    from embodyrl.planning.weightless import build_weightless

    real = case.policy()
    blank, _ = build_weightless(case.config, case.simulator, chunk_size=case.chunk)
    shapes = [{name: (each.shape, each.dtype) for name, each in some.named_parameters()} for some in (real, blank)]
    assert shapes[0] == shapes[1] and all(parameter.is_meta for parameter in blank.parameters())
    task_description = next(iter(case.simulator.tasks.values()))
    assert blank.tokens_per_observation(task_description) == real.tokens_per_observation(task_description)
    assert (blank.tokens_per_observation(task_description) > 0) == SupportedModel.entry(case.model).blocks
    traced = trace(blank, case.simulated(2), EngineConfig(), cuda=False, **PPO)
    assert traced.lines.learning.slope >= traced.lines.deciding.slope > 0
    decision = real.act(real.preprocess(case.observation(4)), "eval")
    assert traced.entries == decision.logprobs.shape[1]
    assert traced.trace_bytes * 4 == sum(each.nbytes for each in decision.trace.values())


def test_fine_tuning_is_planned_where_the_loss_asks_for_a_number() -> None:
    """The seed of what ACT drops is a number of the minibatch, which tensors without memory do not have."""
    from embodyrl.config.schema import EngineConfig
    from embodyrl.planning.dry_run import trace
    from embodyrl.planning.weightless import build_weightless

    case = Case("act", options=ACT | {"dropout": 0.1}, spec=TWO)
    blank, _ = build_weightless(case.config, case.simulator, chunk_size=case.chunk)
    assert trace(blank, case.simulated(2), EngineConfig(), cuda=False, supervised=True).lines.learning.slope > 0


def test_arrays_of_a_simulator_are_refused_with_the_remedy() -> None:
    case = Case("mlp")
    with pytest.raises(PolicyError, match=r"proprio of the observation is a ndarray, .* PolicyObservation\.of"):
        case.policy().preprocess(case.simulated(2))  # type: ignore[arg-type]
