"""pi0 and pi0.5: files, task descriptions, cameras, units, and that learning sees what rollouts saw."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from safetensors.torch import load_file, save_file

from embodyrl.config import ConfigError, load_config
from embodyrl.config.rules import checkpoint_notes
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.models import PolicyError, PolicyObservation, SupportedModel, build_policy, load_policy
from embodyrl.models.flow.config import NoiseMethod
from embodyrl.models.pi.checkpoint import HEAD, WORDS, CheckpointFiles, robot_of
from embodyrl.models.pi.config import GemmaSizes, Normalization, Pi05Config, ScratchConfig, StateInput
from embodyrl.models.pi.network import Rotation
from embodyrl.models.saved import INDEX_FILE, SINGLE_FILE
from embodyrl.models.vla.fits import SimulatorSizes
from embodyrl.models.vla.transformer import Attention, stacked

SPEC = SimulatorSpec(
    tasks={"push": "push the cube", "pull": "pull the red cube back"},
    actions=(
        ActionField(name="arm", meaning="delta_position", unit="m", low=(-1.0,) * 3, high=(1.0,) * 3, scale=0.05),
        ActionField(name="gripper", meaning="gripper", unit="1", low=(-1.0,), high=(1.0,), opens=-1.0, closes=1.0),
    ),
    proprio_dim=5,
    max_episode_steps=10,
    control_frequency=20.0,
    cameras=("front", "hand"),
    image_size=(40, 40),
)
SHAPE = ScratchConfig(image_size=32, layers=2)


def scratch(name: str = "pi0", *, chunk_size: int = 4, seed: int = 1, **options: Any) -> Any:
    dataclass: Any = SupportedModel.entry(name).load_options()
    config = dataclass(name=name, **{"denoising_steps": 3, "value_sizes": [8], "scratch": SHAPE} | options)
    return build_policy(config, SPEC, chunk_size=chunk_size, seed=seed)


def observation(batch: int = 3, seed: int = 0) -> PolicyObservation:
    draw, task_descriptions = np.random.default_rng(seed), list(SPEC.tasks.values())
    return PolicyObservation(
        images=torch.from_numpy(draw.integers(0, 256, (batch, 2, 40, 40, 3), dtype=np.uint8)),
        proprio=torch.from_numpy(draw.normal(size=(batch, 5)).astype(np.float32)),
        task_descriptions=[task_descriptions[row % 2] for row in range(batch)],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of pi0 as a run saves it."""
    policy, place = scratch(), tmp_path / "policy"
    place.mkdir()
    policy.save(place, policy.config)
    return place


def load(folder: Path, **options: Any) -> Any:
    arguments = {"simulator": SPEC, "chunk_size": 4, "denoising_steps": 3, "value_sizes": [8]}
    return load_policy("pi0", checkpoint=folder, **arguments | options)


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def pad(content: Any, length: int = 32) -> None:
    """Statistics as openpi wrote them until September 2025: of states and actions with zeros behind."""
    for columns in content["norm_stats"].values():
        columns.update({name: [*numbers, *[0.0] * (length - len(numbers))] for name, numbers in columns.items()})


@pytest.mark.parametrize("value_from", ["expert", "prefix"])
@pytest.mark.parametrize("method", [each for each in NoiseMethod if each is not NoiseMethod.none])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_learning_computes_bit_for_bit_what_the_rollout_did(
    name: str, joint: bool, method: NoiseMethod, value_from: str
) -> None:
    options = type(scratch(name).config.value_from)(value_from)
    policy = scratch(name, noise_method=method, joint_logprob=joint, value_from=options)
    inputs = policy.preprocess(observation(5))
    with torch.inference_mode():
        acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
    trace = {key: value.clone() for key, value in acted.trace.items()}
    scored = policy.evaluate({key: value.clone() for key, value in inputs.items()}, trace)
    assert torch.equal(scored.logprobs, acted.logprobs) and torch.equal(scored.values, acted.values)
    assert scored.logprobs.requires_grad and bool((scored.entropy != 0).all())


def test_log_probabilities_are_scored_at_the_noise_level_that_they_were_drawn_with() -> None:
    policy = scratch(noise_level=0.6, noise_level_end=0.2)
    inputs = policy.preprocess(observation())
    acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
    levels = []
    for done in (0.0, 0.5, 1.0):
        policy.set_progress(done)
        levels.append(policy.act(inputs, "train").trace["noise_level"][0].item())
    assert levels == pytest.approx([0.6, 0.4, 0.2])
    assert policy.scheduled(0.25) == pytest.approx({"model.noise_level": 0.5}), "what a resume says of it"
    assert torch.equal(policy.evaluate(inputs, acted.trace).logprobs, acted.logprobs)


def test_each_decision_has_a_random_step_of_its_own_and_the_others_are_deterministic() -> None:
    policy = scratch(noise_method=NoiseMethod.flow_cps)
    inputs = policy.preprocess(observation(40))
    acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
    steps = acted.trace["step"]
    assert set(steps.tolist()) == {0, 1}  # the last of the three adds no noise
    chain, seen = acted.trace["chain"], policy.condition(inputs)
    for number in range(3):
        here = torch.full_like(steps, number)
        time, before, after = policy.grid.at(here)
        said = policy.denoise(seen, chain[:, number], time)
        follows = chain[:, number] - said.velocity * (before - after)
        same = (follows - chain[:, number + 1]).abs().flatten(1).max(1).values < 1e-5
        assert torch.equal(same, steps != number)


def test_all_layers_look_through_one_mask() -> None:
    policy, seen = scratch(), []
    for layer in policy.network.expert.layers:
        layer.self_attn.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[2]))
    condition = policy.condition(policy.preprocess(observation()))
    policy.denoise(condition, torch.zeros(3, 4, 4), torch.ones(3))
    assert len(seen) == 2 and seen[0] is seen[1]
    assert seen[0].shape[2] == SHAPE.heads * (1 + 4)  # the heads, which share their keys, one below the other


def test_images_and_task_description_are_read_once_for_all_steps() -> None:
    policy = scratch(joint_logprob=True)
    inputs, read = policy.preprocess(observation()), []
    policy.network.vision.register_forward_hook(lambda *_: read.append(1))
    acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
    policy.evaluate(inputs, acted.trace)
    assert len(read) == 2


def test_flow_matching_learns_and_repeats_itself() -> None:
    inputs = scratch().preprocess(observation(16))
    wanted = torch.from_numpy(np.random.default_rng(0).uniform(-0.5, 0.5, (16, 4, 4)).astype(np.float32))
    histories = []
    for _ in range(2):
        policy, generator = scratch(), torch.Generator().manual_seed(0)
        optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
        losses = []
        for _ in range(40):
            loss = policy.sft_loss(inputs, wanted, policy.imitation_draws(16, generator))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        histories.append(losses)
    assert histories[0] == histories[1]
    assert np.mean(histories[0][-5:]) < 0.6 * np.mean(histories[0][:5])


def test_actions_beyond_a_demonstrated_chunk_do_not_count() -> None:
    policy = scratch(chunk_size=6)
    inputs = policy.preprocess(observation())
    data, counts = policy.sft_targets(torch.zeros(3, 4, 4), inputs)
    assert data.shape == counts.shape == (3, 6, 4)
    assert counts[:, :4].all() and not counts[:, 4:].any()


def test_the_last_action_and_zeros_fill_up_what_is_learned() -> None:
    policy = scratch(chunk_size=6)
    policy.start = torch.zeros(6, 7)  # the network takes more numbers than a robot has
    inputs = policy.preprocess(observation(1))
    actions = torch.tensor([[[0.1, 0.2, 0.3, 1.0], [-0.4, 0.5, 0.6, -1.0]]])
    data, counts = policy.sft_targets(actions, inputs)
    own = policy.actions.normalize(policy.units.inverse(actions))[0]
    assert not torch.equal(own[0], own[1]) and bool(own.all())
    wanted = torch.cat([own, own[1:].expand(4, -1)])
    assert torch.equal(data[0, :, :4], wanted) and not data[..., 4:].any()
    assert torch.equal(counts[0], torch.tensor([[1.0] * 7] * 2 + [[0.0] * 7] * 4))  # the zeros behind an action count


def test_times_of_learning_leave_out_the_very_end() -> None:
    for name in ("pi0", "pi05"):
        times, noise = scratch(name).learning_times(torch.tensor([0.0, 0.5, 1.0]))
        torch.testing.assert_close(times, torch.tensor([0.001, 0.5005, 1.0]), atol=1e-7, rtol=0)
        assert torch.equal(noise, times)


def test_units_are_converted_there_and_back_also_relative_to_the_state() -> None:
    policy = scratch(relative_action_dims=2, gripper=type(scratch().config.gripper).one_opens, binary_gripper=False)
    inputs = policy.preprocess(observation())
    actions = torch.rand(3, 4, 4) * 0.8
    data, _ = policy.sft_targets(actions, inputs)
    torch.testing.assert_close(policy.finish(data, inputs), actions, atol=1e-6, rtol=0)
    moved = {**inputs, "proprio": inputs["proprio"] + 0.1}
    difference = policy.finish(data, moved) - actions
    torch.testing.assert_close(difference[..., :2], torch.full((3, 4, 2), 0.1).clamp(max=1.0), atol=1e-6, rtol=0)
    assert difference[..., 2:].abs().max() < 1e-6


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("embedding", [HEAD, WORDS])
def test_public_layouts_load_and_are_written_back_as_they_were(
    folder: Path, tmp_path: Path, prefix: str, embedding: str
) -> None:
    weights = {key.replace(HEAD, embedding): value for key, value in load_file(folder / "model.safetensors").items()}
    other, again = tmp_path / "other", tmp_path / "again"
    shutil.copytree(folder, other)
    save_file({prefix + key: value for key, value in weights.items()}, other / "model.safetensors")
    policy = load(other)
    inputs = policy.preprocess(observation())
    assert torch.equal(policy.act(inputs, "eval").actions, load(folder).act(inputs, "eval").actions)
    again.mkdir()
    policy.save(again, policy.config)
    found = load_file(again / "model.safetensors")
    assert found.keys() == {prefix + key for key in weights}
    assert all(torch.equal(found[prefix + key], value) for key, value in weights.items())


def test_a_checkpoint_in_shards_is_written_back_without_their_index(folder: Path, tmp_path: Path) -> None:
    shards, again = tmp_path / "shards", tmp_path / "again"
    shutil.copytree(folder, shards)
    (shards / SINGLE_FILE).rename(shards / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(load_file(folder / SINGLE_FILE), "model-00001-of-00001.safetensors")
    (shards / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    again.mkdir()
    policy = load(shards)
    policy.save(again, policy.config)
    found = load(again).state_dict()
    assert all(torch.equal(found[name], value) for name, value in policy.state_dict().items())


def test_weights_that_do_not_fit_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["action_in_proj.weight"] = weights["action_in_proj.weight"][:, :2].contiguous()
    del weights["state_proj.bias"]
    save_file(weights | {"extra": torch.zeros(1)}, folder / "model.safetensors")
    expected = r"missing state_proj\.bias; unexpected extra; action_in_proj\.weight has shape \[64, 2\], expected"
    with pytest.raises(PolicyError, match=expected):
        load(folder)


def test_statistics_of_openpi_and_lerobot(folder: Path) -> None:
    policy = load(folder)
    wanted = json.loads((folder / "norm_stats.json").read_text())["norm_stats"]
    (folder / "norm_stats.json").unlink()
    own = {"observation.state": wanted["state"], "action": wanted["actions"]}
    flat = {f"{feature}.{name}": torch.tensor(values) for feature, part in own.items() for name, values in part.items()}
    assets = folder / "assets" / "lab" / "robot"
    assets.mkdir(parents=True)
    (assets / "norm_stats.json").write_text(json.dumps({"norm_stats": wanted}))
    save_file(flat, folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    with pytest.raises(PolicyError, match="several data sets: set unnorm_key to one of lab/robot, lerobot"):
        load(folder)
    for key in ("lab/robot", "lerobot"):
        assert torch.equal(load(folder, unnorm_key=key).actions.factor, policy.actions.factor)
    with pytest.raises(PolicyError, match=r"unnorm_key = 'lab/robott' - did you mean 'lab/robot'\?"):
        load(folder, unnorm_key="lab/robott")
    other = folder.parent / "stats.json"
    other.write_text(json.dumps(own))
    assert torch.equal(load(folder, statistics=str(other)).states.origin, policy.states.origin)


def test_statistics_of_padded_states_and_actions_are_cut(folder: Path, tmp_path: Path) -> None:
    inputs = load(folder).preprocess(observation())
    actions, draws = torch.rand(3, 4, 4) - 0.5, load(folder).imitation_draws(3, torch.Generator().manual_seed(0))
    wanted = [load(folder).act(inputs, "eval").actions, load(folder).sft_loss(inputs, actions, draws)]
    rewrite(folder / "norm_stats.json", pad)
    policy, again = load(folder), tmp_path / "again"
    again.mkdir()
    policy.save(again, policy.config)
    assert (again / "norm_stats.json").read_bytes() == (folder / "norm_stats.json").read_bytes()
    for place in (folder, again):
        cut, alone = load(place), load(place, simulator=None)
        assert (cut.spec.proprio_dim, cut.spec.action_dim) == (alone.spec.proprio_dim, alone.spec.action_dim) == (5, 4)
        seen = cut.preprocess(observation())
        assert all(torch.equal(seen[key], inputs[key]) for key in inputs)
        found = [cut.act(seen, "eval").actions, cut.sft_loss(seen, actions, draws)]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert torch.equal(alone.preprocess(observation())["state"], inputs["state"])


@pytest.mark.parametrize("name", ["mean", "std", "q01", "q99"])
def test_only_padding_is_cut(folder: Path, name: str) -> None:
    """One number of a further entry, and the entry is one of another robot."""
    rewrite(folder / "norm_stats.json", pad)
    rewrite(folder / "norm_stats.json", lambda content: content["norm_stats"]["state"][name].__setitem__(5, 0.1))
    with pytest.raises(PolicyError, match="statistics are of states with 6 numbers, the checkpoint takes 5"):
        load(folder)
    with pytest.raises(PolicyError, match="statistics are of states with 6 numbers, the checkpoint takes 5"):
        load(folder, simulator=None)


def test_padding_does_not_stand_for_numbers_that_the_simulator_has(folder: Path) -> None:
    """Zeros as width would make anything of a number that moves."""
    rewrite(
        folder / "norm_stats.json",
        lambda content: [numbers.pop() for numbers in content["norm_stats"]["actions"].values()],
    )
    rewrite(folder / "norm_stats.json", pad)
    with pytest.raises(PolicyError, match="statistics are of actions with 3 numbers, the simulator has 4"):
        load(folder)


def test_a_last_entry_without_mean_or_that_the_simulator_has_is_not_cut(folder: Path) -> None:
    def still(content: Any) -> None:
        for name, numbers in content["norm_stats"]["actions"].items():
            numbers[3] = 0.0 if name != "std" else 0.5

    rewrite(folder / "norm_stats.json", still)
    assert load(folder, simulator=None).spec.action_dim == load(folder).spec.action_dim == 4
    rewrite(folder / "norm_stats.json", lambda content: content["norm_stats"]["actions"]["std"].__setitem__(3, 0.0))
    assert load(folder).spec.action_dim == 4  # the simulator has four numbers, one of which never moved


def test_statistics_need_no_wrapper(folder: Path) -> None:
    wanted = load(folder)
    content = json.loads((folder / "norm_stats.json").read_text())["norm_stats"]
    (folder / "norm_stats.json").write_text(json.dumps(content))
    assert faults(folder) == ""
    found = load(folder)
    for one, other in ((found.states, wanted.states), (found.actions, wanted.actions)):
        assert torch.equal(one.origin, other.origin) and torch.equal(one.divisor, other.divisor)


DAMAGED_STATISTICS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a null": (
        lambda stats: stats["state"].update(q01=None),
        "state lacks q01 (has: mean, std, q99), which model.normalization = quantile needs: set model.statistics",
    ),
    "no state": (lambda stats: stats.pop("state"), "norm_stats.json has no entry 'state' (has: actions): set model."),
    "no actions": (lambda stats: stats.pop("actions"), "norm_stats.json has no entry 'actions' (has: state): set"),
    "a list for a state": (lambda stats: stats.update(state=[1.0]), "norm_stats.json has no entry 'state' (has: "),
    "one number for five": (
        lambda stats: stats["state"].update(q99=[1.0]),
        "norm_stats.json: state is damaged: mean has 5, std has 5, q01 has 5, q99 has 1 numbers",
    ),
    "a number for a list": (
        lambda stats: stats["actions"].update(q99=1.0),
        "norm_stats.json: actions.q99 is 1.0, a list of numbers was expected: download the file again",
    ),
    "nan": (
        lambda stats: stats["actions"]["q99"].__setitem__(2, float("nan")),
        "norm_stats.json: actions.q99[2] is nan, a finite number was expected: download the file again",
    ),
    "inf": (lambda stats: stats["state"]["mean"].__setitem__(0, float("inf")), "state.mean[0] is inf, a finite"),
    "a lower end above": (
        lambda stats: stats["actions"]["q01"].__setitem__(2, 70.0),
        "norm_stats.json: actions.q01[2] is 70.0, above q99, which is",
    ),
    "a word": (lambda stats: stats["state"]["q01"].__setitem__(4, "x"), "state.q01[4] is 'x', a finite number"),
    "yes": (lambda stats: stats["state"]["q01"].__setitem__(4, True), "state.q01[4] is True, a finite number"),
    "nothing": (
        lambda stats: stats["actions"].update({name: [] for name in stats["actions"]}),
        "norm_stats.json: actions has nothing but zeros",
    ),
}


@pytest.mark.parametrize(("change", "message"), DAMAGED_STATISTICS.values(), ids=DAMAGED_STATISTICS.keys())
def test_damaged_statistics_are_named_before_anything_starts(
    folder: Path, change: Callable[[Any], object], message: str
) -> None:
    rewrite(folder / "norm_stats.json", lambda content: change(content["norm_stats"]))
    told = faults(folder, "model.normalization=quantile")
    assert message in told and "model.checkpoint: norm_stats.json" in told
    with pytest.raises(PolicyError, match=re.escape(message)):
        load(folder, normalization="quantile")


def test_statistics_that_are_no_object_are_refused(folder: Path) -> None:
    (folder / "norm_stats.json").write_text('{"norm_stats": [1]}')
    message = "norm_stats.json: norm_stats is [1], a JSON object with state and actions was expected"
    assert f"model.checkpoint: {message}" in faults(folder)
    with pytest.raises(PolicyError, match=re.escape(message)):
        load(folder)


def test_what_is_not_looked_at_may_be_missing(folder: Path) -> None:
    rewrite(folder / "norm_stats.json", lambda content: content["norm_stats"].pop("state"))
    rewrite(folder / "norm_stats.json", lambda content: content["norm_stats"]["actions"].update(q01=None, q99=None))
    assert faults(folder, "model.state=none") == ""
    assert load(folder, state="none").spec.proprio_dim == 0
    message = "actions lacks q01, q99 (has: mean, std), which model.normalization = quantile needs"
    assert message in faults(folder, "model.state=none", "model.normalization=quantile")
    assert "has no entry 'state'" in faults(folder, "model.state=none", "model.relative_action_dims=2")


DAMAGED_CONFIGS: dict[str, tuple[Callable[[Any], object], str]] = {
    "no text_config": (
        lambda config: config["vlm_config"].pop("text_config"),
        "config.json: vlm_config lacks text_config (has: vision_config): download the file again",
    ),
    "no vision_config": (lambda config: config["vlm_config"].pop("vision_config"), "vlm_config lacks vision_config"),
    "vlm_config a list": (lambda config: config.update(vlm_config=[]), "vlm_config is [], a JSON object was expected"),
    "a word": (lambda config: config.update(chunk_size="x"), "config.json: chunk_size is 'x', a whole number from 1"),
    "zero": (lambda config: config.update(max_action_dim=0), "max_action_dim is 0, a whole number from 1 on was"),
    "half": (lambda config: config.update(max_state_dim=4.5), "max_state_dim is 4.5, a whole number from 1 on was"),
    "no head_dim": (
        lambda config: config["vlm_config"]["text_config"].pop("head_dim"),
        "config.json lacks vlm_config.text_config.head_dim",
    ),
    "no layers": (lambda config: config["dit_config"].pop("num_hidden_layers"), "lacks dit_config.num_hidden_layers"),
    "heads": (
        lambda config: config["dit_config"].update(num_key_value_heads=3),
        "dit_config.num_key_value_heads is 3, a divisor of 4 heads was expected",
    ),
    "no patches": (
        lambda config: config["vlm_config"]["vision_config"].pop("patch_size"),
        "config.json lacks vlm_config.vision_config.patch_size",
    ),
    "no list": (lambda config: config.update(image_resolution=224), "image_resolution is 224, a list of two sides"),
    "no size": (
        lambda config: config.update(image_resolution=["x", "y"]),
        "image_resolution[0] is 'x', a whole number from 1 on was expected",
    ),
    "features": (lambda config: config.update(input_features=["a"]), "input_features is ['a'], a JSON object was"),
    "a feature": (
        lambda config: config["input_features"].update({"observation.images.front": "VISUAL"}),
        "input_features.observation.images.front is 'VISUAL', a JSON object was expected",
    ),
}


@pytest.mark.parametrize(("change", "message"), DAMAGED_CONFIGS.values(), ids=DAMAGED_CONFIGS.keys())
def test_a_damaged_config_is_named_before_anything_starts(
    folder: Path, change: Callable[[Any], object], message: str
) -> None:
    rewrite(folder / "config.json", change)
    assert message in faults(folder)
    with pytest.raises(PolicyError, match=re.escape(message)):
        load(folder)


def test_a_missing_tokenizer_is_said_with_the_remedy(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder.parent / "tokenizer.json")
    with pytest.raises(PolicyError, match=r"put PaliGemma's tokenizer into its folder, or set model\.tokenizer"):
        load(folder)
    policy = load(folder, tokenizer=str(folder.parent / "tokenizer.json"))
    assert policy.prompts.ids("push the cube")[0] == 1
    with pytest.raises(PolicyError, match=r"model\.tokenizer = .* is no file called tokenizer\.json or"):
        load(folder, tokenizer=str(folder))


def test_a_sentencepiece_model_tokenizes(folder: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "tokenizer.json").unlink()
    model = io.BytesIO()
    lines = [f"push the red cube number {number}" for number in range(50)] + ["pull it back"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        user_defined_symbols=["\n"],
        add_dummy_prefix=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = load(folder, prompt_length=60).prompts.ids(" push_the red\ncube ")
    assert ids == [2, *pieces.encode("push the red cube"), *pieces.encode("\n")]


def test_padding_changes_nothing_and_a_prompt_that_is_too_long_is_refused() -> None:
    short, long = scratch(), scratch(prompt_length=30)
    long.load_state_dict(short.state_dict())
    found = [policy.act(policy.preprocess(observation()), "eval").actions for policy in (short, long)]
    torch.testing.assert_close(*found, atol=1e-6, rtol=0)
    with pytest.raises(PolicyError, match=r"a prompt has 5 tokens, the model takes 4: set model\.prompt_length"):
        scratch(prompt_length=4)


def test_the_state_is_written_into_the_prompt_of_pi05_alone() -> None:
    seen = scratch("pi05")
    batch = observation(2)
    changed = dataclasses.replace(batch, proprio=batch.proprio + 0.5)
    for policy, sees in ((seen, True), (scratch("pi05", state=StateInput.none), False)):
        ids = [policy.preprocess(each)["input_ids"] for each in (batch, changed)]
        actions = [policy.act(policy.preprocess(each), "eval").actions for each in (batch, changed)]
        assert torch.equal(*ids) is not sees and torch.equal(*actions) is not sees
    for name in ("pi0", "pi05"):
        blind = scratch(name, state=StateInput.none, relative_action_dims=2)
        states = [blind.preprocess(each)["state"] for each in (batch, changed)]
        assert blind.spec.proprio_dim == 5 and not any(bool(state.any()) for state in states)
    no_state = PolicyObservation(images=batch.images, task_descriptions=batch.task_descriptions)
    assert scratch("pi05", state=StateInput.none).preprocess(no_state)["state"].abs().max() == 0
    with pytest.raises(PolicyError, match="needs a state of 5 numbers, the observation has none"):
        seen.preprocess(no_state)


STEPS = ["rename_observations_processor", "normalizer_processor", "pi05_prepare_state_tokenizer_processor_step"]
"""What LeRobot 0.4 does to an observation of pi0.5, as far as it matters here."""


def write_steps(folder: Path, *names: str) -> None:
    """Write LeRobot's list of steps."""
    steps = [{"registry_name": name, "config": {}} for name in names]
    (folder / "policy_preprocessor.json").write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))


@pytest.fixture
def narrow(tmp_path: Path) -> Path:
    """A checkpoint of pi0.5 by openpi that takes 8 numbers, of which the robot has 5; it knows how to write all."""
    policy, place = scratch("pi05"), tmp_path / "pi05"
    place.mkdir()
    policy.save(place, policy.config)
    (place / "policy.json").unlink()  # nobody saved it here
    rewrite(place / "config.json", lambda content: content.update(max_state_dim=8, tokenizer_max_length=20))
    weights = load_file(place / "model.safetensors")
    save_file(weights, place / "model.safetensors")
    return place


def by_lerobot(folder: Path, *steps: str) -> Path:
    """The same checkpoint as LeRobot writes it."""
    weights = load_file(folder / "model.safetensors")
    save_file({f"model.{key}": value for key, value in weights.items()}, folder / "model.safetensors")
    write_steps(folder, *steps)
    return folder


def load_pi05(folder: Path, **options: Any) -> Any:
    return load_policy("pi05", checkpoint=folder, simulator=SPEC, chunk_size=4, **{"value_sizes": [8]} | options)


def text_of(policy: Any) -> str:
    """The prompt of an observation whose state lies in the middles of five steps."""
    from tokenizers import Tokenizer

    proprio = torch.tensor([[0.004, 0.504, -0.996, 0.996, 0.004]])
    batch = dataclasses.replace(observation(1), proprio=proprio)
    inputs = policy.preprocess(batch)
    ids = inputs["input_ids"][0][inputs["attention_mask"][0]].tolist()
    return str(Tokenizer.from_str(policy.files.tokenizer[1].decode()).decode(ids, skip_special_tokens=False))


OWN, PADDED = "128 192 0 255 128;", "128 192 0 255 128 128 128 128;"


@pytest.mark.parametrize(
    ("steps", "config", "written"),
    [
        (STEPS, {}, PADDED),
        (STEPS[:2], {}, OWN),
        ([*STEPS, "delta_actions_processor"], {}, OWN),
        ([*STEPS, "relative_actions_processor"], {}, OWN),
        (STEPS, {"use_relative_actions": False}, OWN),
    ],
    ids=["0.4", "no state", "0.5.1", "0.6", "list of 0.4, trained with 0.6"],
)
def test_the_state_in_a_prompt_is_written_as_the_checkpoint_s_lerobot_did(
    narrow: Path, steps: list[str], config: dict[str, Any], written: str
) -> None:
    assert OWN in text_of(load_pi05(narrow)), "as openpi writes it"
    by_lerobot(narrow, *steps)
    rewrite(narrow / "config.json", lambda content: content.update(config))
    policy = load_pi05(narrow)
    assert f"State: {written}" in text_of(policy)
    assert f"State: {OWN}" in text_of(load_pi05(narrow, padded_state=False))
    assert f"State: {PADDED}" in text_of(load_pi05(narrow, padded_state=True))


@torch.inference_mode()
def test_denoising_times_are_those_of_whoever_wrote_the_weights(narrow: Path) -> None:
    def denoised(policy: Any, times: list[float]) -> torch.Tensor:
        inputs = policy.preprocess(observation())
        condition, x = policy.condition(inputs), policy.start.expand(3, -1, -1)
        for time in times:
            at = torch.full((3,), time, dtype=torch.float32)
            x = x - 0.1 * policy.denoise(condition, x, at).velocity
        return x

    lerobots = [1.0 - step * 0.1 for step in range(10)]  # in Python's float64
    openpis = [torch.tensor(1.0)]
    for _ in range(9):
        openpis.append(openpis[-1] + torch.tensor(-0.1))
    summed = [float(time) for time in openpis]
    reached = {}
    for name, times in (("summed", summed), ("divided", lerobots)):
        policy = load_pi05(narrow, denoising_times=name)
        reached[name] = policy.act(policy.preprocess(observation()), "eval").trace["chain"][:, -1]
        torch.testing.assert_close(reached[name], denoised(policy, times), atol=2e-6, rtol=0)
    assert not torch.equal(reached["summed"], reached["divided"])
    assert load_pi05(narrow).config.denoising_times == "summed"
    assert load_pi05(by_lerobot(narrow, *STEPS)).config.denoising_times == "divided"


def test_a_saved_policy_keeps_prompts_and_times_whatever_its_files_say(narrow: Path, tmp_path: Path) -> None:
    chosen = load_pi05(narrow, padded_state=True, denoising_times="divided")
    again, older = tmp_path / "again", tmp_path / "older"
    again.mkdir()
    chosen.save(again, dataclasses.replace(chosen.config, padded_state=None, denoising_times=None))
    actions = chosen.act(chosen.preprocess(observation()), "eval").actions
    kept = load_pi05(again)
    assert f"State: {PADDED}" in text_of(kept) and kept.config.denoising_times == "divided"
    assert torch.equal(kept.act(kept.preprocess(observation()), "eval").actions, actions)
    fresh = build_policy(
        dataclasses.replace(chosen.config, checkpoint=str(again), padded_state=None, denoising_times=None),
        SPEC,
        chunk_size=4,
        seed=0,
    )
    assert f"State: {PADDED}" in text_of(fresh), "a new run from there goes on so"
    assert f"State: {OWN}" in text_of(load_pi05(again, padded_state=False))
    shutil.copytree(by_lerobot(again, *STEPS), older)  # a policy that was saved here before there was a choice
    rewrite(older / "policy.json", lambda content: [content["options"].pop(name) for name in ("padded_state",)])
    rewrite(older / "policy.json", lambda content: [content["options"].pop(name) for name in ("denoising_times",)])
    before = load_pi05(older)
    assert f"State: {OWN}" in text_of(before) and before.config.denoising_times == "summed"


def test_validate_says_how_prompts_and_times_go(narrow: Path) -> None:
    given = ["env=gym/pendulum_rgb", "model=pi05", f"model.checkpoint={narrow}", "model.cameras=[render,absent]"]

    def said(*settings: str) -> list[str]:
        return checkpoint_notes(load_config("gym_cartpole", [*given, "rollout.chunk_size=4", *settings]).config)

    rewrite(narrow / "norm_stats.json", shorten)
    assert said() == [
        "the state in the prompt is the robot's own numbers, as openpi and LeRobot since 0.5 write it (by the "
        "checkpoint's files; model.padded_state changes it)",
        "denoising times add up -1/10 in float32, as openpi's (by the checkpoint's files; model.denoising_times "
        "changes it)",
        "states are normalised by quantile, actions by quantile (by the checkpoint's files; model.normalization "
        "changes it)",
    ]
    by_lerobot(narrow, *STEPS)
    padded, divided, _ = said("model.denoising_steps=4")
    assert padded.startswith(
        "the state in the prompt is filled up to 8 numbers, as LeRobot 0.4 does (by the checkpoint's"
    )
    assert divided.startswith("denoising times are 1 - i/4, as LeRobot's since 0.4.3 (by the checkpoint's files")
    assert said("model.padded_state=false")[0].endswith("(model.padded_state)")
    assert said("model.state=none")[1].startswith("actions are normalised by quantile (by the") and len(said()) == 3
    rewrite(narrow / "config.json", lambda content: content.update(n_action_steps=2))
    assert said()[3].startswith("the checkpoint was evaluated with 2 actions per chunk (n_action_steps), here 4 are")
    with pytest.raises(ConfigError, match=r"a prompt has 1[0-9] tokens, the model takes 12"):
        said("model.prompt_length=12", "env.task_descriptions.Pendulum-v1=push the cube")
    (narrow / "policy_preprocessor.json").write_text('{"steps": 3}')
    with pytest.raises(ConfigError, match=r"policy_preprocessor\.json: steps is 3, a list of steps was expected"):
        said()


NUMBERS = {"mean": 0.2, "std": 0.6, "q01": -0.1, "q99": 1.9, "min": -0.5, "max": 2.5, "q10": 0.0, "q90": 1.5}
"""Statistics of each number of a state and an action."""
WAYS = {"MEAN_STD": 0.8, "QUANTILES": 1.9, "MIN_MAX": 2.5, "QUANTILE10": 1.5, "IDENTITY": 1.0}
"""What LeRobot makes of an output of 1, by these statistics."""


def by_ways(folder: Path, mapping: Any = None, before: Any = None, after: Any = None) -> Path:
    """The same checkpoint with LeRobot's statistics, and the ways of normalisation that its three files state."""
    (folder / "norm_stats.json").unlink(missing_ok=True)
    own = {"observation.state": 5, "action": 4}
    content = {name: {key: [one] * size for key, one in NUMBERS.items()} for name, size in own.items()}
    (folder / "stats.json").write_text(json.dumps(content))
    rewrite(folder / "config.json", lambda config: config.update(normalization_mapping=mapping))
    if mapping is None:
        rewrite(folder / "config.json", lambda config: config.pop("normalization_mapping"))
    for file, name, ways in (("pre", "normalizer", before), ("post", "unnormalizer", after)):
        steps = [{"registry_name": f"{name}_processor", "config": {} if ways is None else {"norm_map": ways}}]
        (folder / f"policy_{file}processor.json").write_text(json.dumps({"steps": steps}))
    return folder


def scales(folder: Path, **options: Any) -> Any:
    """Normalisation of states and actions, without building a network."""
    config = Pi05Config(name="pi05", **options)
    files = CheckpointFiles.read(dataclasses.replace(config, checkpoint=str(folder)))
    return robot_of(files.statistics["lerobot"], config, files, SimulatorSizes(proprio=5, action=4))


def test_states_and_actions_are_normalised_as_lerobots_files_say(narrow: Path) -> None:
    """Either file alone, or all of them, as LeRobot writes them."""
    faults = []
    for way, wanted in WAYS.items():
        stated = {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ACTION": way}
        for files in ((stated,), (None, stated), (stated, stated, {"ACTION": way})):
            robot = scales(by_ways(narrow, *files), state=StateInput.prompt)
            output = ((1.0 + robot.actions.shift) * robot.actions.factor + robot.actions.origin).tolist()
            state = ((2.5 - robot.states.origin) / robot.states.divisor - robot.states.shift).tolist()
            if output != pytest.approx([wanted] * 4) or state != pytest.approx([1.0] * 5):
                faults.append((way, len(files), output, state))
    assert not faults
    policy = load_pi05(by_ways(narrow, {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}))
    assert policy.actions.unnormalize(torch.ones(4)).tolist() == pytest.approx([0.8] * 4)
    assert policy.states.normalize(torch.full((5,), 0.8)).tolist() == pytest.approx([1.0] * 5)
    assert scales(narrow, normalization=Normalization.zscore).actions.factor[0] == pytest.approx(0.6)


def test_ways_of_normalisation_that_contradict_each_other_are_refused(narrow: Path) -> None:
    both, other = {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}, {"STATE": "MEAN_STD", "ACTION": "QUANTILES"}
    rows: tuple[tuple[tuple[Any, ...], dict[str, Any], str], ...] = (
        (
            (both, other),
            {},
            "config.json: normalization_mapping says that ACTION is normalised by MEAN_STD, policy",
        ),
        ((both, both, {}), {}, "ACTION is normalised by MEAN_STD, policy_postprocessor.json: norm_map by IDENTITY"),
        ((None, both, other), {}, "policy_preprocessor.json: norm_map says that ACTION"),
        ((both,), {"normalization": Normalization.quantile}, "set model.normalization to zscore"),
        (({**both, "STATE": "MIN_MAX"},), {"normalization": Normalization.zscore}, "STATE was normalised by MIN_MAX"),
        (({**both, "VISUAL": "MEAN_STD"},), {}, "normalization_mapping.VISUAL is MEAN_STD, but this model reads"),
        (({**both, "STATE": ["MEAN_STD"]},), {}, "normalization_mapping.STATE is ['MEAN_STD'], which is not"),
        (("MEAN_STD",), {}, "normalization_mapping is 'MEAN_STD', a JSON object was expected"),
        ((None, [3]), {}, "policy_preprocessor.json: norm_map is [3], a JSON object was expected"),
    )
    faults = []
    for files, options, wanted in rows:
        by_ways(narrow, *files)
        with pytest.raises(PolicyError) as caught:
            scales(narrow, **options)
        faults += [] if wanted in str(caught.value) else [(wanted, str(caught.value))]
    assert not faults


def test_actions_relative_to_the_state_need_the_option(narrow: Path) -> None:
    """LeRobot 0.5.1 and later train them; the option says how many dims are."""
    both = {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    folder = by_ways(narrow, both, both, both)
    rewrite(folder / "config.json", lambda config: config.update(use_relative_actions=False))
    scales(folder)
    steps = folder / "policy_preprocessor.json"
    step = {"registry_name": "relative_actions_processor", "config": {"enabled": False}}
    rewrite(steps, lambda content: content["steps"].insert(0, step))
    scales(folder)
    rewrite(steps, lambda content: content["steps"][0]["config"].update(enabled=True))
    with pytest.raises(PolicyError, match=r"relative_actions_processor\.enabled is true"):
        scales(folder)
    rewrite(folder / "config.json", lambda config: config.update(use_relative_actions=True))
    with pytest.raises(PolicyError, match="use_relative_actions is true: actions are offsets"):
        load_pi05(folder)
    scales(folder, relative_action_dims=3)


def shorten(content: Any) -> None:
    """Statistics of Pendulum's robot: three numbers and one action."""
    for name, length in (("state", 3), ("actions", 1)):
        columns = content["norm_stats"][name]
        columns.update({key: numbers[:length] for key, numbers in columns.items()})


def test_cameras_are_matched_by_name(folder: Path) -> None:
    batch = observation()
    swapped = dataclasses.replace(batch, images=batch.images.flip(1))
    policy, other = load(folder), load(folder, cameras=["hand", "front"])
    assert torch.equal(
        policy.act(policy.preprocess(batch), "eval").actions, other.act(other.preprocess(swapped), "eval").actions
    )
    one = dataclasses.replace(SPEC, cameras=("front",))
    with pytest.raises(PolicyError, match=r"expects 2 images \(front, hand\), named: 1 \(front\)"):
        load(folder, simulator=one)
    absent = load(folder, simulator=one, cameras=["front", "absent"])
    alone = dataclasses.replace(batch, images=batch.images[:, :1])
    assert absent.preprocess(alone)["pixel_values"].shape[1] == 1
    with pytest.raises(PolicyError, match=r"env\.cameras has no 'hnd' - did you mean 'hand'\? \(has: front, hand\)"):
        load(folder, cameras=["front", "hnd"])
    with pytest.raises(PolicyError, match=r"does not use hand: remove it from env\.cameras"):
        load(folder, cameras=["front", "absent"])


def test_an_absent_camera_is_what_a_masked_image_is() -> None:
    policy = scratch()
    inputs = policy.preprocess(observation())
    there = torch.tensor([[True, False]] * 3)
    masked = policy.network.read(inputs["pixel_values"], there, inputs["input_ids"], inputs["attention_mask"])
    left_out = policy.network.read(
        inputs["pixel_values"][:, :1], there[:, :1], inputs["input_ids"], inputs["attention_mask"]
    )
    x, time = torch.randn(3, 4, 4), torch.full((3,), 0.5)
    velocities = [policy.network(prefix, x, time, inputs["state"])[0] for prefix in (masked, left_out)]
    torch.testing.assert_close(*velocities, atol=1e-6, rtol=0)


def test_a_chunk_longer_than_the_horizon_is_refused(folder: Path) -> None:
    with pytest.raises(PolicyError, match=r"rollout\.chunk_size = 5, but the checkpoint gives 4 actions at once: set"):
        load(folder, chunk_size=5)
    assert load(folder, chunk_size=2).act(load(folder).preprocess(observation()), "eval").actions.shape == (3, 2, 4)


def test_a_state_that_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(PolicyError, match="statistics are of states with 5 numbers, the simulator has 6"):
        load(folder, simulator=dataclasses.replace(SPEC, proprio_dim=6))


def test_a_checkpoint_of_the_other_model_is_refused(folder: Path) -> None:
    with pytest.raises(PolicyError, match="is that of a 'pi0' model"):
        load_policy("pi05", checkpoint=folder, simulator=SPEC, chunk_size=4)
    (folder / "config.json").write_text('{"model_type": "gr00t_n1_5"}')
    with pytest.raises(PolicyError, match="is that of a 'gr00t' model"):
        load(folder)


def test_frozen_parts_learn_nothing_and_cost_no_gradient() -> None:
    frozen = type(scratch().config.frozen)
    for choice, still in ((frozen.vision, ("vision.",)), (frozen.language, ("vision.", "language.", "embed_tokens."))):
        policy = scratch(frozen=choice)
        inputs = policy.preprocess(observation())
        policy.sft_loss(inputs, torch.zeros(3, 4, 4), policy.imitation_draws(3, torch.Generator())).backward()
        learned = {name for name, parameter in policy.network.named_parameters() if parameter.grad is not None}
        assert learned and not any(name.startswith(still) for name in learned)


def test_a_noise_network_and_a_critic_are_kept_beside_the_public_weights(tmp_path: Path) -> None:
    policy = scratch(noise_method=NoiseMethod.flow_noise)
    policy.save(tmp_path, policy.config)
    other = load(tmp_path, noise_method="flow_noise")
    for one, two in ((policy.noise_network, other.noise_network), (policy.value_head, other.value_head)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not any("noise" in key for key in load_file(tmp_path / "model.safetensors"))
    load(tmp_path)  # without a noise network of its own
    saved = Pi05Config(name="pi05", checkpoint=str(tmp_path))
    assert CheckpointFiles.read(saved).companions.keys() == {
        "norm_stats.json",
        "tokenizer.json",
        "policy.json",
    }


def test_the_plan_names_layers_that_exist() -> None:
    policy = scratch()
    modules, plan = dict(policy.named_modules()), policy.parallel_plan()
    assert len(plan.blocks) == 6 and all(name in modules for name in plan.blocks)
    assert len(plan.adaptable) == 2 * 7 and all(isinstance(modules[name], torch.nn.Linear) for name in plan.adaptable)


def faults(folder: Path, *settings: str) -> str:
    """What is said about a config of this checkpoint."""
    robot = ["env.tasks=[EmbodyrlArm-v0]", "env.kwargs={states: 5, actions: 4}", "env.success_return=null"]
    model = ["model=pi0", f"model.checkpoint={folder}", "model.cameras=[render,absent]"]
    given = ["env=gym/pendulum_rgb", *([] if any(word.startswith("env=") for word in settings) else robot), *model]
    try:
        load_config("gym_cartpole", [*given, "rollout.chunk_size=4", *settings])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["model.unnorm_key=opnpi"],
            "model.unnorm_key: the checkpoint has no statistics of unnorm_key = 'opnpi'",
        ),
        (
            ["model.cameras=[]"],
            "the checkpoint expects 2 images (front, hand), named: 1 (render)",
        ),
        (["rollout.chunk_size=5"], "rollout.chunk_size = 5, but the checkpoint gives 4 actions at once"),
        (["model.tokenizer=nowhere.json"], "model.tokenizer = 'nowhere.json' is no file called tokenizer.json or"),
        (
            ["model.frozen=language", "engine.lora.rank=2"],
            "engine.lora.rank = 2 puts adapters around the language model, which model.frozen = language leaves",
        ),
        (["model=pi05"], "config.json is that of a 'pi0' model: set model.name to that one"),
    ],
)
def test_a_config_is_checked_against_its_checkpoint(folder: Path, settings: list[str], message: str) -> None:
    assert faults(folder) == ""
    assert message in faults(folder, *settings)


def test_more_relative_action_dims_than_numbers_are_found_before_anything_starts(folder: Path) -> None:
    robot = load(folder)
    most = min(len(robot.states), len(robot.actions))
    assert "model.relative_action_dims" not in faults(folder, f"model.relative_action_dims={most}")
    assert f"model.relative_action_dims = {most + 1}, but a state has" in faults(
        folder, f"model.relative_action_dims={most + 1}"
    )
    with pytest.raises(PolicyError, match="relative_action_dims"):
        load(folder, relative_action_dims=most + 1)


def test_weights_of_the_other_model_are_told_where_the_config_says_nothing(folder: Path) -> None:
    rewrite(folder / "config.json", lambda content: [content.pop(key, None) for key in ("type", "model_type")])
    assert "model.name" not in faults(folder)
    assert "are those of pi0, but model.name is pi05 - set model.name to pi0" in faults(folder, "model=pi05")


def test_task_descriptions_and_tokenizers_that_do_not_fit_are_found_before_anything_starts(
    folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("metaworld", reason="MetaWorld is not installed")
    told = ["env=metaworld/reach_rgb", "env.cameras=[corner2]", "model.cameras=[corner2,absent]"]
    short = faults(folder, *told, "model.prompt_length=2")
    assert "tokens, the model takes 2: set model.prompt_length to" in short and "'reach the goal position'" in short
    long = faults(folder, *told, "model.prompt_length=2", f"env.task_descriptions.reach-v3={'very ' * 30}far")
    assert "shorten 'very very very very" in long and "..." in long
    other = tmp_path / "other" / "tokenizer.json"
    other.parent.mkdir()
    vocabulary = {"type": "WordLevel", "vocab": {"reach": 0}, "unk_token": "reach"}
    other.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": vocabulary}))
    assert "model.tokenizer: tokenizer.json is not PaliGemma's, it has no token <bos>" in faults(
        folder, f"model.tokenizer={other}"
    )
    other.write_text("{")
    assert "model.tokenizer: tokenizer.json cannot be read" in faults(folder, f"model.tokenizer={other}")


def test_a_simulator_whose_state_is_known_before_it_starts(folder: Path) -> None:
    metaworld = ["env=metaworld/reach_rgb", "model.cameras=[corner4,absent]"]
    assert "statistics are of states with 5 numbers, the simulator has 4" in faults(folder, *metaworld)
    assert faults(folder, *metaworld, "model.state=none") == ""


def test_actions_of_another_robot_are_found_before_anything_starts(folder: Path) -> None:
    metaworld = ["env=metaworld/reach_rgb", "model.cameras=[corner4,absent]", "model.state=none"]
    assert faults(folder, *metaworld) == ""
    rewrite(folder / "norm_stats.json", pad)
    assert faults(folder, *metaworld) == faults(folder) == ""
    for count, message in ((3, "the simulator has 4"), (5, "the simulator has 4"), (5, "the checkpoint takes 4")):
        columns = {"mean": [0.5] * count, "std": [1.0] * count}
        rewrite(folder / "norm_stats.json", lambda content: content["norm_stats"].update(actions=columns))  # noqa: B023
        assert f"the statistics are of actions with {count} numbers, {message}" in faults(folder, *metaworld)
    assert "the statistics are of actions with 5 numbers, the checkpoint takes 4" in faults(folder)
    with pytest.raises(PolicyError, match="statistics are of actions with 5 numbers, the checkpoint takes 4: choose"):
        load(folder)


@pytest.mark.parametrize(
    ("cameras", "said"),
    [("[wrist]", "env.cameras has no 'wrist' (has: render)"), ("[absent]", "leaves no image")],
)
def test_a_model_from_nothing_looks_through_cameras_that_there_are(cameras: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("gym_cartpole", ["env=gym/pendulum_rgb", "model=pi0", f"model.cameras={cameras}"])
    assert said in str(caught.value)


def test_statistics_for_random_weights_are_checked_before_anything_starts(folder: Path) -> None:
    random = ["env=metaworld/reach_rgb", "model.cameras=[]", "model.checkpoint=null"]
    given = [*random, f"model.statistics={folder / 'norm_stats.json'}"]
    assert "the statistics are of states with 5 numbers, the simulator has 4" in faults(folder, *given)
    assert faults(folder, *given, "model.state=none") == ""
    rewrite(folder / "norm_stats.json", lambda content: content["norm_stats"]["actions"].update(mean=[0.0]))
    message = "model.statistics: norm_stats.json: actions is damaged: mean has 1, std has 4"
    assert message in faults(folder, *given, "model.state=none")


def test_states_longer_than_the_checkpoint_takes_are_found_before_anything_starts(folder: Path) -> None:
    content = json.loads((folder / "norm_stats.json").read_text())
    content["norm_stats"]["state"] = {"mean": [0.0] * 6, "std": [1.0] * 6}
    (folder / "norm_stats.json").write_text(json.dumps(content))
    told = faults(folder, "rollout.chunk_size=5")
    assert "statistics are of states with 6 numbers, the checkpoint takes 5" in told and "gives 4 actions" in told
    (folder / "model.safetensors").unlink()
    assert "holds neither model.safetensors.index.json nor model.safetensors" in faults(folder)


def test_heads_that_share_keys_attend_as_heads_with_copies_of_them_do() -> None:
    sizes = GemmaSizes(width=12, layers=1, mlp=8, heads=6, kv_heads=2, head_dim=4)
    attention, x = Attention(sizes), torch.randn(2, 5, 12)
    mask = torch.rand(2, 1, 5, 5) < 0.7
    mask[..., 0] = True
    rotation = Rotation(torch.arange(5).expand(2, -1), 4, x.dtype)
    queries, keys, values = (
        layer(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    copies = [part.repeat_interleave(3, dim=1) for part in (rotation(keys), values)]
    weights = (rotation(queries) @ copies[0].transpose(2, 3) / 2.0).masked_fill(~mask, -torch.inf).softmax(-1)
    wanted = attention.o_proj((weights @ copies[1]).transpose(1, 2).flatten(2))
    found = attention(attention.queries(x, rotation), attention.keys_values(x, rotation), stacked(mask, 3))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
