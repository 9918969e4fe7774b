"""SmolVLA: what traces keep, horizons, rows alone and together, files, adapters, and configs against checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the extra vla")

from embodyrl.config import ConfigError, load_config
from embodyrl.config.rules import checkpoint_notes
from embodyrl.config.schema import LoraConfig, PipelineConfig
from embodyrl.engine.lora import adapted_layers, add_adapters
from embodyrl.models import PolicyError, PolicyObservation, build_policy, load_policy
from embodyrl.models.flow.config import NoiseMethod
from embodyrl.models.policy import ACTION_WEIGHTS
from embodyrl.models.smolvla.config import ScratchConfig, SmolVLAConfig
from embodyrl.models.vla.config import Frozen, StateInput, WeightType
from embodyrl.rollout.needs import images_are_read
from tests.models.test_pi import SPEC, observation

SHAPE = ScratchConfig(image_size=32, layers=2, vision_layers=1, patch_size=8, shuffle=2)
METHODS: dict[NoiseMethod, dict[str, Any]] = {
    NoiseMethod.flow_sde: {"noise_level": 0.5},
    NoiseMethod.flow_cps: {"noise_level": 0.3},
    NoiseMethod.flow_noise: {"joint_logprob": True},
}


def options(**changes: Any) -> SmolVLAConfig:
    given = {"name": "smolvla", "denoising_steps": 3, "value_sizes": [8], "scratch": SHAPE}
    return SmolVLAConfig(**given | {"frozen": Frozen.nothing} | changes)


def scratch(*, chunk_size: int = 4, seed: int = 1, **changes: Any) -> Any:
    return build_policy(options(**changes), SPEC, chunk_size=chunk_size, seed=seed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved policy whose horizon is longer than a chunk."""
    folder = tmp_path_factory.mktemp("saved")
    scratch(horizon=7).save(folder, options(horizon=7))
    return folder


def loaded(saved: Path, **changes: Any) -> Any:
    config = options(checkpoint=str(saved), **{"frozen": Frozen.language} | changes)
    return build_policy(config, SPEC, chunk_size=4, seed=2)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


# ---- what traces keep


@pytest.mark.parametrize("method", METHODS)
def test_what_the_trace_keeps_of_images_is_as_good_as_images(saved: Path, method: NoiseMethod) -> None:
    policy = loaded(saved, noise_method=method, **METHODS[method])
    assert policy.trace_holds_images
    seen = observation()
    inputs = policy.preprocess(seen)
    with torch.no_grad():
        acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
    assert acted.trace["seen"].shape == (3, 2, 4, 64)
    seen.images = None
    without = policy.preprocess(seen)
    assert "pixel_values" not in without
    from_trace = policy.evaluate(without, acted.trace)
    close(from_trace.logprobs, acted.logprobs)
    close(from_trace.values, acted.values)
    again = {name: each for name, each in acted.trace.items() if name != "seen"}
    from_images = policy.evaluate(inputs, again)
    for name in ("logprobs", "values", "entropy"):
        close(getattr(from_trace, name), getattr(from_images, name), 1e-6)

    def gradient(output: Any) -> torch.Tensor:
        policy.zero_grad()
        (output.logprobs.sum() + output.values.sum()).backward()
        return torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None])

    close(gradient(from_trace), gradient(from_images), 1e-6)
    assert policy.network.state_proj.weight.grad is not None  # through the language model, which is frozen
    with pytest.raises(PolicyError, match="the model needs images"):
        policy.act(without, "eval")


def test_a_trace_in_16_bits_is_kept_as_numpy_can(saved: Path) -> None:
    policy = loaded(saved, dtype=WeightType.bfloat16)
    seen = observation()
    inputs = policy.preprocess(seen)
    with torch.no_grad():
        acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
    assert acted.trace["seen"].dtype is torch.int16
    kept = {name: torch.from_numpy(each.numpy().copy()) for name, each in acted.trace.items()}
    close(policy.evaluate(inputs, kept).logprobs, acted.logprobs)


def test_a_model_that_learns_to_see_keeps_images(saved: Path) -> None:
    for frozen in (Frozen.vision, Frozen.nothing):
        policy = loaded(saved, frozen=frozen)
        assert not policy.trace_holds_images
        assert "seen" not in policy.act(policy.preprocess(observation()), "eval").trace
        blind = observation()
        blind.images = None
        with pytest.raises(PolicyError, match="the model needs images"):
            policy.preprocess(blind)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["algorithm=grpo"], False),
        (["algorithm=dapo"], False),
        (["algorithm=srpo"], True),
    ],
)
def test_who_else_reads_images_is_known(words: list[str], wanted: bool) -> None:
    groups = ["env.success_return=-105.0", "rollout.episodes=whole", "rollout.group_size=4"]
    config = load_config("gym_pendulum", [*groups, *words]).config
    assert images_are_read(config) is wanted
    other = dataclasses.replace(config, pipeline=PipelineConfig(function="mine:stages"))
    assert images_are_read(other)


# ---- numbers that must not depend on what is beside them


@pytest.mark.parametrize("every", [0, 1, 2])
def test_actions_do_not_depend_on_later_ones(tmp_path: Path, every: int) -> None:
    shape = ScratchConfig(image_size=32, layers=3, vision_layers=1, self_attention_every=every)
    scratch(horizon=7, scratch=shape).save(tmp_path, options(horizon=7, scratch=shape))
    short, long = loaded(tmp_path), loaded(tmp_path, horizon=7)
    assert short.start.shape[0] == 4 and long.start.shape[0] == 7
    inputs = short.preprocess(observation())
    first, second = (policy.act(inputs, "eval") for policy in (short, long))
    close(first.actions, second.actions)
    close(first.values, second.values)
    trace = long.act(inputs, "train", torch.Generator().manual_seed(0)).trace
    cut = trace | {"chain": trace["chain"][:, :, :4]}
    for name in ("logprobs", "values"):
        close(getattr(short.evaluate(inputs, cut), name), getattr(long.evaluate(inputs, trace), name))


def test_a_row_alone_is_as_in_a_batch_however_long_its_neighbours(saved: Path) -> None:
    policy = loaded(saved)
    seen = observation(2)
    together = policy.act(policy.preprocess(seen), "eval")
    for row in range(2):
        alone = PolicyObservation(
            images=seen.images[row : row + 1],
            proprio=seen.proprio[row : row + 1],
            task_descriptions=[seen.task_descriptions[row]],
        )
        for length in (None, 12):  # as in the checkpoint, and padded further
            found = loaded(saved, prompt_length=length)
            output = found.act(found.preprocess(alone), "eval")
            close(output.actions[0], together.actions[row])
            close(output.values[0], together.values[row])


def test_absent_cameras_are_left_out(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    image = config["input_features"]["observation.images.front"]
    policy = loaded(saved)
    inputs = policy.preprocess(observation())
    seen = policy.see(inputs)
    embedded, mask = policy.network.embed(
        torch.cat([seen, seen.new_zeros(3, 1, *seen.shape[2:])], dim=1),
        torch.tensor([True, True, False]).expand(3, -1),
        inputs["input_ids"],
        inputs["attention_mask"],
    )
    whole = policy.network.add_state(policy.network.read(embedded, mask), mask, inputs["state"])
    x, time = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 0.5, 0.2])
    close(policy.denoise(whole, x, time).velocity, policy.denoise(policy.condition(inputs), x, time).velocity)
    for path in saved.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "vlm").mkdir()
    for path in (saved / "vlm").iterdir():
        (tmp_path / "vlm" / path.name).write_bytes(path.read_bytes())
    config["input_features"]["observation.images.third"] = image
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PolicyError, match=r"expects 3 images \(front, hand, third\), named: 2"):
        loaded(tmp_path)
    three = loaded(tmp_path, cameras=["front", "hand", "absent"])
    close(three.act(three.preprocess(observation()), "eval").actions, policy.act(inputs, "eval").actions)


def test_actions_beyond_the_end_of_an_episode_are_not_learned() -> None:
    policy = scratch()
    inputs = policy.preprocess(observation(2))
    actions = torch.zeros(2, 4, 4)
    draws = policy.imitation_draws(2, torch.Generator().manual_seed(0))
    weights = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    inputs[ACTION_WEIGHTS] = weights / weights.mean()
    before = policy.sft_loss(inputs, actions, draws).detach()
    changed = actions.clone()
    changed[1, 2:] = 0.7
    # Later actions do not reach earlier ones, so what they are makes no difference at all.
    close(policy.sft_loss(inputs, changed, draws), before)
    inputs[ACTION_WEIGHTS] = torch.ones(2, 4)
    assert (policy.sft_loss(inputs, changed, draws) - before).abs() > 1e-3


# ---- what is trained


def test_adapters_go_where_lerobot_puts_them_unless_others_are_named(saved: Path) -> None:
    policy = loaded(saved)
    add_adapters(policy, LoraConfig(rank=2), seed=0)
    ends = {name.removeprefix("network.") for name in adapted_layers(policy)}
    projections = {"state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out"}
    expert = {f"expert.layers.{layer}.self_attn.{kind}_proj" for layer in range(2) for kind in "qv"}
    assert ends == projections | expert
    other = loaded(saved)
    add_adapters(other, LoraConfig(rank=2, targets=["down_proj"]), seed=0)
    assert set(adapted_layers(other)) == {f"network.expert.layers.{layer}.mlp.down_proj" for layer in range(2)}
    seen = other.preprocess(observation())
    close(other.act(seen, "eval").actions, loaded(saved).act(seen, "eval").actions)


@pytest.mark.parametrize(
    ("frozen", "still"),
    [
        (Frozen.nothing, ()),
        (Frozen.vision, ("vision.",)),
        (Frozen.language, ("vision.", "connector.", "text.")),
    ],
)
def test_frozen_parts_do_not_learn(frozen: Frozen, still: tuple[str, ...]) -> None:
    policy = scratch(frozen=frozen)
    unused = ("text.norm", "text.layers.1.self_attn.q", "text.layers.1.self_attn.o", "text.layers.1.mlp")
    for name, parameter in policy.network.named_parameters():
        is_still = name.startswith((*still, *unused, "text.layers.1.post"))
        assert parameter.requires_grad is not is_still, name


def test_without_state_nothing_of_it_is_read(saved: Path) -> None:
    policy = loaded(saved, state=StateInput.none)
    seen = observation()
    before = policy.act(policy.preprocess(seen), "eval").actions
    seen.proprio = seen.proprio + 1.0
    assert torch.equal(policy.act(policy.preprocess(seen), "eval").actions, before)
    assert policy.spec.proprio_dim == 0


# ---- files


def test_saved_weights_are_as_small_as_they_were_and_lose_nothing(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(saved / "model.safetensors")
    halved = {name: each.bfloat16() if ".text_model." in name else each for name, each in weights.items()}
    for folder in (tmp_path / "half", tmp_path / "again"):
        folder.mkdir()
        (folder / "vlm").mkdir()
        for path in [*saved.glob("*.json"), *saved.glob("*_processor.safetensors"), *saved.glob("vlm/*")]:
            (folder / path.relative_to(saved)).write_bytes(path.read_bytes())
    save_file(halved, tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
    policy = loaded(tmp_path / "half")
    layer = policy.network.text.layers[0].mlp.down_proj.weight.data
    layer[0, 0] = 1.0 + 2.0**-20  # a digit that 16 bits do not hold
    policy.save(tmp_path / "again", options())
    found = load_file(tmp_path / "again" / "model.safetensors")
    learned = "model.vlm_with_expert.vlm.model.text_model.layers.0.mlp.down_proj.weight"
    assert {name for name in found if found[name].dtype is not halved[name].dtype} == {learned}
    assert float(found[learned][0, 0]) == 1.0 + 2.0**-20
    assert all(torch.equal(found[name].float(), halved[name].float()) for name in found if name != learned)


def test_without_a_vision_language_model_the_folder_is_asked_for(saved: Path, tmp_path: Path) -> None:
    for path in saved.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(PolicyError, match=r"has no vlm/config\.json: set model\.vlm to the folder of vlm"):
        loaded(tmp_path)
    with pytest.raises(PolicyError, match=r"model\.vlm = .* has no config\.json and no tokenizer\.json"):
        loaded(tmp_path, vlm=str(tmp_path / "nowhere"))
    policy = loaded(tmp_path, vlm=str(saved / "vlm"))
    again = tmp_path / "again"
    again.mkdir()
    policy.save(again, options())
    seen = policy.preprocess(observation())
    close(
        load_policy("smolvla", checkpoint=again, simulator=SPEC).act(seen, "eval").actions.float(),
        policy.act(seen, "eval").actions,
    )


def test_a_task_description_that_is_too_long_is_refused(saved: Path) -> None:
    with pytest.raises(PolicyError, match=r"has 4 tokens, the model takes 3: set model\.prompt_length to 4 or more"):
        loaded(saved, prompt_length=3)


# ---- configs


def refused(name: str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name, [*words])
    return str(caught.value)


@pytest.fixture
def changed(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    def change(**settings: Any) -> Path:
        folder = tmp_path / "changed"
        (folder / "vlm").mkdir(parents=True)
        for path in [each for each in saved.rglob("*") if each.is_file() and each.name != "policy.json"]:
            (folder / path.relative_to(saved)).write_bytes(path.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))
        return folder

    return change


def test_a_config_is_checked_against_its_checkpoint(changed: Callable[..., Path], tmp_path: Path) -> None:
    words = ["tiny_smolvla_grpo", "env.cameras=[corner4]", "model.state=token"]
    folder = changed()
    said = refused(*words, f"model.checkpoint={folder}")
    assert "the checkpoint expects 2 images (front, hand), named: 1 (corner4)" in said
    assert "the statistics are of states with 5 numbers, the simulator has" in said
    assert "a task description has" in refused(*words, f"model.checkpoint={folder}", "model.prompt_length=2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_expert_layers": 1}))
    assert "num_expert_layers is 1 and num_vlm_layers 2" in refused(*words, f"model.checkpoint={folder}")
    (folder / "config.json").write_text(json.dumps(config | {"use_relative_actions": True}))
    assert "use_relative_actions is true: actions are offsets" in refused(*words, f"model.checkpoint={folder}")
    stats = tmp_path / "stats.json"
    stats.write_text(json.dumps({"so100.action": {"mean": [0.0]}}))
    (folder / "config.json").write_text(json.dumps(config))
    said = refused(*words, f"model.checkpoint={folder}", f"model.statistics={stats}")
    assert "has no statistics of 'action' (has: so100.action, of other data sets)" in said
    stats.write_text(json.dumps({"action": {"mean": [0.0] * 4, "std": [1.0, 1.0, -1.0, 1.0]}}))
    said = refused(*words, f"model.checkpoint={folder}", f"model.statistics={stats}")
    assert "action.std[2] is -1.0, below 0: set model.statistics to another file" in said


def test_it_is_said_how_many_actions_the_checkpoint_was_meant_to_execute(changed: Callable[..., Path]) -> None:
    words = ["env.cameras=[corner4,corner]", "model.state=none", f"model.checkpoint={changed(n_action_steps=3)}"]
    [note] = checkpoint_notes(load_config("tiny_smolvla_grpo", words).config)
    assert "evaluated with 3 actions per chunk" in note and note.endswith("embodyrl eval with eval.actions=3")


def test_statistics_of_another_robot_are_found_before_there_are_weights(tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    numbers = {"mean": [0.0] * 6, "std": [1.0] * 6}
    stats.write_text(json.dumps({"observation.state": numbers, "action": numbers}))
    words = ["tiny_smolvla_sft", f"model.statistics={stats}", f"data.path={tmp_path}"]
    assert "the statistics are of actions with 6 numbers, the simulator has 4" in refused(*words)


def test_numbers_of_a_policy_are_normalised_as_its_file_says(changed: Callable[..., Path], tmp_path: Path) -> None:
    numbers = {"mean": [1.0] * 4, "std": [2.0] * 4, "min": [-1.0] * 4, "max": [3.0, 3.0, 3.0, -1.0]}
    stats = tmp_path / "stats.json"
    stats.write_text(json.dumps({"action": numbers}))
    ways = {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ACTION": "MIN_MAX"}
    folder = changed(normalization_mapping=ways)
    with pytest.raises(PolicyError, match=r"STATE is normalised by IDENTITY, policy_preprocessor\.json: norm_"):
        load_policy("smolvla", checkpoint=folder, chunk_size=4)
    for file in folder.glob("policy_*processor.json"):
        content = json.loads(file.read_text())
        for step in content["steps"]:
            step["config"] |= {"norm_map": ways} if "norm_map" in step["config"] else {}
        file.write_text(json.dumps(content))
    policy = load_policy("smolvla", checkpoint=folder, statistics=str(stats), chunk_size=4, value_sizes=[8])
    found = policy.actions.normalize(torch.tensor([[-1.0, 3.0, 1.0, -1.0]]))
    close(found, torch.tensor([[-1.0, 1.0, 0.0, -1.0]]))
    close(policy.actions.unnormalize(found), torch.tensor([[-1.0, 3.0, 1.0, -1.0]]))
    states = np.arange(5, dtype=np.float32)
    assert policy.states.normalize(torch.from_numpy(states)).tolist() == states.tolist()


def test_a_config_json_that_says_nothing_of_normalisation_means_the_usual_one(changed: Callable[..., Path]) -> None:
    folder = changed()
    config = json.loads((folder / "config.json").read_text())
    del config["normalization_mapping"]
    (folder / "config.json").write_text(json.dumps(config))
    policy = load_policy("smolvla", checkpoint=folder, chunk_size=4, value_sizes=[8], simulator=SPEC)
    assert policy.actions.factor.tolist() == pytest.approx([1.0] * 4) and policy.actions.divisor[0] == 1.0 + 1e-8
