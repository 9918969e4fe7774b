"""What OpenVLA and OpenVLA-OFT share: files, statistics, images, prompts, tokens, options."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from slow import rest_slow

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from embodyrl.config import ConfigError, ConfigUse, load_config
from embodyrl.config.rules import checkpoint_notes
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.models import PolicyError, PolicyObservation, build_policy, load_policy
from embodyrl.models.openvla_oft.config import OpenVLAOFTConfig, OpenVLAOFTInfo
from embodyrl.models.prismatic.config import Architecture, Interpolation, ScratchConfig
from embodyrl.models.prismatic.network import NAMING, PrismaticNetwork, checkpoint_name
from embodyrl.models.prismatic.processor import ActionBins
from embodyrl.models.sampling import TokenDistribution
from embodyrl.models.saved import INDEX_FILE
from embodyrl.models.vla.resize import resize_as_tensorflow
from embodyrl.models.weights import write_weights
from tests.parity.formula import CHUNK, SPEC, TASKS, observation, statistics, write_checkpoint

SHARED = Path(__file__).parents[2].parent / "shared" / "reference"
BIG = Architecture(
    towers=("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"),
    image_sizes=(224, 224),
    activations=(None, None),
    deep_projector=True,
    text={"vocab_size": 32064, "pad_token_id": 32000},
    padding=64,
    bins=256,
)
SHARD = "model-00001-of-00001.safetensors"
OFT = {"unnorm_key": "first", "chunk_size": CHUNK}
L1 = OFT | {"action_head": "l1", "num_images": 2, "use_proprio": True}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "checkpoint"))


def oft(folder: Path, **options: Any) -> Any:
    return load_policy("openvla_oft", checkpoint=folder, **(OFT | options))


# ----------------------------------------------------------------------------------------------------------- weights


def test_names_and_shapes_at_real_size() -> None:
    parameters = dict(PrismaticNetwork.on_meta(BIG).named_parameters())
    shapes = {checkpoint_name(name): list(parameter.shape) for name, parameter in parameters.items()}
    assert all(parameter.is_meta for parameter in parameters.values())
    assert len(shapes) == 982 and sum(map(math.prod, shapes.values())) == 7_541_237_184
    assert shapes["language_model.lm_head.weight"] == [32064, 4096]
    assert shapes["vision_backbone.featurizer.blocks.0.ls1.scale_factor"] == [1024]
    reference = SHARED / "openvla-7b-expected-keys-reference.json"
    if reference.is_file():
        assert shapes == json.loads(reference.read_text())


def test_a_round_trip_in_bfloat16_is_exact_to_the_byte(whole: Path, tmp_path: Path) -> None:
    policy = load_policy("openvla_oft", checkpoint=whole, dtype="bfloat16", **L1)
    policy.save(tmp_path, policy.config)
    before, after = load_file(whole / SHARD), load_file(tmp_path / SHARD)
    assert before.keys() == after.keys()
    assert all(after[key].dtype == torch.bfloat16 and torch.equal(before[key], after[key]) for key in before)
    for head in ("action_head", "proprio_projector"):
        tensors = [
            torch.load(place / f"{head}--latest_checkpoint.pt", weights_only=True) for place in (whole, tmp_path)
        ]
        assert tensors[0].keys() == tensors[1].keys() and all(key.startswith("module.") for key in tensors[0])
        assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
    for name in ("config.json", "dataset_statistics.json", "tokenizer.json", "preprocessor_config.json"):
        assert json.loads((whole / name).read_text()) == json.loads((tmp_path / name).read_text())


def test_shards_are_cut_where_they_are_full_and_read_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embodyrl.models.weights.SHARD_BYTES", 40_000)
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / SHARD).unlink()
    policy = oft(whole)
    write_weights(policy.network, tmp_path, NAMING)
    shards = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert len(set(index["weight_map"].values())) > 3
    for path in set(shards) - {tmp_path / "value_head.safetensors"}:
        with safe_open(path, "pt") as shard:
            assert {name for name, file in index["weight_map"].items() if file == path.name} == set(shard.keys())
    again = oft(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))


def test_loading_gives_up_each_tensor_before_it_reads_the_next(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a checkpoint in another type are converted one by one: no second copy of the model exists."""
    import weakref

    import embodyrl.models.weights as weights

    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    original = weights._tensors

    def watched(path: Path) -> Any:
        nonlocal most
        for name, tensor in original(path):
            alive.append(weakref.ref(tensor))
            most = max(most, sum(reference() is not None for reference in alive))
            yield name, tensor

    monkeypatch.setattr(weights, "_tensors", watched)
    oft(whole, dtype="float32")
    assert len(alive) > 100 and most <= 2


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / SHARD)
    edit(tensors)
    save_file(tensors, folder / SHARD)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("projector.fc1.bias"), "missing projector.fc1.bias"),
        (
            lambda t: t.update({"vision_backbone.featurizer.blocks.0.ls1.gamma2": torch.ones(2)}),
            "unexpected vision_backbone.featurizer.blocks.0.ls1.gamma2",
        ),
        (
            lambda t: t.update({"projector.fc1.bias": torch.ones(3)}),
            r"projector.fc1.bias has shape \[3\], expected \[640\]",
        ),
        (
            lambda t: t.pop("vision_backbone.fused_featurizer.blocks.1.ls2.scale_factor"),
            "missing vision_backbone.fused_featurizer.blocks.1.ls2.scale_factor",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(folder: Path, edit: Any, message: str) -> None:
    change(folder, edit)
    with pytest.raises(PolicyError, match=message):
        oft(folder)


def test_a_truncated_shard(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:5000])
    with pytest.raises(PolicyError, match=r"00001\.safetensors is damaged or cut short .* download it again"):
        oft(folder)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


@pytest.mark.parametrize(
    ("name", "spoil"),
    [(SHARD, cut), (SHARD, Path.unlink), ("config.json", cut), ("action_head--latest_checkpoint.pt", Path.unlink)],
)
def test_a_config_is_checked_against_its_checkpoint(folder: Path, name: str, spoil: Any) -> None:
    settings = ["env=libero/goal", "env.cameras=[agentview]", "env.start_states=40", "eval.episodes=10"]
    settings += ["model=openvla_oft", f"model.checkpoint={folder}", "model.unnorm_key=first"]
    settings += ["model.action_head=l1", "algorithm=sft", "data.path=nowhere"]
    config = load_config("gym_cartpole", settings, use=ConfigUse.elsewhere).config
    assert list(OpenVLAOFTInfo("openvla_oft").check(config)) == []
    spoil(folder / name)
    [issue] = OpenVLAOFTInfo("openvla_oft").check(config)
    assert issue.where == "model.checkpoint" and name.partition("--")[0] in issue.message


def test_statistics_of_another_robot_are_refused_before_anything_starts(folder: Path) -> None:
    settings = ["env=gym/pendulum_rgb", "model=openvla_oft", f"model.checkpoint={folder}", "model.unnorm_key=first"]
    with pytest.raises(ConfigError, match="the statistics are of actions with 7 numbers, the simulator has 1 - choose"):
        load_config("gym_cartpole", settings)


def test_statistics_are_checked_before_anything_starts(folder: Path) -> None:
    settings = ["env=libero/goal", "env.cameras=[agentview,wrist]", "env.start_states=40", "eval.episodes=10"]
    settings += ["model=openvla_oft", f"model.checkpoint={folder}", "model.unnorm_key=second", "model.num_images=2"]
    settings += ["model.action_head=l1", "model.use_proprio=true", "algorithm=sft", "data.path=nowhere"]
    config = load_config("gym_cartpole", settings, use=ConfigUse.elsewhere).config
    seven, path = [0.0] * 7, folder / "dataset_statistics.json"
    good = json.loads(path.read_text())
    rows: list[tuple[Any, str]] = [
        ({"second": None}, "the statistics of 'second': action is None, an object with q01 and q99 was expected"),
        ({"second": [1]}, "action is None, an object"),
        ({"action": {"q01": seven}}, "the checkpoint's statistics lack q99 (have: q01)"),
        ({"action": {"q01": seven, "q99": None}}, "action.q99 is None, a list of numbers was expected"),
        ({"action": {"q01": seven, "q99": []}}, "action.q99 is [], a list of numbers was expected"),
        ({"action": {"q01": seven, "q99": [*seven[1:], "x"]}}, "action.q99[6] is 'x', a finite number"),
        ({"action": {"q01": seven, "q99": [float("nan"), *seven[1:]]}}, "action.q99[0] is nan, a finite number"),
        ({"action": {"q01": seven, "q99": [-1.0, *seven[1:]]}}, "action.q01[0] is 0.0, above q99, which is -1.0"),
        ({"action": {"q01": seven, "q99": seven, "mask": None}}, "action.mask is None, a list of true and false"),
        ({"action": {"q01": seven, "q99": seven, "mask": []}}, "action.q01, q99 and mask have 7, 7 and 0 numbers"),
        ({"action": {"q01": seven, "q99": seven, "mask": [1] * 7}}, "action.mask is [1, 1, 1, 1, 1, 1, 1], a list of"),
        ({"proprio": None}, "proprio is None, an object with q01 and q99 was expected"),
    ]
    faults = []
    for change, wanted in rows:
        content = {**good, **change} if "second" in change else {**good, "second": {**good["second"], **change}}
        path.write_text(json.dumps(content))
        said = [issue.message for issue in OpenVLAOFTInfo("openvla_oft").check(config)]
        faults += [] if said and wanted in said[0] else [(wanted, said)]
        with pytest.raises(PolicyError) as caught:
            oft(folder, **L1 | {"unnorm_key": "second"})
        faults += [] if wanted in str(caught.value) else [(wanted, str(caught.value))]
    path.unlink()
    for own, wanted in (
        (None, "has no statistics of any data set"),
        ([], "norm_stats is [], an object with data sets"),
    ):
        change_of = json.loads((folder / "config.json").read_text()) | {"norm_stats": own}
        (folder / "config.json").write_text(json.dumps(change_of))
        said = [issue.message for issue in OpenVLAOFTInfo("openvla_oft").check(config)]
        faults += [] if said and wanted in said[0] else [(wanted, said)]
    assert not faults


@pytest.mark.parametrize("name", [SHARD, "config.json", "tokenizer.json", "preprocessor_config.json"])
def test_a_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(PolicyError, match=rf"{name}"):
        oft(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "dataset_statistics.json"])
def test_a_damaged_file(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(PolicyError, match=rf"{name}.*download it again"):
        oft(folder)


def test_a_file_of_another_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(PolicyError, match="has no 'timm_model_ids': it is not that of an OpenVLA model"):
        oft(folder)


def test_a_missing_head_is_named(folder: Path) -> None:
    (folder / "action_head--latest_checkpoint.pt").unlink()
    with pytest.raises(PolicyError, match=r"holds no action_head--\*_checkpoint\.pt"):
        oft(folder, **L1)


def test_parts_that_the_model_was_trained_with_are_not_left_out_in_silence(folder: Path) -> None:
    """Tokens of a model that was trained with a regression head were never trained: training ran for days without any
    reward."""
    common = ["env=libero/goal", "env.cameras=[agentview]", "env.start_states=40", "eval.episodes=10"]
    common += ["model=openvla_oft", f"model.checkpoint={folder}", "model.unnorm_key=first"]

    def said(*settings: str) -> str:
        try:
            loaded = load_config("gym_cartpole", [*common, *settings], use=ConfigUse.elsewhere)
        except ConfigError as error:
            return str(error)
        return "\n".join(checkpoint_notes(loaded.config))

    head, projector = "action_head--latest_checkpoint.pt is not", "proprio_projector--latest_checkpoint.pt is not"
    found = said()
    assert head in found and "set model.action_head to l1" in found
    assert projector in found and "set model.use_proprio to true" in found and "2 faults" in found
    assert head not in said("model.use_proprio=true", "algorithm=sft", "data.path=nowhere", "model.action_head=l1")
    assert projector not in said("model.use_proprio=true") and head in said("model.use_proprio=true")
    assert head in said("model=openvla", "rollout.chunk_size=1") and "2 faults" not in said("algorithm=sft")
    assert head in said("algorithm=sft", "data.path=nowhere")
    for name, what in (("vision_backbone", "FiLM"), ("noisy_action_projector", "denoises actions")):
        path = folder / f"{name}--latest_checkpoint.pt"
        path.touch()
        assert f"{path} shows a model" in said() and what in said()
        with pytest.raises(PolicyError, match=f"{name}--latest_checkpoint.pt shows a model"):
            oft(folder)
        path.unlink()


def test_two_files_of_a_head(folder: Path) -> None:
    path = folder / "action_head--latest_checkpoint.pt"
    shutil.copy(path, folder / "action_head--50_checkpoint.pt")
    with pytest.raises(PolicyError, match="several files of the action_head"):
        oft(folder, **L1)


class Bomb:
    """What a pickle could do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("exploded"),)


def test_no_pickle_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    torch.save({"module.x": Bomb()}, folder / "action_head--latest_checkpoint.pt")
    with pytest.raises(PolicyError, match="holds more than tensors"):
        oft(folder, **L1)
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_of_peft_is_added(whole: Path, tmp_path: Path, rslora: bool) -> None:
    from peft import LoraConfig, get_peft_model

    plain = oft(whole)
    kind = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", use_rslora=rslora, init_lora_weights=False)
    adapted = get_peft_model(oft(whole).network, kind)
    adapted.save_pretrained(str(tmp_path))
    policy = oft(whole, adapter=str(tmp_path))
    found = dict(policy.network.named_parameters())
    for name, parameter in adapted.merge_and_unload().named_parameters():
        torch.testing.assert_close(found[name], parameter, atol=1e-6, rtol=0)
    assert not torch.equal(found["projector.fc1.weight"], plain.network.projector.fc1.weight)


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        ("projector.fc9", (640, 160), "changes layers that the model does not have: projector.fc9"),
        ("projector.fc1", (3, 160), r"projector.fc1 is \[3, 160\], the model has \[640, 160\]"),
    ],
)
def test_an_adapter_of_another_model(whole: Path, tmp_path: Path, layer: str, shape: Any, message: str) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    pair = {"lora_A": torch.ones(2, shape[1]), "lora_B": torch.ones(shape[0], 2)}
    tensors = {f"base_model.model.{layer}.{part}.weight": tensor for part, tensor in pair.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(PolicyError, match=message):
        oft(whole, adapter=str(tmp_path))


def test_a_folder_without_an_adapter(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"holds no adapter_config\.json"):
        oft(whole, adapter=str(tmp_path))


# -------------------------------------------------------------------------------------------------------- statistics


def test_an_unknown_data_set_lists_the_known(whole: Path) -> None:
    with pytest.raises(PolicyError, match=r"unnorm_key = 'secnd' - did you mean 'second'\? \(known: first_no_noops, s"):
        oft(whole, unnorm_key="secnd")


def test_several_data_sets_ask_for_a_choice(whole: Path) -> None:
    with pytest.raises(PolicyError, match="several data sets: set unnorm_key to one of first_no_noops, second"):
        oft(whole, unnorm_key=None)


def test_missing_statistics_are_named(folder: Path) -> None:
    broken = statistics(0.1)
    del broken["action"]["q99"]  # type: ignore[attr-defined]
    (folder / "dataset_statistics.json").write_text(json.dumps({"first": broken}))
    with pytest.raises(PolicyError, match="statistics lack q99"):
        oft(folder)


def test_actions_by_hand(whole: Path) -> None:
    policy = oft(whole)
    action = statistics(0.1)["action"]
    low, high = (np.array(action[name]) for name in ("q01", "q99"))  # type: ignore[index]
    numbers = np.tile(np.linspace(-1, 1, 7), (1, CHUNK)).astype(np.float32)
    wanted = 0.5 * (numbers.reshape(CHUNK, 7) + 1) * (high - low) + low
    wanted[:, 6] = numbers[0, 6]  # not masked
    actions = policy.finish(torch.from_numpy(numbers))
    np.testing.assert_allclose(actions[0].numpy(), wanted, atol=1e-6)
    np.testing.assert_allclose(policy.normalize(actions).numpy(), numbers, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ tokens


def test_bins_by_hand() -> None:
    bins = ActionBins(256)
    edges = np.linspace(-1, 1, 256)
    centres = (edges[1:] + edges[:-1]) / 2
    assert bins.decode(torch.tensor([255, 0, 1])).tolist() == pytest.approx([centres[0], centres[254], centres[254]])
    numbers = np.random.default_rng(0).uniform(-1.2, 1.2, 500)
    wanted = 256 - np.digitize(np.clip(numbers, -1, 1), edges)
    assert bins.encode(torch.from_numpy(numbers).float()).tolist() == wanted.tolist()
    # The highest number has a token of its own, which stands for the same centre as the next.
    tokens = torch.arange(1, 256)
    assert torch.equal(bins.encode(bins.decode(tokens)), tokens)


def distribution(**changes: Any) -> TokenDistribution:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    return TokenDistribution(logits, **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} | changes))


def probabilities(given: TokenDistribution) -> list[float]:
    return [float(given.logprobs(torch.tensor([token])).exp()) for token in range(4)]


def test_temperature_top_k_and_top_p_by_hand() -> None:
    assert probabilities(distribution()) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    squares = np.array([1, 4, 9, 16]) / 30
    assert probabilities(distribution(temperature=0.5)) == pytest.approx(squares.tolist())
    assert probabilities(distribution(top_k=2)) == pytest.approx([0, 0, 3 / 7, 4 / 7])
    assert probabilities(distribution(top_p=0.6)) == pytest.approx([0, 0, 3 / 7, 4 / 7])
    assert probabilities(distribution(top_p=0.75)) == pytest.approx([0, 2 / 9, 3 / 9, 4 / 9])
    assert probabilities(distribution(top_p=0.01)) == pytest.approx([0, 0, 0, 1])
    entropy = -(3 / 7 * math.log(3 / 7) + 4 / 7 * math.log(4 / 7))
    assert distribution(top_k=2).entropy().item() == pytest.approx(entropy)


def test_a_drawn_token_keeps_a_finite_logprob_when_weights_move_it_out_of_reach() -> None:
    moved = distribution(top_k=2, chosen=torch.tensor([0]))
    assert probabilities(moved) == pytest.approx([1 / 8, 0, 3 / 8, 4 / 8])
    assert moved.entropy().isfinite().all()
    inside = distribution(top_k=2, chosen=torch.tensor([3]))
    assert probabilities(inside) == probabilities(distribution(top_k=2))


def test_samples_follow_the_probabilities() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(20000, 4)
    given = TokenDistribution(logits, temperature=1.0, top_k=3, top_p=1.0)
    tokens = given.sample(torch.Generator().manual_seed(0))
    assert torch.bincount(tokens, minlength=4).div(20000).tolist() == pytest.approx([0, 2 / 9, 3 / 9, 4 / 9], abs=0.01)


# ---------------------------------------------------------------------------------------------------------- images


def test_images_are_resized_by_pil_and_normalised_per_tower(folder: Path) -> None:
    config = json.loads((folder / "preprocessor_config.json").read_text())
    config["tvf_normalize_params"][1] = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    seen = observation(1)
    assert seen.images is not None
    pixels = oft(folder).preprocess(seen)["pixel_values"]
    resized = np.asarray(Image.fromarray(seen.images[1, 0].numpy()).resize((32, 32), Image.Resampling.BICUBIC)) / 255
    np.testing.assert_allclose(pixels[1, :3].numpy(), (resized.transpose(2, 0, 1) - 0.5) / 0.5, atol=1e-6)
    second = (resized - [0.1, 0.2, 0.3]) / [0.4, 0.5, 0.6]
    np.testing.assert_allclose(pixels[1, 3:].numpy(), second.transpose(2, 0, 1), atol=1e-6)


def test_images_are_resized_as_public_evaluations_do(folder: Path) -> None:
    seen = observation(1)
    assert seen.images is not None
    found = oft(folder, interpolation=Interpolation.lanczos3).preprocess(seen)["pixel_values"]
    resized = resize_as_tensorflow(seen.images[1, :1], (32, 32), Image.Resampling.LANCZOS)[0] / 255
    np.testing.assert_allclose(found[1, :3].numpy(), (resized.permute(2, 0, 1) - 0.5) / 0.5, atol=1e-6)
    assert not torch.equal(found, oft(folder).preprocess(seen)["pixel_values"])


def test_the_centre_crop_samples_where_tensorflow_does(whole: Path) -> None:
    """By the formula of crop_and_resize: y = y1 (H - 1) + i (y2 - y1) (H - 1) / (h - 1), bilinear."""
    draw = np.random.default_rng(0)
    image = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    side = math.sqrt(0.9)
    first = (1 - side) / 2
    places = first * 31 + np.arange(32) * side
    low = np.floor(places).astype(int)
    part = places - low
    rows = image[low] * (1 - part)[:, None, None] + image[np.minimum(low + 1, 31)] * part[:, None, None]
    both = rows[:, low] * (1 - part)[None, :, None] + rows[:, np.minimum(low + 1, 31)] * part[None, :, None]
    wanted = np.floor(both / 255 * 255.5).clip(0, 255)
    pixels = oft(whole, center_crop=True).images(torch.from_numpy(image)[None, None])
    found = (pixels[0, :3] * 0.5 + 0.5) * 255
    difference = np.abs(found.numpy() - wanted.transpose(2, 0, 1))
    assert (difference > 0.01).mean() < 0.01 and difference.max() < 1.01  # a sum that falls on an edge of rounding


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (None, "needs images"),
        (torch.zeros(1, 1, 48, 48, 3), "must be uint8 .*got float32"),
        (torch.zeros(1, 48, 48, 3, dtype=torch.uint8), r"must have shape \[B, V, H, W, 3\], got \[1, 48, 48, 3\]"),
        (torch.zeros(1, 1, 3, 48, 48, dtype=torch.uint8), r"got \[1, 1, 3, 48, 48\]"),
        (torch.zeros(1, 2, 48, 48, 3, dtype=torch.uint8), r"takes 1 image per observation, got 2"),
    ],
)
def test_wrong_images(whole: Path, images: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        oft(whole).preprocess(PolicyObservation(images=images, task_descriptions=["pick"]))


@pytest.mark.parametrize("proprio", [None, torch.zeros(2, 7)])
def test_wrong_states(whole: Path, proprio: Any) -> None:
    seen = observation(2)
    seen.proprio = proprio
    with pytest.raises(PolicyError, match="needs a state of 8 numbers, the observation has"):
        oft(whole, **L1).preprocess(seen)


# ----------------------------------------------------------------------------------------------------------- prompts


def test_padding_stands_behind_the_first_token_and_does_not_change_with_the_batch(whole: Path) -> None:
    prompts = load_policy("openvla_oft", checkpoint=whole, simulator=SPEC, **(OFT | {"num_images": 2})).prompts
    short, long = sorted((prompts.encode(task) for task in TASKS.values()), key=len)
    ids, mask = prompts.batch(["pick up the red cube"])
    pads = len(long) - len(short)
    assert pads > 0
    assert ids.tolist() == [[short[0], *[prompts.pad] * pads, *short[1:]]]
    assert mask.tolist() == [[True, *[False] * pads, *[True] * (len(short) - 1)]]


def test_a_task_description_that_is_too_long(whole: Path) -> None:
    with pytest.raises(PolicyError, match=r"task description has \d+ tokens, the model takes \d+: 'go go"):
        oft(whole).preprocess(
            PolicyObservation(images=torch.zeros(1, 1, 32, 32, 3, dtype=torch.uint8), task_descriptions=["go " * 3000])
        )


# ----------------------------------------------------------------------------------------------------------- options


def arms(gripper: tuple[float, float] = (-1.0, 1.0), **changes: Any) -> SimulatorSpec:
    """A simulator of which an action of 1 moves the hand by 5 cm, and -1 opens the gripper."""
    arm = ActionField(name="arm", meaning="delta_position", unit="m", low=(-1.0,) * 3, high=(1.0,) * 3, scale=0.05)
    wrist = ActionField(name="wrist", meaning="delta_rotation", unit="rad", low=(-1.0,) * 3, high=(1.0,) * 3, scale=0.5)
    opens, closes = gripper
    grip = ActionField(name="grip", meaning="gripper", unit="1", low=(-1.0,), high=(1.0,), opens=opens, closes=closes)
    arguments: dict[str, Any] = {
        "tasks": TASKS,
        "actions": (arm, wrist, grip),
        "proprio_dim": 8,
        "max_episode_steps": 10,
        "control_frequency": 20.0,
        "cameras": ("front",),
        "image_size": (32, 32),
    }
    return SimulatorSpec(**(arguments | changes))


def test_grippers_and_units_are_converted(whole: Path) -> None:
    raw = torch.tensor([[[0.02, 0.0, -0.4, 0.1, 0.0, -2.0, 0.9], [0.0] * 6 + [0.2]]])

    def converted(**options: Any) -> torch.Tensor:
        spec = options.pop("spec", arms())
        return oft(whole, simulator=spec, **options).units(raw)

    assert converted()[0, 0].tolist() == pytest.approx([0.02, 0.0, -0.4, 0.1, 0.0, -1.0, -1.0])
    assert converted()[0, 1, 6].item() == 1.0  # closes
    assert converted(spec=arms((1.0, -1.0)))[0, :, 6].tolist() == [1.0, -1.0]
    assert converted(binary_gripper=False)[0, :, 6].tolist() == pytest.approx([-0.8, 0.6])
    assert converted(gripper="simulator")[0, :, 6].tolist() == pytest.approx([0.9, 0.2])
    metric = converted(action_units="metric")[0, 0].tolist()
    assert metric == pytest.approx([0.4, 0.0, -1.0, 0.2, 0.0, -1.0, -1.0])


def test_conversion_can_be_undone_for_demonstrations(whole: Path) -> None:
    policy = oft(whole, simulator=arms(), action_units="metric")
    demonstrated = torch.tensor([[[0.5, -0.2, 0.1, 0.05, 0.1, -0.3, -1.0], [0.0] * 6 + [1.0]]])
    again = policy.finish(policy.normalize(demonstrated))
    torch.testing.assert_close(again, demonstrated, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (arms(cameras=("front", "hand")), {}, r"takes 1 image, the simulator has 2 cameras \(front, hand\)"),
        (arms(actions=arms().actions[:2]), {}, "an action of the model has 7 numbers, the simulator takes 6"),
        (arms(proprio_dim=4), {"use_proprio": True}, "takes a state of 8 numbers, the simulator has 4"),
    ],
)
def test_a_simulator_that_does_not_fit(whole: Path, spec: SimulatorSpec, options: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        oft(whole, simulator=spec, **options)


def outcome(folder: Path, **options: Any) -> torch.Tensor:
    policy = oft(folder, **options)
    inputs = policy.preprocess(observation(1))
    scored = policy.evaluate(inputs, {"tokens": torch.full((2, policy.entries), 7)})
    actions = policy.finish(torch.full((2, policy.entries), 0.25))
    return torch.cat([scored.logprobs.flatten(), actions.flatten()]).detach()


@pytest.mark.parametrize(
    "options",
    [
        {"unnorm_key": "second"},
        {"temperature": 1.5},
        {"top_k": 5},
        {"top_p": 0.5},
        {"center_crop": True},
        {"dtype": "bfloat16"},
        {"use_proprio": True},
        {"append_stop_token": False},
        {"normalization": "min_max"},
    ],
    ids=str,
)
def test_every_option_matters(whole: Path, options: dict[str, Any]) -> None:
    assert not torch.equal(outcome(whole), outcome(whole, **options))


@pytest.mark.parametrize(
    "change",
    [
        {"vision": ["test_vit2", "test_vit3"]},
        {"image_size": 48},
        {"hidden_size": 48},
        {"layers": 3},
        {"heads": 2},
        {"mlp_size": 32},
        {"initializer_range": 0.5},
    ],
    ids=str,
)
def test_every_size_of_a_new_model_matters(change: dict[str, Any]) -> None:
    def outcome(**sizes: Any) -> torch.Tensor:
        scratch = ScratchConfig(**({"image_size": 32, "hidden_size": 32, "layers": 2, "mlp_size": 48} | sizes))
        config = OpenVLAOFTConfig(name="openvla_oft", scratch=scratch)
        policy = build_policy(config, arms(), chunk_size=1, seed=1)
        return policy.act(policy.preprocess(observation(1)), "eval").logprobs

    assert not torch.equal(outcome(), outcome(**change))


def test_frozen_vision_learns_nothing(whole: Path) -> None:
    def learned(**options: Any) -> set[str]:
        return {name for name, parameter in oft(whole, **options).named_parameters() if parameter.requires_grad}

    frozen = {name for name in learned() - learned(freeze_vision=True)}
    assert frozen and all("vision_backbone" in name for name in frozen)
    assert not any("vision_backbone" in name for name in learned(freeze_vision=True))


def test_openvla_takes_one_action_at_a_time(whole: Path) -> None:
    with pytest.raises(PolicyError, match=r"set rollout\.chunk_size=1, not 4"):
        load_policy("openvla", checkpoint=whole, unnorm_key="second", chunk_size=4)


def test_a_head_without_probabilities_cannot_be_sampled(whole: Path) -> None:
    policy = oft(whole, **L1)
    inputs = policy.preprocess(observation(2))
    with pytest.raises(PolicyError, match="is a regression without probabilities"):
        policy.act(inputs, "train", torch.Generator())
    with pytest.raises(PolicyError, match="is a regression without probabilities"):
        policy.evaluate(inputs, {})


@pytest.mark.parametrize(
    ("name", "options"), rest_slow([("openvla", {}), ("openvla_oft", L1), ("openvla_oft", OFT)], 2)
)
def test_demonstrations_are_learned(whole: Path, name: str, options: dict[str, Any]) -> None:
    policy: Any = load_policy(name, checkpoint=whole, **({"unnorm_key": "first"} | options))
    inputs = policy.preprocess(observation(options.get("num_images", 1)))
    wanted = torch.linspace(-0.1, 0.15, 2 * policy.entries).view(2, -1, 7)
    descent = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(100):  # with 40, rounding decides whether five of fourteen tokens are learned
        descent.zero_grad()
        loss = policy.sft_loss(inputs, wanted, {})
        loss.backward()
        descent.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    if name == "openvla":
        tokens = policy.bins.encode(policy.normalize(wanted))
        assert (policy.act(inputs, "eval").trace["tokens"] == tokens).float().mean() > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nimages": 2}, "unknown key 'nimages' - did you mean 'num_images'"),
        ({"action_head": "l2"}, "action_head must be one of discrete, l1"),
        ({"temperature": 0.0}, "temperature = 0.0 is too small"),
    ],
)
def test_wrong_options(whole: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        oft(whole, **options)


def test_the_public_names_need_one_import(whole: Path) -> None:
    program = (
        "import embodyrl\n"
        f"policy = embodyrl.models.load_policy('openvla', checkpoint={str(whole)!r}, unnorm_key='second')\n"
        "import torch\n"
        "images = torch.zeros(1, 1, 9, 9, 3, dtype=torch.uint8)\n"
        "seen = embodyrl.models.PolicyObservation(images=images, task_descriptions=['Wave'])\n"
        "print(tuple(policy.act(policy.preprocess(seen), mode='eval').actions.shape))"
    )
    done = programs.run(["-c", program], preload=programs.VLA, check=True)
    assert done.stdout.strip() == "(1, 1, 7)"
