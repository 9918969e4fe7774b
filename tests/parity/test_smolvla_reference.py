"""SmolVLA against numbers of unmodified LeRobot 0.6.1.

The cases are not part of the repository; `test_smolvla_formula.py` keeps a small part of the check in every clone.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the extra vla")

from embodyrl.models import PolicyError, load_policy
from embodyrl.models.flow.denoising import TimeGrid, flow_cps, flow_sde
from embodyrl.models.lerobot import Scale
from embodyrl.models.policy import ACTION_WEIGHTS
from embodyrl.models.saved import PUBLISHED
from embodyrl.models.smolvla.config import SmolVLAConfig
from embodyrl.models.smolvla.network import action_mask, time_embedding
from embodyrl.models.smolvla.policy import SmolVLAPolicy
from embodyrl.models.vla.processor import Normalizer, fitted
from tests.parity.smolvla_mutations import MUTATIONS
from tests.parity.smolvla_reference import KEYS, REFERENCE, Case, excess

pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the reference cases are not beside this clone")
ALL_CROSS = {
    "checkpoint": REFERENCE / "checkpoint-all-cross",
    "vlm": str(REFERENCE / "checkpoint" / "vlm"),
    "statistics": str(REFERENCE / "checkpoint" / "policy_preprocessor_step_5_normalizer_processor.safetensors"),
}


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert excess(found, wanted, absolute=1e-5, relative=2e-6, largest=False) <= 1.0


def assert_near_largest(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """For residual streams and losses."""
    assert excess(found, wanted, absolute=1e-5, relative=5e-6, largest=True) <= 1.0


# ---- inputs


def test_images_are_resized_and_padded_on_the_left_and_above(case: Case) -> None:
    side = case["in/images"].shape[-1]
    for number in range(2):
        found = fitted(case[f"raw/camera{number + 1}"].unsqueeze(1), side, torch.device("cpu"), centred=False)[:, 0]
        there = case["in/image_masks"][:, number]
        assert_near(found[there], case["in/images"][:, number][there])


def test_states_and_actions_are_normalised(case: Case) -> None:
    policy = case.policy()
    for name, normalizer in (("state", policy.states), ("actions", policy.actions)):
        found = normalizer.normalize(case[f"raw/{name}"])
        assert_near(found, case[f"norm/{name}"])
        assert_near(torch.nn.functional.pad(found, (0, 8 - found.shape[-1])), case[f"in/{name}"])
    mean, std = np.array([1.0, 2.0]), np.array([0.0, 1e-9])
    edge = Normalizer(Scale(mean, std + 1e-8, std))
    torch.testing.assert_close(edge.normalize(case["norm_edge/x"]), case["norm_edge/normalized"], rtol=1e-6, atol=0)
    assert_near(edge.unnormalize(case["norm_edge/x"]), case["norm_edge/unnormalized"])


def test_task_descriptions_become_the_same_tokens(case: Case) -> None:
    ids, mask = case.policy().prompts.batch(case.about["tasks"])
    assert np.array_equal(ids, case["in/tokens"]) and np.array_equal(mask, case["in/token_mask"])
    assert mask.dtype == bool and ids.dtype == np.int64


# ---- the network


@torch.inference_mode()
def test_every_stage_up_to_the_velocity(case: Case) -> None:
    network = case.policy().network
    assert_near(network.vision(case["in/images"][:, 0]), case["vision"])
    assert_near(network.see(case["in/images"])[:, 0], case["connector"])
    embedded, mask = case.embedded(network)
    state = network.state_proj(case["in/state"]).unsqueeze(1)
    assert_near_largest(torch.cat([embedded, state], dim=1), case["prefix_embs"])
    assert torch.equal(torch.nn.functional.pad(mask, (0, 1), value=True), case["prefix_pad_masks"])
    time = case["in/time"]
    assert torch.equal(time_embedding(time, case["time_emb"].shape[1], 0.004, 4.0), case["time_emb"])
    mixed = time[:, None, None] * case["in/noise"] + (1 - time[:, None, None]) * case["in/actions"]
    assert_near(mixed, case["x_t"])
    assert_near(network.embed_suffix(case["x_t"], time), case["suffix_embs"])
    there = case["prefix_pad_masks"]
    for name, found in case.streams(network).items():
        if name not in case.arrays:  # not all layers' keys and values were kept
            assert name.startswith("cache/")
        elif name.startswith(("layers/", "prefix_out", "suffix_out")):
            kept = there if found.shape[1] == there.shape[1] else torch.ones(found.shape[:2], dtype=torch.bool)
            assert_near_largest(found[kept], case[name][kept])
        elif name.startswith("cache/"):
            assert_near(found.transpose(1, 2)[there], case[name].transpose(1, 2)[there])
        else:
            assert_near(found, case[name])
    assert_near(case.velocity(network), case["velocity_train"])


def test_who_attends_to_whom(case: Case) -> None:
    there, length = case["prefix_pad_masks"], case.horizon
    wanted = case["attention_2d"]
    images_and_text = case["prefix_att_masks"] == 0
    assert torch.equal(action_mask(there, length)[:, 0], wanted[:, -length:])
    prefix = there[:, None, :] & there[:, :, None] & (images_and_text[:, None, :] | ~images_and_text[:, :, None])
    assert torch.equal(prefix, wanted[:, :-length, :-length]) and not wanted[:, :-length, -length:].any()
    behind = there.sum(1, keepdim=True) + torch.arange(length)
    assert torch.equal(torch.cat([there.long().cumsum(1) - 1, behind], dim=1), case["position_ids"])
    assert bool((case["suffix_att_masks"] == 1).all())


@pytest.mark.parametrize("steps", [4, 10])
@torch.inference_mode()
def test_actions(case: Case, steps: int) -> None:
    policy = case.seeing(case.policy(denoising_steps=steps))
    acted = policy.act({"seen": case["in/noise"]}, "eval")
    chain = acted.trace["chain"]
    assert_near(chain[:, -1], case[f"actions_{steps}"])
    if steps == 4:
        assert_near(chain, case["chain_4"])
        velocities = (chain[:, :-1] - chain[:, 1:]) * steps
        assert excess(velocities, case["velocities_4"], absolute=4e-5, relative=8e-6, largest=False) <= 1.0
    else:
        assert_near(policy.actions.normalize(acted.actions), case["chunk"])
        assert_near(acted.actions, case["chunk_raw"])


@torch.inference_mode()
def test_times_are_not_added_up(case: Case) -> None:
    policy = case.seeing(case.policy(denoising_steps=10))
    policy.grid = TimeGrid.falling(10, summed=True)
    reached = policy.act({"seen": case["in/noise"]}, "eval").trace["chain"][:, -1]
    assert_near(reached, case["actions_10_accumulated"])
    assert excess(reached, case["actions_10"], absolute=1e-5, relative=2e-6, largest=False) > 2.0


def test_loss_and_gradients(case: Case) -> None:
    policy = case.policy()
    policy.condition = lambda _: case.prefix(policy.network)
    time = case["in/time"]
    errors = policy.flow_errors(case.prefix(policy.network), case["in/actions"], case["in/noise"], time, time)
    assert_near_largest(errors, case["loss"])
    raw = case["raw/actions"]
    inputs = {ACTION_WEIGHTS: torch.ones(raw.shape[:2])}
    draws = {"time": (time - 0.001) / 0.999, "noise": case["in/noise"]}
    loss = policy.sft_loss(inputs, raw, draws)
    loss.backward()
    assert_near_largest(loss, case["loss_mean"])
    weights = policy.network.state_dict(keep_vars=True)
    for name in [name for name in case.arrays if name.startswith("grad/")]:
        own = policy.naming.own(name.removeprefix("grad/"))
        assert_near_largest(weights[own].grad, case[name])
    still = {policy.naming.public(name) for name, each in policy.network.named_parameters() if each.grad is None}
    assert still == set(case.about["no_gradient_when_all_unfrozen"])
    assert still == {
        policy.naming.public(name) for name, each in policy.network.named_parameters() if not each.requires_grad
    }
    valid = ~case["in/action_is_pad"]
    inputs = {ACTION_WEIGHTS: valid / valid.float().mean()}
    assert_near_largest(policy.sft_loss(inputs, raw, draws), case["loss_masked"])
    each = torch.stack([errors[row, valid[row], : case.entries].mean() for row in range(len(errors))])
    assert_near_largest(each, case["loss_per_sample"])


def test_what_learns_by_default(case: Case) -> None:
    policy = case.policy(frozen="language")
    learns = {policy.naming.public(name) for name, each in policy.network.named_parameters() if each.requires_grad}
    wanted = set(case.about["trainable_by_default"]) - {"lm_expert.layers.* (all)"}
    assert {name for name in learns if ".lm_expert.layers." not in name} == wanted
    assert all(each.requires_grad for each in policy.network.expert.parameters())


@torch.inference_mode()
def test_transitions_of_rollouts(case: Case) -> None:
    x, reached, steps, velocity = (case[f"rl/{name}"] for name in ("x", "next", "steps", "velocity"))
    rows = torch.arange(len(x))
    for method, level, transition in (("flow_sde", 0.5, flow_sde), ("flow_cps", 0.3, flow_cps)):
        policy = case.seeing(case.policy(denoising_steps=4, noise_method=method, noise_level=level))
        time, before, after = policy.grid.at(steps)
        assert_near(policy.denoise(policy.condition({}), x, time).velocity, velocity)
        found = transition(x, velocity, before, after, torch.tensor(level))
        for name, numbers in (("mean", found.mean), ("std", found.std), ("logprobs", found.logprob(reached))):
            assert_near_largest(numbers, case[f"rl/{method}/{name}"])
        chain = torch.zeros(len(x), 5, *x.shape[1:])
        chain[rows, steps], chain[rows, steps + 1] = x, reached
        trace = {"chain": chain, "step": steps, "noise_level": torch.full((len(x),), level)}
        scored = policy.evaluate({"seen": x}, trace).logprobs
        wanted = case[f"rl/{method}/logprobs"][..., : case.entries].flatten(1)
        # d logprob / d mean = (x - mean) / std^2 multiplies the last digits of the velocity.
        assert excess(scored, wanted, absolute=5e-5, relative=5e-6, largest=True) <= 1.0


# ---- options of checkpoints


@torch.inference_mode()
def test_markers_of_images(case: Case, tmp_path: Path) -> None:
    folder = case.changed(tmp_path / "marked", add_image_special_tokens=True)
    policy = case.policy(checkpoint=folder, denoising_steps=10)
    seen = policy.network.see(case["in/images"][:, :2])  # the third one is empty: no camera shows it
    shown = case["in/image_masks"][:, :2]
    embedded, mask = policy.network.embed(seen, shown, case["in/tokens"], case["in/token_mask"])
    whole = torch.nn.functional.pad(mask, (0, 1), value=True)
    assert torch.equal(whole, case["special_tokens/prefix_pad_masks"])
    assert_near_largest(embedded[mask], case["special_tokens/prefix_embs"][:, :-1][mask])
    policy.condition = lambda _: policy.network.add_state(policy.network.read(embedded, mask), mask, case["in/state"])
    policy.start = case["in/noise"]
    assert_near(policy.act({"seen": seen}, "eval").trace["chain"][:, -1], case["special_tokens/actions_10"])


@torch.inference_mode()
def test_a_longer_prefix_changes_nothing(case: Case, tmp_path: Path) -> None:
    folder = case.changed(tmp_path / "long", prefix_length=int(case["prefix_length/value"]))
    policy = case.seeing(case.policy(checkpoint=folder, denoising_steps=10))
    assert_near(policy.act({"seen": case["in/noise"]}, "eval").trace["chain"][:, -1], case["prefix_length/actions_10"])


@torch.inference_mode()
def test_a_checkpoint_whose_layers_all_cross(case: Case) -> None:
    policy = case.seeing(case.policy(**ALL_CROSS, denoising_steps=10))
    embedded, _ = case.embedded(policy.network)
    state = policy.network.state_proj(case["in/state"]).unsqueeze(1)
    assert_near_largest(torch.cat([embedded, state], dim=1), case["all_cross/prefix_embs"])
    time = case["in/time"]
    errors = policy.flow_errors(case.prefix(policy.network), case["in/actions"], case["in/noise"], time, time)
    assert_near_largest(errors, case["all_cross/loss"])
    assert_near(policy.act({"seen": case["in/noise"]}, "eval").trace["chain"][:, -1], case["all_cross/actions_10"])


@torch.inference_mode()
def test_weights_in_16_bits(case: Case) -> None:
    policy = case.seeing(case.policy(denoising_steps=10, dtype="bfloat16"))
    wide = ("state_proj", "action_", "expert.layers.1.self_attn.k_proj", "expert.layers.3.self_attn.v_proj")
    for name, parameter in policy.network.named_parameters():
        odd = name.startswith(wide) or (
            (".self_attn.k_proj" in name or ".self_attn.v_proj" in name)
            and any(name.startswith(f"expert.layers.{number}.") for number in (1, 3))
        )
        assert parameter.dtype is (torch.float32 if odd else torch.bfloat16), name
    time = case["in/time"]
    errors = policy.flow_errors(case.prefix(policy.network), case["in/actions"], case["in/noise"], time, time)
    embedded, _ = case.embedded(policy.network)
    state = policy.network.state_proj(case["in/state"]).unsqueeze(1)
    numbers = {
        "prefix_embs": torch.cat([embedded.float(), state], dim=1),
        "actions_10": policy.act({"seen": case["in/noise"]}, "eval").trace["chain"][:, -1],
        "loss_mean": errors[..., : case.entries].mean(),
    }
    for name, found in numbers.items():
        allowed = 2 * (case[f"bf16/{name}"] - case[name]).abs().max()
        assert (found - case[f"bf16/{name}"]).abs().max() <= allowed, name


# ---- files


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_what_is_saved_is_what_was_loaded(case: Case, tmp_path: Path, dtype: str) -> None:
    policy = case.policy()
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved, SmolVLAConfig(name="smolvla", checkpoint=str(REFERENCE / "checkpoint")))
    for path in (REFERENCE / "checkpoint").rglob("*"):
        if path.is_file() and path.name != "processor_config.json":
            assert (saved / path.relative_to(REFERENCE / "checkpoint")).read_bytes() == path.read_bytes(), path.name
    again = load_policy("smolvla", checkpoint=saved, dtype=dtype)
    assert again.spec == policy.spec


def test_buffers_of_older_files_are_read_and_kept(case: Case, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = case.changed(tmp_path / "old")
    steps = load_file(folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    for path in folder.glob("policy_*processor*"):
        path.unlink()
    weights = load_file(folder / "model.safetensors")
    buffers = {
        f"{place}.buffer_{feature.replace('.', '_')}.{number}": steps[f"{feature}.{number}"].clone()
        for place, feature in zip(
            ("normalize_inputs", "normalize_targets", "unnormalize_outputs"),
            ("observation.state", "action", "action"),
            strict=True,
        )
        for number in ("mean", "std")
    }
    save_file(weights | buffers, folder / "model.safetensors", metadata={"format": "pt"})
    policy = case.policy(checkpoint=folder)
    assert_near(policy.states.normalize(case["raw/state"]), case["norm/state"])
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved, SmolVLAConfig(name="smolvla"))
    assert (saved / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_statistics_of_other_data_sets_are_refused(case: Case, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = case.changed(tmp_path / "foreign")
    for path in folder.glob("*_processor.safetensors"):
        prefixed = {f"so100.buffer.{name}": each for name, each in load_file(path).items() if name.startswith("action")}
        save_file(prefixed, path)
    with pytest.raises(PolicyError, match=r"has: so100\.buffer\.action, of other data sets.*model\.statistics"):
        case.policy(checkpoint=folder)
    stats = tmp_path / "stats.json"
    numbers = {"mean": [0.0] * 5, "std": [2.0] * 5, "min": [0.0] * 5, "max": [1.0] * 5, "count": [9]}
    stats.write_text(json.dumps({"observation.state": numbers, "action": {k: v[:4] for k, v in numbers.items()}}))
    policy = case.policy(checkpoint=folder, statistics=str(stats))
    assert policy.states.divisor.tolist() == pytest.approx([2.0 + 1e-8] * 5)
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved, SmolVLAConfig(name="smolvla"))
    assert load_policy("smolvla", checkpoint=saved).states.divisor.tolist() == policy.states.divisor.tolist()


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("num_expert_layers", 2, "num_expert_layers is 2 and num_vlm_layers 4"),
        ("adapt_to_pi_aloha", True, "adapt_to_pi_aloha is True, which is not implemented"),
        ("num_vlm_layers", 9, "num_vlm_layers is 9, but the vision-language model has 5 layers"),
        ("resize_imgs_with_padding", [64, 32], "the vision tower reads images of 32 x 32 pixels"),
        ("expert_width_multiplier", 0.7, "weights in .* do not fit"),
        ("normalization_mapping", {"STATE": "LOG", "ACTION": "MEAN_STD"}, "STATE is 'LOG', which is not"),
        ("type", "pi0", "that of a 'pi0' model"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_by_name(case: Case, tmp_path: Path, setting: str, value: object, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        case.policy(checkpoint=case.changed(tmp_path / "other", **{setting: value}))


def test_names_shapes_and_numbers_of_the_published_size() -> None:
    wanted = json.loads(KEYS.read_text())
    with torch.device("meta"):
        policy = SmolVLAPolicy(SmolVLAConfig(name="smolvla", checkpoint=PUBLISHED), None, 50)
    own = {policy.naming.public(name): list(each.shape) for name, each in policy.network.named_parameters()}
    assert own == wanted["keys"] and len(own) == 500
    numbers = [each.numel() for each in policy.network.parameters() if each.requires_grad]
    assert sum(each.numel() for each in policy.network.parameters()) == 450_046_176
    assert sum(numbers) == 99_880_992


# ---- the comparison itself


@pytest.mark.parametrize("name", MUTATIONS)
@torch.inference_mode()
def test_the_comparison_bites(case: Case, name: str) -> None:
    network = case.policy().network
    MUTATIONS[name](network)
    assert excess(case.velocity(network), case["velocity"], absolute=1e-5, relative=2e-6, largest=False) > 2.0
