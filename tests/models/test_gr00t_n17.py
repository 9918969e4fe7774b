"""GR00T N1.7 and N1.6: files in both layouts, padding, clipping, relative actions, options, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from embodyrl.config import ConfigError, ConfigUse, load_config
from embodyrl.config.build import build_section
from embodyrl.config.schema import LEFT_OPEN, ModelConfig
from embodyrl.models import PolicyError, PolicyObservation, build_policy, load_policy
from embodyrl.models.flow.policy import HEADS_FILE
from embodyrl.models.gr00t_n17.actions import ActionScale
from embodyrl.models.gr00t_n17.checkpoint import CheckpointFiles
from embodyrl.models.gr00t_n17.config import N16, N17, Architecture, Gr00tN16Config, Gr00tN17Config, published_config
from embodyrl.models.gr00t_n17.network import UNUSED, Gr00tNetwork, Names
from embodyrl.models.gr00t_n17.prompts import plain, token_places
from embodyrl.models.gr00t_n17.robots import ActionGroup, Robot, Way
from embodyrl.models.saved import INDEX_FILE, SINGLE_FILE
from embodyrl.models.vla.config import StateInput, WeightType
from embodyrl.planning.weightless import Assuming, build_weightless
from embodyrl.registry import SIMULATORS
from tests.parity import gr00t_formula
from tests.parity.formula import SPEC, TASKS, observation
from tests.parity.gr00t_n17_formula import CHUNK, HORIZON, NORMS, OTHER, STEPS, TAG, rewrite, write_checkpoint

SHARED = Path(__file__).parents[2].parent / "shared" / "reference"
SHARD = "model-00001-of-00001.safetensors"
PREFIX = "_groot_model."
NAMES = {"gr00t_n17": Names(N17.vlm.from_config(N17.published)), "gr00t_n16": Names(N16.vlm.from_config(N16.published))}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_checkpoint(tmp_path_factory.mktemp(name), name) for name in NAMES}


@pytest.fixture
def folder(wholes: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(wholes["gr00t_n17"], tmp_path / "checkpoint"))


def load(folder: Path, model: str = "gr00t_n17", **options: Any) -> Any:
    return load_policy(model, checkpoint=folder, **({"embodiment_tag": TAG, "chunk_size": CHUNK} | options))


def eval_actions(policy: Any) -> torch.Tensor:
    actions: torch.Tensor = policy.act(policy.preprocess(observation(2)), "eval").actions
    return actions


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("version", "tensors", "weights"), [(N17, 1030, 3_144_016_000), (N16, 1107 - 13, 2_960_729_840)]
)
def test_names_and_shapes_at_real_size(version: Any, tensors: int, weights: int) -> None:
    """Without the output layer, and what nothing uses."""
    sizes = Architecture.from_config(published_config(version), version.published, version)
    names = Names(sizes.vlm)
    parameters = dict(Gr00tNetwork.on_meta(sizes).named_parameters())
    shapes = {names.public(name): list(parameter.shape) for name, parameter in parameters.items()}
    assert all(parameter.is_meta for parameter in parameters.values())
    assert all(names.own(names.public(name)) == name for name in parameters)
    assert len(shapes) == tensors and sum(map(math.prod, shapes.values())) == weights
    reference = SHARED / f"gr00t-n1.{7 if version is N17 else 6}-expected-keys.json"
    if not reference.is_file():
        return
    content = json.loads(reference.read_text())
    optional = {key for key in content["keys"] if key == names.output or key.startswith(UNUSED)}
    assert optional == set(content.get("optional", content.get("tied_and_optional")))
    assert shapes == {key: shape for key, shape in content["keys"].items() if key not in optional}
    stated = {"model_type": version.model_type, "select_layer": 16, **content["config"]}
    assert Architecture.from_config(stated, content.get("vlm", content.get("eagle")), version) == sizes


@pytest.mark.parametrize("options", [Gr00tN17Config, Gr00tN16Config])
def test_the_published_size_needs_no_files(options: Any) -> None:
    name = "gr00t_n16" if options is Gr00tN16Config else "gr00t_n17"
    config = options(name=name, checkpoint=LEFT_OPEN, dtype=WeightType.bfloat16, embodiment_tag="libero_sim")
    policy: Any = build_weightless(config, SPEC, chunk_size=8)[0]
    assert policy.embodiment == 2 and policy.spec.action_dim == 7
    seen = torch.zeros(1, 3, 256, 256, 3, dtype=torch.uint8)  # of how many cameras, no file says
    for wrong, why in ((seen[0], "must have shape"), (seen[:, :0], "takes images per observation, got 0")):
        with pytest.raises(PolicyError, match=why):
            policy.preprocess(PolicyObservation(images=wrong, task_descriptions=["pick it up"]))
    with Assuming():
        policy.preprocess(PolicyObservation(images=seen, proprio=torch.zeros(1, 8), task_descriptions=["pick it up"]))
    tokens = 3 * (64 if name == "gr00t_n17" else 81)
    assert tokens < policy.tokens_per_observation("pick it up") < tokens + 60


def as_one_file(folder: Path, edit: Any) -> Path:
    """The same weights, as one file that `edit` has changed."""
    tensors = load_file(folder / SHARD)
    (folder / SHARD).unlink()
    (folder / INDEX_FILE).unlink()
    save_file(edit(tensors), folder / SINGLE_FILE, metadata={"format": "pt"})
    return folder


def in_lerobot(folder: Path) -> Path:
    """The same checkpoint as LeRobot writes it."""
    as_one_file(folder, lambda tensors: {PREFIX + key: value for key, value in tensors.items()})
    settings = json.loads((folder / "processor_config.json").read_text())["processor_kwargs"]
    statistics = json.loads((folder / "statistics.json").read_text())
    for name in ("processor_config.json", "statistics.json", "embodiment_id.json"):
        (folder / name).unlink()
    described = {"raw_stats": statistics[TAG], "modality_config": settings["modality_configs"][TAG]}
    packed = {
        **described,
        "embodiment_tag": TAG,
        "embodiment_mapping": {TAG: 0},
        "use_percentiles": settings["use_percentiles"],
        "clip_outliers": True,
        "formalize_language": True,
    }
    images = ("image_target_size", "shortest_image_edge", "crop_fraction", "use_albumentations", "letter_box_transform")
    before = [
        {"registry_name": "groot_n1_7_pack_inputs_v1", "config": packed},
        {"registry_name": "groot_n1_7_vlm_encode_v1", "config": {name: settings[name] for name in images}},
    ]
    decoded = {**described, "use_relative_action": settings["use_relative_action"]}
    after = [{"registry_name": "groot_n1_7_action_decode_v1", "config": decoded}]
    for name, steps in (("policy_preprocessor.json", before), ("policy_postprocessor.json", after)):
        (folder / name).write_text(json.dumps({"name": name, "steps": steps}))
    config = {"type": "groot", "chunk_size": HORIZON, "n_action_steps": CHUNK, "max_state_dim": 8, "max_action_dim": 7}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def moved(folder: Path) -> Path:
    (folder / "processor").mkdir()
    for name in ("processor_config.json", "statistics.json", "embodiment_id.json"):
        (folder / name).rename(folder / "processor" / name)
    return folder


def with_output(tensors: dict[str, torch.Tensor], *, alone: bool = False) -> dict[str, torch.Tensor]:
    names = NAMES["gr00t_n17"]
    kept = {key: value for key, value in tensors.items() if not (alone and key == names.table)}
    return kept | {names.output: tensors[names.table].clone()}


LAYOUTS: dict[str, Any] = {
    "shards": lambda folder: folder,
    "processor in a folder of its own": moved,
    "output layer as well": lambda folder: as_one_file(folder, with_output),
    "output layer alone": lambda folder: as_one_file(folder, lambda found: with_output(found, alone=True)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_saved_is_what_was_loaded(layout: str, wholes: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    """Byte for byte, and it acts in the same way."""
    policy = load(LAYOUTS[layout](folder))
    assert torch.equal(eval_actions(policy), eval_actions(load(wholes["gr00t_n17"])))
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved, policy.config)
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    assert len(files) > 5
    for name in files:
        # Critic and noise network are no part of public folders; here they lie in 16 bits, and are saved in 32.
        assert name.name == HEADS_FILE or (folder / name).read_bytes() == (saved / name).read_bytes(), name
    assert torch.equal(eval_actions(load(saved)), eval_actions(policy))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with heads of the published width in NVIDIA's layout and in LeRobot's."""
    wide = {"action_size": 96, "hidden_size": 64, "heads": 1, "image_size": 32, "layers": 2, "vision_layers": 2}
    made = build_section(ModelConfig, {"name": "gr00t_n17", "scratch": wide | {"action_horizon": HORIZON}})
    own: Any = build_policy(made, SPEC, chunk_size=CHUNK, seed=0)
    dit = json.loads(own.files.companions["config.json"])["diffusion_model_cfg"]
    dit |= {"num_attention_heads": 2, "attention_head_dim": 48}
    content = json.loads(own.files.companions["config.json"]) | {"diffusion_model_cfg": dit}
    companions = {**own.files.companions, "config.json": json.dumps(content).encode()}
    own.files = dataclasses.replace(own.files, companions=companions)
    first = tmp_path_factory.mktemp("nvidia")
    own.save(first, made)
    (first / "policy.json").unlink()
    groups = json.loads((first / "processor_config.json").read_text())["processor_kwargs"]["modality_configs"]
    for robots in (groups, numbers := json.loads((first / "statistics.json").read_text())):
        robots[TAG] = robots.pop("simulator")
    rewrite(first / "processor_config.json", lambda found: found["processor_kwargs"].update(modality_configs=groups))
    (first / "statistics.json").write_text(json.dumps(numbers))
    return first, in_lerobot(Path(shutil.copytree(first, tmp_path_factory.mktemp("lerobot") / "checkpoint")))


def test_weights_of_lerobot(both: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    """Its config.json has no sizes; they follow from the weights, but for the width of heads, which is the published
    one."""
    first, second = both
    nvidia = load(first, embodiment_id=0)
    policy = load(second)
    assert policy.network.sizes == nvidia.network.sizes
    assert torch.equal(eval_actions(policy), eval_actions(nvidia))
    policy.save(tmp_path, policy.config)
    for path in second.iterdir():
        assert path.is_dir() or path.read_bytes() == (tmp_path / path.name).read_bytes(), path
    with pytest.raises(PolicyError, match="24 wide, which is no multiple of 48, the width of the published"):
        load(in_lerobot(folder))


def test_cameras_of_several_sizes_are_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    """Unless they have one size when the network sees them."""
    folder = Path(shutil.copytree(both[1], tmp_path / "checkpoint"))

    def with_images(*shapes: list[int]) -> str:
        images = {f"observation.images.{at}": {"type": "VISUAL", "shape": shape} for at, shape in enumerate(shapes)}
        rewrite(folder / "config.json", lambda content: content.update(input_features=images))
        return issues(folder)

    wide = with_images([3, 256, 256], [3, 480, 640])
    assert "images have several sizes when the network sees them: observation.images.0 (256 x 256 pixels), " in wide
    assert "take a checkpoint whose cameras have one size" in wide
    assert "several sizes" not in with_images([3, 256, 256], [480, 480, 3])


def test_an_output_layer_that_is_not_the_table_is_refused(folder: Path) -> None:
    names = NAMES["gr00t_n17"]
    as_one_file(folder, lambda tensors: tensors | {names.output: tensors[names.table] + 1.0})
    with pytest.raises(PolicyError, match=r"differs from .*embed_tokens\.weight, to which it is tied"):
        load(folder)


def test_unused_weights_of_n16_are_kept(wholes: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(wholes["gr00t_n16"], tmp_path / "checkpoint"))
    more = {"action_head.mask_token": torch.ones(1, 1, 3), f"{UNUSED[0]}probe": torch.ones(1, 1, 2)}
    as_one_file(folder, lambda tensors: tensors | more)
    policy = load(folder, "gr00t_n16")
    assert torch.equal(eval_actions(policy), eval_actions(load(wholes["gr00t_n16"], "gr00t_n16")))
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved", policy.config)
    assert (folder / SINGLE_FILE).read_bytes() == (tmp_path / "saved" / SINGLE_FILE).read_bytes()


# ----------------------------------------------------------------------------------------------------------- behaviour


def test_padding_reaches_actions_of_n17_alone(wholes: dict[str, Path]) -> None:
    """So it must be the same in rollouts and learning: a saved policy remembers it."""
    for model, reaches in (("gr00t_n17", True), ("gr00t_n16", False)):
        short, long = (load(wholes[model], model, prompt_length=length) for length in (None, 150))
        moved_by = (eval_actions(short) - eval_actions(long)).abs().max().item()
        assert (moved_by > 1e-3) is reaches and (reaches or moved_by < 1e-5), model
    policy = load(wholes["gr00t_n17"], simulator=SPEC)
    assert policy.options_to_save(policy.config).prompt_length == policy.prompts_for((32, 32)).length


def test_the_critic_reads_no_padding(wholes: dict[str, Path]) -> None:
    policy = load(wholes["gr00t_n17"])
    inputs = policy.preprocess(observation(2))
    condition = policy.condition(inputs)
    assert not inputs["attention_mask"].all()
    wanted = torch.stack([row[valid].mean(0) for row, valid in zip(condition.context, condition.valid, strict=True)])
    found = policy.value_features(condition, None)[:, : wanted.shape[1]]
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_what_decoding_clips_does_not_count(wholes: dict[str, Path]) -> None:
    """Neither when it is drawn nor when it is scored: such noise explores nothing."""
    counts, all_count = (load(wholes["gr00t_n17"], count_clipped=each) for each in (False, True))
    inputs = counts.preprocess(observation(2))
    with torch.inference_mode():
        drawn = counts.act(inputs, "train", torch.Generator().manual_seed(0))
        scored = counts.evaluate(inputs, drawn.trace)
        every = all_count.evaluate(inputs, drawn.trace)
    result = drawn.trace["chain"][:, -1, :CHUNK, :7]
    beyond = (result.abs() > 1.0).flatten(1)
    assert 0 < beyond.sum() < beyond.numel()
    assert torch.equal(scored.logprobs == 0.0, beyond) and torch.equal(drawn.logprobs == 0.0, beyond)
    torch.testing.assert_close(scored.logprobs, drawn.logprobs, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(every.logprobs[~beyond], scored.logprobs[~beyond])
    assert (every.logprobs[beyond] != 0.0).all()
    with torch.inference_mode():
        further = drawn.trace["chain"][:, -1].clone()
        further[..., :CHUNK, :][beyond.view(2, CHUNK, 7)] *= 3.0
        assert torch.equal(counts.finish(further, inputs), drawn.actions)


def test_relative_actions_belong_to_the_state_of_the_decision(wholes: dict[str, Path]) -> None:
    policy = load(wholes["gr00t_n17"])
    inputs = policy.preprocess(observation(2))
    further = inputs | {"raw_state": inputs["raw_state"] + 1.0}
    x = torch.zeros(2, HORIZON, policy.start.shape[1])
    step = policy.finish(x, further) - policy.finish(x, inputs)
    assert torch.allclose(step[..., :6], torch.ones(2, CHUNK, 6)) and not step[..., 6].any()
    actions = policy.finish(x, inputs)
    data, counts = policy.sft_targets(actions, inputs)
    assert torch.allclose(data[:, :CHUNK, :6], torch.zeros(2, CHUNK, 6), atol=1e-5)
    assert counts.sum() == 2 * CHUNK * 7 and not counts[:, CHUNK:].any()


def test_a_state_that_is_not_read(wholes: dict[str, Path]) -> None:
    """The network gets zeros; only relative actions need it."""
    policy = load(wholes["gr00t_n17"], state="none")
    inputs = policy.preprocess(observation(2))
    assert not inputs["state"].any() and inputs["raw_state"].any() and policy.spec.proprio_dim == 8
    absolute = build_policy(Gr00tN17Config(name="gr00t_n17", state=StateInput.none), SPEC, chunk_size=2, seed=0)
    unseen = absolute.preprocess(dataclasses.replace(observation(2), proprio=None))
    assert absolute.spec.proprio_dim == 0 and not unseen["state"].any()


def test_poses_are_composed_and_taken_apart() -> None:
    pose = ActionGroup(
        key="hand", size=9, way=Way.min_max, first=-np.ones(9), second=np.ones(9), reference=slice(2, 11), pose=True
    )
    robot = Robot(tag="arm", state=(), action=(pose,), cameras=None, frames=1, steps=None, clip=False)
    scale = ActionScale(robot)
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(3, 12, generator=generator)
    turn = torch.linalg.qr(torch.randn(3, 4, 3, 3, generator=generator))[0]
    turn = turn * torch.linalg.det(turn).sign()[..., None, None]
    actions = torch.cat([torch.randn(3, 4, 3, generator=generator), turn[..., :2, :].flatten(-2)], dim=-1)
    relative = scale.normalize(actions, state)
    torch.testing.assert_close(scale.unnormalize(relative, state, clip=False), actions, atol=1e-5, rtol=1e-5)
    unmoved = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]).expand(3, 1, 9)
    torch.testing.assert_close(scale.unnormalize(unmoved, state)[:, 0, :3], state[:, 2:5])


def test_texts_and_places() -> None:
    assert plain("Pick-up THE cube!!") == "pickup the cube" and plain("") == "perform the task"
    image = np.array([False] * 2 + [True] * 6 + [False] * 2)
    assert token_places(image, (2, 3)).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_statistics_of_demonstrations_make_a_new_robot(folder: Path, tmp_path: Path) -> None:
    entry = {"min": [-2.0] * 8, "max": [2.0] * 8, "q01": [-1.0] * 8, "q99": [1.0] * 8}
    short = {name: column[:7] for name, column in entry.items()}
    (tmp_path / "stats.json").write_text(json.dumps({"observation.state": entry, "action": short}))
    mine = {"embodiment_tag": "mine", "embodiment_id": 0, "simulator": SPEC}
    policy = load(folder, statistics=str(tmp_path / "stats.json"), **mine)
    assert policy.files.robot.cameras == list(SPEC.cameras)
    x = torch.ones(2, HORIZON, policy.start.shape[1])
    inputs = policy.preprocess(observation(2))
    assert torch.equal(policy.finish(x, inputs), torch.ones(2, CHUNK, 7)), "percentiles, as the checkpoint asks for"
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved", policy.config)
    again = load(tmp_path / "saved", **mine)
    assert torch.equal(again.finish(x, inputs), torch.ones(2, CHUNK, 7))


# ------------------------------------------------------------------------------------------------------ what is refused


def issues(folder: Path, *more: str, model: str = "gr00t_n17") -> str:
    """What `embodyrl validate` says of it."""
    words = ["env=libero/spatial", f"model={model}", "algorithm=ppo", f"model.checkpoint={folder}"]
    words += ["env.cameras=[agentview,wrist]", f"rollout.chunk_size={CHUNK}"]
    if not any("embodiment_tag" in each for each in more) and model != "gr00t":
        words.append(f"model.embodiment_tag={TAG}")
    try:
        load_config("gym_cartpole", [*words, *more], use=ConfigUse.elsewhere)  # LIBERO need not be here
    except ConfigError as error:
        return str(error)
    return ""


def test_a_config_that_fits(folder: Path) -> None:
    assert issues(folder) == ""


def change(name: str, edit: Any) -> Any:
    return lambda folder: rewrite(folder / name, edit)


def settings_of(**changes: Any) -> Any:
    return change("processor_config.json", lambda content: content["processor_kwargs"].update(changes))


def groups_of(part: str, **changes: Any) -> Any:
    return change(
        "processor_config.json",
        lambda content: content["processor_kwargs"]["modality_configs"][TAG][part].update(changes),
    )


def no_tokenizer(folder: Path) -> None:
    (folder / "vlm" / "tokenizer.json").unlink()


def no_preprocessor(folder: Path) -> None:
    (folder / "vlm" / "preprocessor_config.json").unlink()


def other_tokenizer(folder: Path) -> None:
    rewrite(folder / "vlm" / "config.json", lambda content: content.update(image_token_id=1))


def no_processor(folder: Path) -> None:
    (folder / "processor_config.json").unlink()


def no_projector(folder: Path) -> None:
    rewrite(folder / "embodiment_id.json", lambda content: content.pop(TAG))
    rewrite(folder / "config.json", lambda content: content.update(max_num_embodiments=2))


EEF = {"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROTVEC", "state_key": "joints"}
FAULTS: dict[str, tuple[Any, tuple[str, ...], str, str]] = {
    "a robot that is not there": (
        None,
        ("model.embodiment_tag=libero_sin",),
        "model.embodiment_tag: .*statistics.json has no statistics of embodiment_tag = 'libero_sin' - did you mean "
        "'libero_sim'",
        "choose one of these, or set model.statistics",
    ),
    "several robots": (None, ("model.embodiment_tag=null",), "has statistics of 2 robots", "set model.embodiment_tag"),
    "a robot without projector": (
        no_projector,
        (),
        "the number of embodiment 'new_embodiment' is not known",
        "set embodiment_id as well",
    ),
    "a projector that is not there": (
        change("embodiment_id.json", lambda content: content.update({TAG: 7})),
        (),
        r"embodiment_id = 7 \(new_embodiment\), but the checkpoint has networks for 0 .. 0 only",
        "",
    ),
    "statistics without a group": (
        change("statistics.json", lambda content: content[TAG]["action"].pop("gripper")),
        (),
        "statistics.json has no statistics of new_embodiment.action.gripper, which processor_config.json names",
        "download both files",
    ),
    "no statistics of relative actions": (
        change("statistics.json", lambda content: content[TAG].pop("relative_action")),
        (),
        "has no statistics of new_embodiment.relative_action.joints",
        "download both files",
    ),
    "lower ends above upper ones": (
        change("statistics.json", lambda content: content[TAG]["state"]["joints"].update(q01=[9.0] * 6)),
        (),
        r"statistics.json: new_embodiment.state.joints: q01\[0\] is 9.0, above q99",
        "download it again",
    ),
    "a horizon longer than the head's": (
        groups_of("action", delta_indices=list(range(40))),
        (),
        "new_embodiment.action.delta_indices names 40 steps, but the model denoises 5 actions at a time",
        "download both files",
    ),
    "a chunk longer than the head's horizon": (
        groups_of("action", delta_indices=None),
        ("rollout.chunk_size=6",),
        "rollout.chunk_size = 6, but the model denoises 5 actions at a time",
        "set rollout.chunk_size to 5 or less",
    ),
    "a chunk longer than what means something": (
        None,
        ("rollout.chunk_size=5",),
        "rollout.chunk_size = 5, but only 4 actions of 'new_embodiment' mean something",
        "set rollout.chunk_size to 4 or less",
    ),
    "another number of cameras": (
        None,
        ("env.cameras=[agentview]",),
        "env.cameras names 1 camera, but the checkpoint was trained with 2 images of 'new_embodiment': front, hand",
        "name a camera of the simulator for each",
    ),
    "actions as poses with rotation vectors": (
        groups_of("action", action_configs=[EEF, EEF | {"rep": "ABSOLUTE"}]),
        (),
        "'joints' are poses as 'xyz.rotvec'; of relative ones only XYZ_ROT6D is implemented",
        "take another robot",
    ),
    "no tokenizer": (
        no_tokenizer,
        (),
        "model.vlm: the checkpoint has no vlm/tokenizer.json",
        "set model.vlm to the folder of Qwen/Qwen3-VL-2B-Instruct",
    ),
    "another tokenizer": (other_tokenizer, (), "has id 4 in the tokenizer, 1 in the model", ""),
    "no processor of the vision-language model": (
        no_preprocessor,
        (),
        "model.vlm: .*vlm has no preprocessor_config.json",
        "set model.vlm to the folder of",
    ),
    "a folder of folders": (
        lambda folder: shutil.copytree(folder, folder / "libero_goal") and (folder / "config.json").unlink(),
        (),
        "holds no config.json",
        "give the folder of a GR00T N1.7 checkpoint, such as ",
    ),
    "another vocabulary": (
        change("vlm/config.json", lambda content: content["text_config"].update(vocab_size=300)),
        (),
        r"vlm/config.json states a vocabulary of 300 tokens \(vocab_size\), the weights have",
        "set model.vlm",
    ),
    "another vision-language model": (
        change("vlm/config.json", lambda content: content.update(model_type="eagle_3_vl")),
        (),
        "vlm/config.json: model_type is 'eagle_3_vl', only 'qwen3_vl'",
        "set model.vlm to the folder of Qwen/Qwen3-VL-2B-Instruct, with config.json",
    ),
    "no processor": (no_processor, (), "the checkpoint has no processor_config.json", "download it, too"),
    "a folder that is no vision-language model": (None, ("model.vlm=nowhere",), "model.vlm = 'nowhere' holds no", ""),
    "a backbone of another width": (
        change("config.json", lambda content: content.update(backbone_embedding_dim=64, vl_self_attention_cfg=None)),
        (),
        "made for a vision-language model of width 64 .*, that of vlm/config.json has width 32",
        "set model.vlm",
    ),
    "an unknown connection": (
        change("config.json", lambda content: content["diffusion_model_cfg"].update(interleave_self_attention=False)),
        (),
        "config.json: diffusion_model_cfg.interleave_self_attention is False, only True is implemented",
        "take another checkpoint",
    ),
    "more layers than there are": (
        change("config.json", lambda content: content.update(select_layer=9)),
        (),
        "config.json: select_layer is 9, at most 2, those there are was expected",
        "",
    ),
    "a prompt that is too short": (None, ("model.prompt_length=9",), "tokens, more than prompt_length = 9", ""),
    "numbers where names belong": (settings_of(modality_configs=[1]), (), "modality_configs is .1., a JSON object", ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_the_file_and_the_remedy(name: str, folder: Path) -> None:
    spoil, words, fault, remedy = FAULTS[name]
    if "prompt" in name and SIMULATORS.entry("libero").missing():
        pytest.skip("LIBERO, which knows the task descriptions, is not installed")
    if spoil is not None:
        spoil(folder)
    found = issues(folder, *words)
    assert re.search(fault, found), found
    assert remedy in found


def test_other_versions_are_told_apart(wholes: dict[str, Path], tmp_path: Path) -> None:
    """By config.json, and where that is LeRobot's, by the names of weights."""
    (tmp_path / "n15").mkdir()
    old = gr00t_formula.write_checkpoint(tmp_path / "n15")
    for folder, model, version, right in (
        (old, "gr00t_n17", "N1.5", "gr00t"),
        (old, "gr00t_n16", "N1.5", "gr00t"),
        (wholes["gr00t_n17"], "gr00t", "N1.7", "gr00t_n17"),
        (wholes["gr00t_n16"], "gr00t_n17", "N1.6", "gr00t_n16"),
        (wholes["gr00t_n17"], "gr00t_n16", "N1.7", "gr00t_n17"),
    ):
        found = issues(folder, model=model)
        assert f"config.json is that of GR00T {version}" in found and f"set model.name to {right}" in found
        spoilt = Path(shutil.copytree(folder, tmp_path / f"{model}-{version}"))
        (spoilt / "config.json").write_text('{"type": "groot"}')
        found = issues(spoilt, model=model)
        assert f"the weights are those of GR00T {version}" in found and f"set model.name to {right}" in found
    with pytest.raises(PolicyError, match=r"set model\.name to gr00t_n17"):
        load_policy("gr00t", checkpoint=wholes["gr00t_n17"])


def test_robots_of_other_files_are_not_read(folder: Path) -> None:
    """What is wrong about another robot is none of this one's business."""
    rewrite(folder / "statistics.json", lambda content: content.update({OTHER: {"state": 3}}))
    assert CheckpointFiles.read(load(folder).config).robot.steps == STEPS
    assert len(TASKS) == 2 and NORMS
