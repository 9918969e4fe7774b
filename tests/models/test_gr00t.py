"""GR00T N1.5: files, statistics, prompts, images, options, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from embodyrl.config import ConfigError, load_config
from embodyrl.config.schema import LEFT_OPEN, LoraConfig
from embodyrl.engine.lora import add_adapters, save_policy
from embodyrl.envs import ActionField
from embodyrl.models import PolicyError, PolicyObservation, build_policy, load_policy
from embodyrl.models.flow.config import NoiseMethod
from embodyrl.models.flow.policy import HEADS_FILE
from embodyrl.models.gr00t.checkpoint import EAGLE, METADATA, CheckpointFiles
from embodyrl.models.gr00t.config import LEROBOT_PREFIX, Architecture, Gr00tConfig, Interpolation, ScratchConfig
from embodyrl.models.gr00t.network import (
    POOLING,
    TEXT,
    Gr00tNetwork,
    checkpoint_name,
    parameter_name,
)
from embodyrl.models.gr00t.policy import ImagePipeline
from embodyrl.models.gr00t.prompts import PAD, PIECE, prompt, read_tokenizer
from embodyrl.models.pi.config import Pi0Config
from embodyrl.models.saved import DESCRIPTION_FILE, INDEX_FILE, SINGLE_FILE, other_options, read_description, with_kept
from embodyrl.models.vla.config import WeightType
from embodyrl.models.vla.padding import causal_mask, padded_attention
from embodyrl.planning.weightless import build_weightless
from tests.parity.formula import SPEC, TASKS
from tests.parity.gr00t_formula import CHUNK, HORIZON, TAG, two_views, write_checkpoint

SHARED = Path(__file__).parents[2].parent / "shared" / "reference"
SHARD = "model-00001-of-00001.safetensors"
HEAD = TEXT + "lm_head.weight"
TABLE = TEXT + "model.embed_tokens.weight"
OPTIONS = {"embodiment_tag": TAG, "embodiment_id": 0, "chunk_size": CHUNK}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "checkpoint"))


def load(folder: Path, **options: Any) -> Any:
    return load_policy("gr00t", checkpoint=folder, **(OPTIONS | options))


def rewrite(path: Path, edit: Any) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


# ------------------------------------------------------------------------------------------------------------- weights


def test_names_and_shapes_at_real_size() -> None:
    parameters = dict(Gr00tNetwork.on_meta(Architecture()).named_parameters())
    shapes = {checkpoint_name(name): list(parameter.shape) for name, parameter in parameters.items()}
    assert all(parameter.is_meta for parameter in parameters.values())
    assert all(parameter_name(checkpoint_name(name)) == name for name in parameters)
    assert len(shapes) == 887 and sum(map(math.prod, shapes.values())) == 2_398_284_528
    assert shapes["action_head.action_encoder.W2.W"] == [32, 3072, 1536]
    reference = SHARED / "gr00t-n1.5-expected-keys.json"
    if reference.is_file():
        content = json.loads(reference.read_text())
        used = {key: shape for key, shape in content["keys"].items() if key != HEAD and parameter_name(key) is not None}
        assert shapes == used
        assert shapes[TABLE] == content["keys"][HEAD]
        assert {key for key in content["keys"] if parameter_name(key) is None} == {
            key for key in content["keys"] if key.startswith(POOLING)
        }
        assert Architecture.from_config(content["config"], content["eagle_config"]) == Architecture()


def test_the_published_sizes_are_the_defaults_and_survive_a_round_trip() -> None:
    published = Architecture()
    assert Architecture.from_config(published.to_config(), None) == published
    other = Architecture(text_layers=2, image_token=7, vision={**published.vision, "image_size": 42}, embodiments=3)
    assert Architecture.from_config(other.to_config(), other.to_eagle_config()) == other


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("action_head_cfg", "use_vlln", False),
        ("backbone_cfg", "project_to_dim", 2048),
        ("action_head_cfg", "noise_beta_alpha", 2.0),
    ],
)
def test_what_config_json_must_not_ask_for(folder: Path, section: str, key: str, value: object) -> None:
    rewrite(folder / "config.json", lambda content: content[section].update({key: value}))
    with pytest.raises(PolicyError, match=rf"config.json: {section}.{key} is .*, only .* is supported"):
        load(folder)


def test_the_published_size_needs_no_files() -> None:
    """2,398,284,528 weights of the network, and those of the critic, which stay in float32."""
    config = Gr00tConfig(name="gr00t", checkpoint=LEFT_OPEN, dtype=WeightType.bfloat16, embodiment_tag="libero_franka")
    policy: Any = build_weightless(config, SPEC, chunk_size=16)[0]
    sizes = [(parameter.numel(), parameter.dtype) for parameter in policy.parameters()]
    assert sum(count for count, dtype in sizes if dtype == torch.bfloat16) == 2_398_284_528
    assert sum(count for count, dtype in sizes if dtype == torch.float32) == 1025 * 512 + 513 * 256 + 257 + 3585 * 1024
    assert policy.num_images is None, "no file says how many: the first observation does"
    policy.expect_images(1)
    assert policy.embodiment == 31 and policy.prompts.encode("go")[-1] != policy.network.sizes.image_token


def test_a_config_of_another_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "gr00t_n1_8"}')
    with pytest.raises(PolicyError, match="that of a 'gr00t_n1_8' model, expected 'gr00t_n1_5'"):
        load(folder)


def test_a_round_trip_in_bfloat16_is_exact_to_the_byte(whole: Path, tmp_path: Path) -> None:
    policy = load(whole, dtype="bfloat16", noise_method="flow_noise")
    policy.save(tmp_path, policy.config)
    before, after = load_file(whole / SHARD), load_file(tmp_path / SHARD)
    assert before.keys() == after.keys() and TABLE in before
    assert all(after[key].dtype == torch.bfloat16 and torch.equal(before[key], after[key]) for key in before)
    for name in ("config.json", f"{EAGLE}/config.json", f"{EAGLE}/tokenizer.json", METADATA):
        assert json.loads((whole / name).read_text()) == json.loads((tmp_path / name).read_text())
    heads = [load_file(place / HEADS_FILE) for place in (whole, tmp_path)]
    assert heads[0].keys() == heads[1].keys()
    assert all(torch.equal(heads[0][key], heads[1][key]) for key in heads[0])


def in_other_layout(folder: Path, edit: Any) -> Path:
    """The same weights, as one file that `edit` has changed."""
    tensors = load_file(folder / SHARD)
    (folder / SHARD).unlink()
    (folder / INDEX_FILE).unlink()
    save_file(edit(tensors), folder / SINGLE_FILE)
    return folder


LAYOUTS = {
    "lerobot": lambda tensors: {LEROBOT_PREFIX + key: value for key, value in tensors.items()},
    "output layer alone": lambda tensors: {(HEAD if key == TABLE else key): value for key, value in tensors.items()},
    "both": lambda tensors: tensors | {HEAD: tensors[TABLE].clone()},
    "with the pooling head": lambda tensors: tensors | {POOLING + "probe": torch.ones(1, 1, 3)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_public_layouts_give_the_same_network(whole: Path, folder: Path, layout: str) -> None:
    policy, other = load(whole), load(in_other_layout(folder, LAYOUTS[layout]))
    assert all(torch.equal(a, b) for a, b in zip(policy.network.parameters(), other.network.parameters(), strict=True))


def test_a_config_of_lerobot_stands_for_the_published_sizes(folder: Path) -> None:
    (folder / "config.json").write_text('{"type": "groot", "chunk_size": 50}')
    rewrite(folder / METADATA, lambda content: content.pop("oxe_droid"))
    config = Gr00tConfig(name="gr00t", checkpoint=str(folder))
    files = dataclasses.replace(CheckpointFiles.read(config), eagle=None)
    assert files.architecture == Architecture()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("action_head.vlln.bias"), "missing action_head.vlln.bias"),
        (lambda t: t.pop(TABLE), rf"missing {TABLE}"),
        (lambda t: t.update({"action_head.vlln.gain": torch.ones(2)}), "unexpected action_head.vlln.gain"),
        (
            lambda t: t.update({"action_head.vlln.bias": torch.ones(3)}),
            r"action_head.vlln.bias has shape \[3\], expected \[32\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(folder: Path, edit: Any, message: str) -> None:
    tensors = load_file(folder / SHARD)
    edit(tensors)
    save_file(tensors, folder / SHARD)
    with pytest.raises(PolicyError, match=message):
        load(folder)


def test_heads_are_optional_and_apart(whole: Path, folder: Path) -> None:
    """A checkpoint of public training has none, one that explored in another way has another."""
    assert load(whole, noise_method="flow_sde").noise_network is None
    heads = load_file(folder / HEADS_FILE)
    save_file({key: head for key, head in heads.items() if key.startswith("value_head")}, folder / HEADS_FILE)
    kept, fresh = load(whole, noise_method="flow_noise"), load(folder, noise_method="flow_noise")
    assert not torch.equal(kept.noise_network.mlp[0].weight, fresh.noise_network.mlp[0].weight)
    assert torch.equal(kept.value_head.mlp[0].weight, fresh.value_head.mlp[0].weight)


# ---------------------------------------------------------------------------------------------------------- statistics


def test_states_and_actions_by_hand(whole: Path) -> None:
    content = json.loads((whole / METADATA).read_text())[TAG]["statistics"]
    ends = [np.concatenate([content["state"][key][end] for key in ("hand", "fingers")]) for end in ("min", "max")]
    policy, observation = load(whole), two_views()
    state = policy.preprocess(observation)["state"][:, 0].numpy()
    np.testing.assert_allclose(state, 2 * (observation.proprio.numpy() - ends[0]) / (ends[1] - ends[0]) - 1, atol=1e-5)
    low, high = (np.array(content["action"]["everything"][end]) for end in ("min", "max"))
    said = torch.linspace(-1.5, 1.5, 2 * HORIZON * 7).view(2, HORIZON, 7)
    wanted = (said[:, :CHUNK].numpy() + 1) / 2 * (high - low) + low
    np.testing.assert_allclose(policy.finish(said, {}).numpy(), wanted, atol=1e-5)
    assert low[0] == high[0]
    data, counts = policy.sft_targets(policy.finish(said, {}), {})
    assert torch.equal(data[..., 0], torch.zeros(2, HORIZON)) and bool(counts.all())
    torch.testing.assert_close(data[:, :CHUNK, 1:], said[:, :CHUNK, 1:], atol=1e-5, rtol=0)
    torch.testing.assert_close(data[:, CHUNK:], data[:, CHUNK - 1 : CHUNK].expand(-1, HORIZON - CHUNK, -1))


def test_mean_and_standard_deviation(whole: Path) -> None:
    content = json.loads((whole / METADATA).read_text())[TAG]["statistics"]
    mean, std = (np.concatenate([content["state"][key][end] for key in ("hand", "fingers")]) for end in ("mean", "std"))
    policy, observation = load(whole, state_normalization="mean_std", action_normalization="mean_std"), two_views()
    state = policy.preprocess(observation)["state"][:, 0].numpy()
    np.testing.assert_allclose(state, (observation.proprio.numpy() - mean) / std, atol=1e-5)
    action = content["action"]["everything"]
    said = torch.ones(1, HORIZON, 7)
    np.testing.assert_allclose(policy.finish(said, {})[0, 0], np.add(action["mean"], action["std"]), atol=1e-6)


def test_parts_of_a_state_in_another_order(whole: Path) -> None:
    policy, other = load(whole), load(whole, state_keys=["fingers", "hand"])
    observation = two_views()
    turned = dataclasses.replace(observation, proprio=observation.proprio.roll(2, 1))
    state, same = (p.preprocess(o)["state"] for p, o in ((policy, observation), (other, turned)))
    torch.testing.assert_close(same.roll(-2, dims=-1), state)
    assert load(whole, state_keys=["hand"]).spec.proprio_dim == 6


def test_statistics_of_a_dataset_for_a_new_robot(whole: Path, tmp_path: Path) -> None:
    numbers = {name: [0.0, 1.0] for name in ("min", "mean")} | {name: [1.0, 3.0] for name in ("max", "std")}
    path = tmp_path / "stats.json"
    path.write_text(json.dumps({"observation.state": numbers, "action": numbers, "observation.images.front": {}}))
    spec = dataclasses.replace(
        SPEC, proprio_dim=2, actions=(dataclasses.replace(SPEC.actions[0], low=(-9.0,) * 2, high=(9.0,) * 2),)
    )
    policy = load(whole, statistics=str(path), embodiment_tag=None, simulator=spec)
    assert policy.finish(torch.ones(1, HORIZON, 7), {})[0, 0].tolist() == [1.0, 3.0]
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved, policy.config)
    again = load(saved, embodiment_tag=None, simulator=spec)
    assert torch.equal(again.actions.divisor, policy.actions.divisor)
    with pytest.raises(PolicyError, match=r"names 1 camera,.* trained with 2 images: front, hand"):
        load(saved, embodiment_tag=None, simulator=dataclasses.replace(spec, cameras=("front",)))


def as_lerobot(folder: Path, tag: str) -> Path:
    """The checkpoint with statistics where LeRobot keeps them."""
    entry = json.loads((folder / METADATA).read_text())[tag]["statistics"]
    parts = entry["state"]["hand"], entry["state"]["fingers"]
    state = {key: [*parts[0][key], *parts[1][key]] for key in ("min", "max", "mean", "std")}
    numbers = {"observation.state": state, "action": entry["action"]["everything"]}
    flat = {f"{name}.{key}": torch.tensor(column) for name, part in numbers.items() for key, column in part.items()}
    file = "policy_preprocessor_step_2_groot_pack_inputs_v3.safetensors"
    save_file(flat, folder / file)
    packing = {"registry_name": "groot_pack_inputs_v3", "config": {"embodiment_tag": "gr1"}, "state_file": file}
    steps = [{"registry_name": "to_batch_processor", "config": {}}, packing]
    (folder / "policy_preprocessor.json").write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
    (folder / METADATA).unlink()
    return folder


def test_statistics_in_a_checkpoint_of_lerobot(whole: Path, folder: Path) -> None:
    """They are those of the robot that it names."""
    theirs = load(as_lerobot(folder, TAG), embodiment_tag=None, simulator=SPEC)
    ours = load(whole, simulator=SPEC)
    torch.testing.assert_close(theirs.states.divisor, ours.states.divisor)
    torch.testing.assert_close(theirs.actions.origin, ours.actions.origin)
    assert list(theirs.files.metadata) == ["gr1"]


def test_a_checkpoint_of_lerobot_without_statistics(folder: Path) -> None:
    as_lerobot(folder, TAG)
    statistics = next(folder.glob("*_v3.safetensors"))
    statistics.write_bytes(statistics.read_bytes()[:-4])
    with pytest.raises(PolicyError, match=r"_v3\.safetensors is damaged \(.*\): download it again"):
        load(folder)
    statistics.rename(folder.parent / "v3.safetensors")
    with pytest.raises(PolicyError, match=r"names .*_v3\.safetensors, which is not there: set model\.statistics to"):
        load(folder)
    rewrite(folder / "policy_preprocessor.json", lambda all: all["steps"][1].update(state_file="../v3.safetensors"))
    with pytest.raises(PolicyError, match=r"names \.\./v3\.safetensors, which is not there"):
        load(folder)
    rewrite(folder / "policy_preprocessor.json", lambda content: content["steps"].pop())
    with pytest.raises(PolicyError, match=r"has no step groot_pack_inputs.*: set model\.statistics to"):
        load(folder)


def test_a_new_model_scales_states_by_the_statistics_of_demonstrations(tmp_path: Path) -> None:
    state = {"min": [0.0] * 8, "max": [2.0] * 8, "mean": [0.0] * 8, "std": [1.0] * 8}
    action = {"min": [-0.5] * 7, "max": [0.5] * 7, "mean": [0.0] * 7, "std": [1.0] * 7}
    path = tmp_path / "stats.json"
    path.write_text(json.dumps({"observation.state": state, "action": action}))
    policy, observation = scratch(statistics=str(path)), two_views()
    found = policy.preprocess(observation)["state"][:, 0].numpy()
    np.testing.assert_allclose(found, observation.proprio.numpy() - 1.0, atol=1e-6)
    assert torch.equal(policy.finish(torch.ones(1, CHUNK, 7), {}), torch.full((1, CHUNK, 7), 0.5))


# ------------------------------------------------------------------------------------------------------------- prompts


def test_the_prompt_is_the_public_one() -> None:
    assert prompt("pick it up", images=2, pieces=3) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<image 1><img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>"
        "<image 2><img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>"
        "pick it up<|im_end|>\n<|im_start|>assistant\n"
    )


def test_both_forms_of_the_tokenizer_are_the_same() -> None:
    vocabulary = {letter: number for number, letter in enumerate("abcdeGH")} | {"ab": 7, "abc": 8, "Ġ": 9}
    added = {PIECE: 11, "<img>": 10}
    merges = ["a b", "ab c"]
    files = {
        "vocab.json": json.dumps(vocabulary).encode(),
        "merges.txt": ("#version: 0.2\n" + "\n".join(merges) + "\n").encode(),
        "added_tokens.json": json.dumps(added | {PAD: 12}).encode(),
    }
    tokenizer = read_tokenizer(files)
    assert tokenizer.encode(f"abc d<img>{PIECE}ab").tokens == ["abc", "Ġ", "d", "<img>", PIECE, "ab"]
    again = read_tokenizer({"tokenizer.json": tokenizer.to_str().encode()})
    assert again.encode(f"abc <img>{PIECE}").ids == tokenizer.encode(f"abc <img>{PIECE}").ids


def test_prompts_have_one_length_and_padding_where_it_is_asked_for(whole: Path) -> None:
    policy = load(whole, simulator=SPEC)
    short, long = sorted(TASKS.values(), key=len)
    alone, both = policy.preprocess(views([short])), policy.preprocess(views([short, long]))
    assert torch.equal(alone["input_ids"][0], both["input_ids"][0])
    assert both["attention_mask"].sum(1).tolist() == [len(policy.prompts.encode(task)) for task in (short, long)]
    pad = read_tokenizer(policy.files.companions).token_to_id(PAD)
    assert both["input_ids"][0, 0] == pad and not both["attention_mask"][0, 0]
    right = load(whole, simulator=SPEC, padding="right", prompt_length=60).preprocess(views([short]))
    assert right["input_ids"].shape == (1, 60)
    assert right["attention_mask"][0, 0] and right["input_ids"][0, -1] == 0 and not right["attention_mask"][0, -1]


def test_a_task_as_lerobot_writes_it(whole: Path) -> None:
    task = max(TASKS.values(), key=len)
    listed, plain = (load(whole, simulator=SPEC, listed_task=each).prompts.encode(task) for each in (True, False))
    own = load(whole, simulator=SPEC).prompts
    assert listed == own.encode(f"['{task}']") != plain == own.encode(task)


def views(tasks: list[str]) -> PolicyObservation:
    observation = two_views()
    count = len(tasks)
    images, proprio = observation.images[:count], observation.proprio[:count]
    return PolicyObservation(images=images, proprio=proprio, task_descriptions=tasks)


def test_a_prompt_that_is_too_long(whole: Path) -> None:
    with pytest.raises(PolicyError, match=r"a task's prompt has \d+ tokens, more than prompt_length = 20"):
        load(whole, simulator=SPEC, prompt_length=20)
    policy = load(whole, simulator=SPEC)
    with pytest.raises(PolicyError, match="more than prompt_length"):
        policy.preprocess(views(["turn " * 50]))


def test_a_saved_policy_keeps_the_length_of_its_prompts(tmp_path: Path) -> None:
    """On a part of the tasks, and without a simulator, it is the policy that it was; what is longer is told."""
    policy = scratch()
    policy.save(tmp_path, policy.config)
    short, long = sorted(TASKS.values(), key=len)
    length = policy.preprocess(views([short]))["input_ids"].shape[1]
    assert policy.config.prompt_length is None and length == len(policy.prompts.encode(long))
    assert read_description(tmp_path, "gr00t")[0]["prompt_length"] == length
    part = dataclasses.replace(SPEC, tasks={"short": short})
    config = dataclasses.replace(policy.config, checkpoint=str(tmp_path))
    again = [load_policy("gr00t", checkpoint=tmp_path, simulator=part), load_policy("gr00t", checkpoint=tmp_path)]
    again += [build_policy(model, part, chunk_size=CHUNK, seed=0) for model in (config, with_kept(config, tmp_path))]
    wanted = policy.act(policy.preprocess(views([short])), "eval")
    for each in again:
        inputs = each.preprocess(views([short]))
        assert torch.equal(inputs["input_ids"], policy.preprocess(views([short]))["input_ids"])
        assert torch.equal(each.act(inputs, "eval").values, wanted.values)
        assert each.options_to_save(config).prompt_length == length
    other = load_policy("gr00t", checkpoint=tmp_path, simulator=part, prompt_length=length + 1)
    assert other.preprocess(views([short]))["input_ids"].shape[1] == length + 1
    longer = dataclasses.replace(SPEC, tasks={"long": f"{long} at {long}"})
    found = len(policy.prompts.encode(longer.tasks["long"]))
    message = rf"{found} tokens, more than prompt_length = {length} \(of the .* saved policy\): '{long} at"
    with pytest.raises(PolicyError, match=message + rf" .*': choose tasks .* set model.prompt_length={found},"):
        build_policy(config, longer, chunk_size=CHUNK, seed=0)


def test_a_length_that_was_saved_is_no_other_option(tmp_path: Path) -> None:
    policy = scratch()
    policy.save(tmp_path, policy.config)
    left_open = dataclasses.replace(policy.config, checkpoint=str(tmp_path))
    assert other_options(left_open) == []
    assert other_options(dataclasses.replace(left_open, prompt_length=99)) == [
        f"model.prompt_length = 99 (it was {policy.prompts.length})"
    ]


@pytest.mark.parametrize("public", [False, True])
def test_adapters_keep_the_length_of_their_prompts(tmp_path: Path, public: bool) -> None:
    """Whether they are for random weights, which are saved with them, or for a checkpoint that knows no length."""
    pytest.importorskip("peft", reason="adapters need peft")
    base = scratch()
    base.save(tmp_path, base.config)
    (tmp_path / DESCRIPTION_FILE).unlink()
    config = dataclasses.replace(base.config, checkpoint=str(tmp_path)) if public else base.config
    policy = build_policy(config, SPEC, chunk_size=CHUNK, seed=0)
    add_adapters(policy, LoraConfig(rank=2), 0)
    saved = tmp_path / "saved"
    saved.mkdir()
    save_policy(policy, saved, config)
    assert with_kept(config, saved).prompt_length == base.prompts.length is not None
    assert with_kept(dataclasses.replace(config, prompt_length=99), saved).prompt_length == 99
    assert with_kept(Pi0Config(name="pi0"), saved).prompt_length is None


RUN = """\
defaults: [env: gym/pendulum_rgb, model: gr00t, algorithm: ppo, _self_]
run: {iterations: 1, eval_every: 0, dir: out}
env: {num_envs: 2, workers: 1, max_episode_steps: 8, image_size: [48, 48]}
eval: {episodes: 2}
tracking: {sinks: [jsonl], report: false}
model: {denoising_steps: 2, scratch: {layers: 1, action_layers: 2}}
rollout: {num_chunks: 4, chunk_size: 2}
algorithm: {minibatches: 2}
"""


def embodyrl(folder: Path, *arguments: str) -> str:
    """What a command prints."""
    done = programs.run(["-m", "embodyrl", *arguments], preload=programs.VLA, cwd=folder)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_runs_keep_the_length_of_their_prompts(tmp_path: Path, adapters: bool) -> None:
    """Also those of adapters for a checkpoint that knows of none."""
    pytest.importorskip("pygame", reason="needs gymnasium[classic-control]")
    base = Path("out/checkpoints/last/policy")
    (tmp_path / "my.yaml").write_text(RUN)
    embodyrl(tmp_path, "run", "my.yaml")
    length = json.loads((tmp_path / base / DESCRIPTION_FILE).read_text())["options"]["prompt_length"]
    run = "out"
    if adapters:
        pytest.importorskip("peft", reason="adapters need peft")
        shutil.copytree(tmp_path / base, tmp_path / "public")
        (tmp_path / "public" / DESCRIPTION_FILE).unlink()
        run = "adapted"
        embodyrl(tmp_path, "run", "my.yaml", f"run.dir={run}", "model.checkpoint=public", "engine.lora.rank=2")
    longer = "env.task_descriptions.Pendulum-v1=swing it up and keep it there for as long as you can"
    assert f"more than prompt_length = {length} (of" in embodyrl(tmp_path, "eval", run, longer)
    assert "evaluation  2 episodes" in embodyrl(tmp_path, "eval", run, "env.task_descriptions.Pendulum-v1=up")
    embodyrl(tmp_path, "export", run, "--out", "exported")
    exported = json.loads((tmp_path / "exported" / DESCRIPTION_FILE).read_text())["options"]
    assert exported["prompt_length"] == length > 0
    validated = embodyrl(tmp_path, "validate", "my.yaml", "model.checkpoint=exported", "run.dir=another")
    assert "0 faults" in validated and "prompt_length" not in validated


def test_the_tokenizer_of_another_model(folder: Path) -> None:
    rewrite(folder / EAGLE / "config.json", lambda content: content.update(image_token_index=3))
    with pytest.raises(PolicyError, match=r"<IMG_CONTEXT> has id 4 in the tokenizer, 3 in the model"):
        load(folder)


def test_a_tokenizer_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.move(folder / EAGLE / "tokenizer.json", tmp_path / "elsewhere")
    with pytest.raises(PolicyError, match=r"no tokenizer in .*: set model\.tokenizer to the folder eagle2_hg_model"):
        load(folder)
    load(folder, tokenizer=str(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_padding_gets_nothing_from_attention_and_gradients_stay_finite(
    whole: Path, device: str, dtype: torch.dtype
) -> None:
    """What FlashAttention leaves in the place of padding, which reaches the actions. Kernels differ in what they make
    of a row that may look at nothing."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    policy = load(whole, simulator=SPEC, prompt_length=60).to(device)
    attention = policy.network.backbone.eagle_model.language_model.layers[0].self_attn
    seen: list[torch.Tensor] = []
    attention.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    inputs = policy.preprocess(views(list(TASKS.values())))
    with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        policy.condition(inputs).context.float().square().sum().backward()
    padding = ~inputs["attention_mask"]
    assert padding.any() and bool((seen[0][padding] == 0).all()) and bool((seen[0][~padding] != 0).any(-1).all())
    assert all(bool(p.grad.isfinite().all()) for p in policy.network.parameters() if p.grad is not None)


def attend(valid: torch.Tensor, heads: int, width: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """What every token `[B, L]` sees, and the gradients of queries, keys and values."""
    draw = torch.Generator().manual_seed(0)
    shape = (*valid.shape[:1], heads, valid.shape[1], width)
    parts = [torch.randn(shape, generator=draw).to(device, dtype).requires_grad_() for _ in range(3)]
    seen, _ = padded_attention(torch.nn.Identity(), *parts, attention_mask=causal_mask(valid.to(device)))
    seen.float().square().sum().backward()
    return [seen, *(part.grad for part in parts if part.grad is not None)]


def test_no_kernel_is_asked_about_who_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get zeros; the others what they get without them, bit for bit."""
    valid = torch.tensor([[False, False, True, True, True], [True, True, True, False, False]])
    asked: list[torch.Tensor] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def watched(*parts: torch.Tensor, attn_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append(attn_mask)
        return kernel(*parts, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    seen, *gradients = attend(valid, 2, 4, "cpu", torch.float32)
    assert bool(asked[0].any(-1).all()) and torch.equal(asked[0][:, 0][valid], causal_mask(valid)[:, 0][valid])
    assert bool((seen[~valid] == 0).all()) and all(bool(each.isfinite().all()) for each in gradients)
    assert all(bool((each.transpose(1, 2)[~valid] == 0).all()) for each in gradients)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 5, 4, generator=draw) for _ in range(3))
    wanted = kernel(query, key, value, attn_mask=causal_mask(valid))
    assert torch.equal(seen[valid], wanted.transpose(1, 2)[valid])


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 192])
@pytest.mark.parametrize("left", [True, False])
def test_gradients_are_finite_at_lengths_that_kernels_stumble_over(length: int, left: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    valid = (torch.arange(length) >= 9).expand(2, -1)
    for each in attend(valid if left else valid.flip(1), 16, 128, "cuda", torch.bfloat16):
        assert bool(each.isfinite().all())


def test_who_looks_at_whom() -> None:
    mask = causal_mask(torch.tensor([[False, True, True]]))
    assert mask[0, 0].tolist() == [[False, False, False], [False, True, False], [False, True, True]]


# ------------------------------------------------------------------------------------------------------------ images


def test_a_crop_keeps_the_middle() -> None:
    image = torch.arange(40 * 40 * 3).remainder(251).view(1, 1, 40, 40, 3).to(torch.uint8)
    pixels = ImagePipeline(38, center_crop=True, interpolation=Interpolation.bilinear)(image, CPU)
    wanted = (image[0, 0, 1:39, 1:39].permute(2, 0, 1).float() / 255 - 0.5) / 0.5
    assert torch.equal(pixels[0, 0], wanted)


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize("size", [(256, 256), (480, 640), (100, 90), (224, 224)])
def test_bilinear_images_are_those_of_isaac(size: tuple[int, int], crop: bool) -> None:
    """Its steps, one image at a time: fractions of 255, crop, resize in float32, and cut off to whole numbers."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 2, *size, 3), dtype=torch.uint8, generator=draw)
    found = ImagePipeline(224, center_crop=crop, interpolation=Interpolation.bilinear)(images, CPU)
    for image, pixels in zip(images.flatten(0, 1), found.flatten(0, 1), strict=True):
        frame = (image.to(torch.float32) / 255.0).permute(2, 0, 1)
        if crop:
            frame = vision.center_crop(frame, [int(size[0] * 0.95), int(size[1] * 0.95)])
        frame = vision.resize(frame, [224, 224], interpolation=InterpolationMode.BILINEAR, antialias=True)
        whole = (frame * 255).to(torch.uint8)
        assert torch.equal(pixels, (whole.float() / 255.0 - 0.5) / 0.5)


def test_ways_to_resize_differ() -> None:
    image = two_views().images[:, :1]
    linear, cubic = (ImagePipeline(24, center_crop=False, interpolation=way)(image, CPU) for way in Interpolation)
    assert linear.shape == cubic.shape == (2, 1, 3, 24, 24) and not torch.equal(linear, cubic)


# -------------------------------------------------------------------------------------------------- acting and learning


def scratch(**options: Any) -> Any:
    small = ScratchConfig(image_size=32, hidden_size=32, layers=1, vision_layers=1, action_layers=2)
    config = Gr00tConfig(name="gr00t", **({"scratch": small} | options))
    return build_policy(config, SPEC, chunk_size=CHUNK, seed=1)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("method", [each for each in NoiseMethod if each is not NoiseMethod.none])
def test_evaluation_repeats_a_rollout_bit_for_bit(method: NoiseMethod, joint: bool) -> None:
    policy = scratch(noise_method=method, joint_logprob=joint)
    inputs = policy.preprocess(two_views())
    acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
    scored = policy.evaluate(inputs, acted.trace)
    assert torch.equal(scored.logprobs, acted.logprobs) and torch.equal(scored.values, acted.values)


def test_images_and_task_description_are_looked_at_once() -> None:
    """By the language model, and, of what it made of them, by each block that needs keys and values."""
    policy = scratch()
    blocks = policy.network.action_head.model.transformer_blocks
    calls = [0, 0]
    for number, part in enumerate((policy.network.backbone, blocks[0].attn1.to_k)):
        part.register_forward_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    inputs = policy.preprocess(two_views())
    acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
    assert policy.config.denoising_steps == 4 and calls == [1, 1]
    policy.evaluate(inputs, acted.trace)
    assert calls == [2, 2]


@pytest.mark.parametrize("joint", [False, True])
def test_the_critic_is_asked_once(joint: bool) -> None:
    """What it reads is the same at every step."""
    policy, calls = scratch(joint_logprob=joint), []
    policy.value_head.register_forward_hook(lambda *_: calls.append(1))
    inputs = policy.preprocess(two_views())
    for mode in ("train", "eval"):
        values = policy.act(inputs, mode, torch.Generator().manual_seed(0)).values
        assert len(calls) == 1
        torch.testing.assert_close(values, policy.value_head(policy.value_features(policy.condition(inputs), None)))
        calls.clear()


@pytest.mark.parametrize("detach", [True, False])
def test_whether_the_critic_changes_the_network(detach: bool) -> None:
    policy = scratch(detach_critic=detach)
    inputs = policy.preprocess(two_views())
    trace = policy.act(inputs, "train", torch.Generator().manual_seed(0)).trace
    policy.evaluate(inputs, trace).values.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.value_head.parameters())
    assert all((parameter.grad is None) == detach for parameter in policy.network.backbone.parameters())


@pytest.mark.parametrize(
    ("frozen", "parts"),
    [
        ([], []),
        (["vision"], ["vision_model", "mlp1"]),
        (["language"], ["language_model"]),
        (["vision", "language"], ["vision_model", "mlp1", "language_model"]),
    ],
)
def test_frozen_parts(frozen: list[str], parts: list[str]) -> None:
    """The projector goes with vision; whatever is not named learns, the action head and the critic always."""
    policy = scratch(**{f"freeze_{part}": True for part in frozen})
    names = [name for name, _ in policy.named_parameters()]
    still = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    eagle = "network.backbone.eagle_model."
    assert still == {name for name in names if name.startswith(tuple(f"{eagle}{part}." for part in parts))}
    some = ("vision_model.post_layernorm.weight", "mlp1.0.weight", "language_model.layers.0.self_attn.q_proj.weight")
    assert {name for name in some if eagle + name in still} == {name for name in some if name.startswith(tuple(parts))}
    learning = set(names) - still
    assert {"network.action_head.vlln.weight", "value_head.mlp.0.weight"} <= learning


@pytest.mark.parametrize("scale", [0.999, 0.5])
def test_times_to_learn_at(scale: float) -> None:
    """(s - draw) / s, from 1 (data) at a draw of 0 to 0 (noise) at s, and below it beyond; shares of noise add to 1."""
    policy = scratch()
    policy.network.sizes = dataclasses.replace(policy.network.sizes, noise_scale=scale)
    time, share = policy.learning_times(torch.tensor([0.0, 0.5, scale, 1.0]))
    wanted = [1.0, (scale - 0.5) / scale, 0.0, (scale - 1.0) / scale]
    torch.testing.assert_close(time, torch.tensor(wanted), atol=1e-6, rtol=0)
    torch.testing.assert_close(share, 1.0 - torch.tensor(wanted), atol=1e-6, rtol=0)


def test_the_scale_of_times_is_that_of_the_checkpoint(folder: Path) -> None:
    assert Architecture().noise_scale == 0.999
    rewrite(folder / "config.json", lambda content: content["action_head_cfg"].update(noise_s=0.5))
    assert load(folder).learning_times(torch.tensor([0.25]))[0].item() == 0.5


def test_what_counts_of_a_demonstration() -> None:
    """Of a network for more actions and longer ones: the last action is repeated and counts, padding does not."""
    longer = ScratchConfig(image_size=32, hidden_size=32, layers=1, vision_layers=1, action_layers=2, action_horizon=5)
    policy = scratch(scratch=longer)
    policy.start = torch.zeros(5, 9)
    actions = torch.linspace(-0.9, 0.9, 2 * CHUNK * 7).view(2, CHUNK, 7)
    data, counts = policy.sft_targets(actions, {})
    low, high = torch.from_numpy(SPEC.action_low), torch.from_numpy(SPEC.action_high)
    normalized = (actions - 0.5 * (low + high)) / (0.5 * (high - low))
    torch.testing.assert_close(data[:, :CHUNK, :7], normalized, atol=1e-6, rtol=0)
    assert data.shape == counts.shape == (2, 5, 9) and CHUNK == 3
    assert torch.equal(data[:, 3], data[:, 2]) and torch.equal(data[:, 4], data[:, 2])
    assert bool((data[..., 7:] == 0).all())
    assert bool((counts[..., :7] == 1).all()) and bool((counts[..., 7:] == 0).all())


def test_the_gripper_and_units_of_the_simulator(whole: Path) -> None:
    arm = ActionField(name="arm", meaning="delta_position", unit="m", low=(-1.0,) * 6, high=(1.0,) * 6, scale=0.05)
    hand = ActionField(name="hand", meaning="gripper", unit="1", low=(-1.0,), high=(1.0,), opens=-1.0, closes=1.0)
    spec = dataclasses.replace(SPEC, actions=(arm, hand))
    said = torch.full((1, HORIZON, 7), 0.35)
    plain = load(whole, simulator=spec).finish(said, {})
    metric = load(whole, simulator=spec, action_units="metric").finish(said, {})
    opened = load(whole, simulator=spec, gripper="one_opens").finish(said, {})
    half = load(whole, simulator=spec, gripper="one_opens", binary_gripper=False).finish(said, {})
    torch.testing.assert_close(metric[..., :6], (20 * plain[..., :6]).clamp(-1, 1))
    amount = float(load(whole).finish(said, {})[0, 0, 6])
    assert 0.1 < amount < 0.4
    assert plain[0, 0, 6] == pytest.approx(amount) and half[0, 0, 6] == pytest.approx(1 - 2 * amount)
    assert opened[0, 0, 6] == 1.0


def test_parts_for_the_engine() -> None:
    plan = scratch().parallel_plan()
    assert len(plan.blocks) == 1 + 1 + 1 + 2
    assert "network.action_head.model.transformer_blocks.1" in plan.blocks
    assert "network.backbone.eagle_model.language_model.layers.0.self_attn.q_proj" in plan.adaptable
    assert not any("action_head" in name for name in plan.adaptable)


# -------------------------------------------------------------------------------------------------------- what is wrong


def faults(folder: Path, *settings: str, env: str = "gym/pendulum_rgb") -> str:
    """What loading a config says before anything starts."""
    robot = ["env.tasks=[EmbodyrlArm-v0]", "env.kwargs={states: 8, actions: 7}", "env.success_return=null"]
    common = [f"env={env}", *(robot if env.startswith("gym/") else []), "model=gr00t", f"model.checkpoint={folder}"]
    common += ["model.video_keys=[front]"]
    common += [f"model.embodiment_tag={TAG}", "model.embodiment_id=0", "rollout.chunk_size=2"]
    try:
        load_config("gym_cartpole", [*common, *settings])
    except ConfigError as error:
        return str(error)
    return ""


def test_a_config_that_fits(whole: Path) -> None:
    assert faults(whole) == ""


METAWORLD = ["env=metaworld/reach_rgb", "model=gr00t", "model.video_keys=null"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.scratch.image_size=60"], "model.scratch.image_size = 60 cannot be cut into patches of 16 pixels"),
        (["model.tokenizer=/nope"], "model.tokenizer is set, but model.checkpoint is null"),
        (["model.embodiment_id=7"], "a model without a checkpoint has networks for one robot only"),
        (["model.embodiment_tag=foo"], "model.embodiment_tag chooses from statistics, but model.checkpoint and"),
        (["model.state_keys=[foo]"], "model.state_keys chooses from statistics"),
    ],
)
def test_what_a_model_from_nothing_cannot_be(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("gym_cartpole", ["env=gym/pendulum_rgb", "model=gr00t", "rollout.chunk_size=2", *settings])
    assert said in str(caught.value)


def test_statistics_of_another_robot_are_found_before_a_model_from_nothing_starts(tmp_path: Path) -> None:
    pytest.importorskip("metaworld", reason="MetaWorld is not installed")
    numbers = {name: [0.0] * 7 for name in ("min", "max", "mean", "std", "q01", "q99")}
    (tmp_path / "stats.json").write_text(json.dumps({"observation.state": numbers, "action": numbers}))
    with pytest.raises(ConfigError) as caught:
        load_config("gym_cartpole", [*METAWORLD, f"model.statistics={tmp_path / 'stats.json'}"])
    assert "model.statistics are of a state with 7 numbers, the simulator has" in str(caught.value)
    assert "model.statistics are of an action with 7 numbers, the simulator has 4" in str(caught.value)


def test_task_descriptions_and_tokenizers_that_do_not_fit_are_found_before_anything_starts(
    whole: Path, tmp_path: Path
) -> None:
    pytest.importorskip("metaworld", reason="MetaWorld is not installed")
    short = faults(whole, "model.prompt_length=3", env="metaworld/reach_rgb")
    assert "more than prompt_length = 3 (of the config or the saved policy): 'reach the goal position'" in short
    tokenizer = {"type": "WordLevel", "vocab": {"reach": 0}, "unk_token": "reach"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": tokenizer}))
    other = faults(whole, f"model.tokenizer={tmp_path}")
    assert "model.tokenizer: <IMG_CONTEXT> has no id in the tokenizer" in other
    (tmp_path / "tokenizer.json").write_text("{")
    assert "model.tokenizer: tokenizer.json cannot be read" in faults(whole, f"model.tokenizer={tmp_path}")


def test_another_models_folder_and_sizes_that_are_none_are_named(folder: Path) -> None:
    rewrite(folder / "config.json", lambda content: content["action_head_cfg"].update(action_horizon="x"))
    assert "config.json: action_horizon is 'x', a whole number from 1 on was expected" in faults(folder)
    rewrite(folder / "config.json", lambda content: [content.clear(), content.update(type="pi0")])
    assert "config.json is that of a 'pi0' model, expected 'gr00t_n1_5'" in faults(folder)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.embodiment_tag=new_embodimnt", "no statistics of embodiment_tag = 'new_embodimnt' - did you mean"),
        (
            "model.embodiment_tag=null",
            "statistics of several robots - set embodiment_tag to one of new_embodi",
        ),
        ("model.embodiment_id=9", r"embodiment_id = 9 \(new_embodiment\), but the checkpoint has networks for 0 .. 0"),
        (
            "model.state_keys=[hand,wheels]",
            r"'wheels', which the statistics of new_embodiment.state lack \(known",
        ),
        ("model.video_keys=null", r"names 1 camera,.* trained with 2 images: front, hand"),
        ("env.cameras=[]", "env.cameras is empty"),
        ("rollout.chunk_size=6", "rollout.chunk_size = 6, but the model denoises 5 actions at a time"),
        ("model.tokenizer=nowhere", "no tokenizer in nowhere"),
        ("model.statistics=nowhere.json", r"holds no nowhere.json: set model.statistics to"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(whole: Path, setting: str, message: str) -> None:
    said = faults(whole, setting)
    assert re.search(message, said) and "nothing was started" in said


def test_a_simulator_whose_state_is_known_before_it_starts(whole: Path) -> None:
    said = faults(whole, env="metaworld/reach_rgb")
    assert "describe a state of 8 numbers (hand, fingers), the simulator has 4 - choose its parts with" in said
    assert "the simulator has 39 - choose" in faults(whole, "env.proprio=full", env="metaworld/reach_rgb")


def test_adapters_around_what_stays_as_it_is(whole: Path) -> None:
    adapters = ["engine.lora.rank=2", "model.freeze_vision=true"]
    assert faults(whole, *adapters) == ""
    assert "engine.lora.rank = 2 puts adapters around the" in faults(whole, *adapters, "model.freeze_language=true")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.noise_method=flow_cps", "model.denoising_steps=1"], "adds no noise in the last step, and model.deno"),
        (["model.noise_method=flow_cps", "model.noise_level=1.8"], "model.noise_level = 1.8, but flow_cps draws at mo"),
        (["model.noise_low=0.3"], "model.noise_low = 0.3 is not below model.noise_high = 0.16"),
    ],
)
def test_what_no_flow_policy_can_do(whole: Path, settings: list[str], message: str) -> None:
    assert message in faults(whole, *settings)


def test_a_robot_whose_number_nobody_knows(folder: Path) -> None:
    rewrite(folder / METADATA, lambda content: content.update(my_robot=content[TAG]))
    assert faults(folder, "model.embodiment_tag=my_robot", "model.embodiment_id=null") == ""  # there is only one
    rewrite(folder / "config.json", lambda content: content["action_head_cfg"].update(max_num_embodiments=32))
    said = faults(folder, "model.embodiment_tag=my_robot", "model.embodiment_id=null")
    assert "the number of embodiment 'my_robot' is not known" in said and "new_embodiment 31, gr1 24" in said


def test_a_state_that_is_too_long(folder: Path) -> None:
    rewrite(folder / "config.json", lambda content: content["action_head_cfg"].update(max_state_dim=7))
    assert "has 8 numbers (hand, fingers), but the checkpoint takes 7 at most" in faults(folder)


def robot_in(content: Any) -> Any:
    """What of metadata.json is about the robot of these tests."""
    return content[TAG]["statistics"]


DAMAGED: dict[str, tuple[Any, str]] = {
    "no statistics": (lambda all: all[TAG].pop("statistics"), "new_embodiment are nothing, expected an object"),
    "a list": (lambda all: robot_in(all).update(state=[1, 2]), "new_embodiment.state are [1, 2], expected an obj"),
    "a part": (lambda all: robot_in(all)["state"].update(hand=[]), "new_embodiment.state.hand are [], expected an"),
    "a robot": (lambda all: all.update({TAG: 7}), "new_embodiment are 7, expected an object with entries"),
    "no entry": (lambda all: robot_in(all)["state"]["hand"].pop("max"), "state.hand lack max (found: min, mean, std)"),
    "a number": (lambda all: robot_in(all)["state"]["hand"].update(max=3), "hand.max are 3, expected a list of num"),
    "null": (
        lambda all: robot_in(all)["action"]["everything"]["max"].__setitem__(2, None),
        "action.everything.max[2] are nothing, expected a finite number",
    ),
    "nan": (
        lambda all: robot_in(all)["action"]["everything"]["std"].__setitem__(6, math.nan),
        "action.everything.std[6] are nan, expected a finite number",
    ),
    "infinity": (
        lambda all: robot_in(all)["state"]["fingers"]["min"].__setitem__(0, -math.inf),
        "state.fingers.min[0] are -inf, expected a finite number",
    ),
    "text": (
        lambda all: robot_in(all)["state"]["fingers"]["min"].__setitem__(0, "0"),
        "state.fingers.min[0] are '0', expected a finite number",
    ),
    "a length": (
        lambda all: robot_in(all)["state"]["hand"]["mean"].pop(),
        "state.hand differ in length (min 6, max 6, mean 5, std 6), expected as many numbers of each",
    ),
    "a lower end above": (
        lambda all: robot_in(all)["state"]["hand"]["min"].__setitem__(1, 70.0),
        "state.hand are damaged, min[1] is 70.0, above max, which is",
    ),
    "a deviation": (
        lambda all: robot_in(all)["state"]["hand"]["std"].__setitem__(1, -0.5),
        "state.hand are damaged, std[1] is -0.5, below 0",
    ),
    "no action": (lambda all: robot_in(all).pop("action"), "new_embodiment.action are nothing, expected an object"),
    "no part": (lambda all: robot_in(all).update(action={}), "new_embodiment.action have no numbers, expected one per"),
    "no numbers": (
        lambda all: robot_in(all)["action"].update(everything={key: [] for key in ("min", "max", "mean", "std")}),
        "new_embodiment.action have no numbers, expected one per entry of an action",
    ),
    "video": (lambda all: all[TAG]["modalities"].update(video=["front"]), "new_embodiment.video are ['front'], exp"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_statistics_are_told_before_anything_starts(folder: Path, damage: str) -> None:
    """With the file, what is wrong in it, and what to do; nothing is built from them either."""
    edit, message = DAMAGED[damage]
    rewrite(folder / METADATA, edit)
    said = faults(folder)
    assert f"{folder / METADATA}: the statistics of " in said and message in said
    assert "set model.statistics to Isaac's metadata.json, or to meta/stats.json of a LeRobotDataset" in said
    with pytest.raises(PolicyError, match=re.escape(message)):
        load(folder, video_keys=["front"])


def test_damaged_statistics_of_another_robot_do_not_matter(folder: Path) -> None:
    rewrite(folder / METADATA, lambda content: content.update(oxe_droid=[]))
    assert faults(folder) == ""


def test_statistics_of_no_robot(folder: Path) -> None:
    (folder / METADATA).write_text("{}")
    assert f"{folder / METADATA} has statistics of no robot: set" in faults(folder, "model.embodiment_tag=null")


def test_damaged_statistics_of_demonstrations(folder: Path, tmp_path: Path) -> None:
    """For a checkpoint as for a new model, and in both places where LeRobot keeps them."""
    column = {"min": [0.0], "max": [1.0], "mean": [0.5], "std": [None]}
    path = tmp_path / "stats.json"
    path.write_text(json.dumps({"observation.state": column, "action": column}))
    said = f"{path}: the statistics of new_embodiment.state.state.std[0] are nothing, expected a finite number"
    assert said in faults(folder, f"model.statistics={path}")
    with pytest.raises(ConfigError, match=re.escape(f"model.statistics: {said}")):
        load_config("gym_cartpole", ["env=metaworld/reach_rgb", "model=gr00t", f"model.statistics={path}"])
    as_lerobot(folder, TAG)
    file = next(folder.glob("*_v3.safetensors"))
    save_file(load_file(file) | {"action.std": torch.full((7,), math.nan)}, file)
    assert f"{file}: the statistics of gr1.action.action.std[0] are nan" in faults(folder, "model.embodiment_tag=gr1")


def test_an_action_without_parts(whole: Path) -> None:
    assert "new_embodiment.action have no numbers, expected" in faults(whole, "model.action_keys=[]")


@pytest.mark.parametrize("name", ["config.json", METADATA, SHARD])
def test_missing_and_damaged_files(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:40])
    assert Path(name).name in faults(folder)
    (folder / name).unlink()
    assert Path(name).name in faults(folder)


def test_widths_that_heads_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"model.scratch.hidden_size = 66 cannot be split among 4 heads"):
        load_config("gym_cartpole", ["env=metaworld/reach_rgb", "model=gr00t", "model.scratch.hidden_size=66"])


def test_a_simulator_with_another_state(whole: Path) -> None:
    with pytest.raises(PolicyError, match=r"a state of 8 numbers \(hand, fingers\), the simulator has 5"):
        load(whole, simulator=dataclasses.replace(SPEC, proprio_dim=5))


def test_observations_that_do_not_fit(whole: Path) -> None:
    policy, observation = load(whole), two_views()
    with pytest.raises(PolicyError, match="needs a state of 8 numbers, the observation has none"):
        policy.preprocess(dataclasses.replace(observation, proprio=None))
    with pytest.raises(PolicyError, match=r"takes 2 images per observation, got 1"):
        policy.preprocess(dataclasses.replace(observation, images=observation.images[:, :1]))
    with pytest.raises(PolicyError, match=r"images of the observation is a ndarray, want a tensor: .* PolicyObs.*\.of"):
        policy.preprocess(dataclasses.replace(observation, images=observation.images.numpy()))
    with pytest.raises(PolicyError, match="proprio of the observation is a ndarray, want a tensor"):
        policy.preprocess(dataclasses.replace(observation, proprio=observation.proprio.numpy()))


def test_a_checkpoint_is_needed_without_a_simulator() -> None:
    with pytest.raises(PolicyError, match="give a checkpoint"):
        build_policy(Gr00tConfig(name="gr00t"), None, chunk_size=2, seed=0)
