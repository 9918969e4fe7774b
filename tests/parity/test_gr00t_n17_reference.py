"""GR00T N1.7 against numbers of the unmodified public code (see the reference.json beside the cases).

The cases are not part of the repository; `test_gr00t_n17_formula.py` keeps a small part of the check in every clone.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from embodyrl.models import PolicyObservation, load_policy
from embodyrl.models.flow.denoising import TimeGrid, flow_cps, flow_sde
from embodyrl.models.flow.policy import masked_error
from embodyrl.models.gr00t_n17 import images as pictures
from embodyrl.models.gr00t_n17.actions import GroupScale
from embodyrl.models.gr00t_n17.prompts import plain
from embodyrl.models.gr00t_n17.robots import Group, Way
from embodyrl.models.policy import PLAN, PLAN_WEIGHTS
from tests.parity.gr00t_n17_mutations import EPS, MUTATIONS

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference" / "gr00t_n17"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the reference cases are not beside this clone")
TAGS = {"libero": "libero_sim", "droid": "oxe_droid_relative_eef_relative_joint", "new": "new_embodiment"}
ATOL, RELATIVE = 1.5e-5, 5e-6
"""For velocities and actions; for streams and gradients RELATIVE of the largest entry more."""
EXACT = ("pixel_values", "input_ids", "attention_mask", "position_ids", "frame", "image_mask", "mask")


@cache
def arrays() -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in np.load(REFERENCE / "reference.npz").items()}


@cache
def facts() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((REFERENCE / "reference.json").read_text())
    return content


def tolerance(name: str) -> float:
    wanted = arrays()[name].double()
    if name.startswith("eps/"):
        return 1e-6
    if name == "loss":
        return ATOL + 2e-6 * float(wanted.abs())
    if name.startswith(("prep/", "decode/", "groups/")):
        return 1e-6 * max(1.0, float(wanted.abs().max()))
    plain_numbers = "velocity" in name or "actions" in name or "chain" in name
    return ATOL + (0.0 if plain_numbers else RELATIVE * float(wanted.abs().max()))


def off(name: str, found: Tensor) -> float:
    """Largest error, in tolerances."""
    wanted = arrays()[name]
    assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
    return float((found.detach().double() - wanted.double()).abs().max()) / tolerance(name)


def assert_near(name: str, found: Tensor) -> None:
    share = off(name, found)
    assert share <= 1.0, f"{name}: {share:.2f} of its tolerance"


def assert_same(name: str, found: Tensor) -> None:
    wanted = arrays()[name]
    assert torch.equal(found.to(wanted.dtype), wanted.view(found.shape)), name


def load(robot: str = "libero", **options: Any) -> Any:
    horizon = {"libero": 6, "droid": 8, "new": 5}[robot]
    options = {"embodiment_tag": TAGS[robot], "chunk_size": horizon} | options
    return load_policy("gr00t_n17", checkpoint=REFERENCE / "checkpoint", **options)


@pytest.fixture(scope="module")
def policy() -> Any:
    """For rows of three robots."""
    found = load()
    found.embodiment = arrays()["in/embodiment_id"]
    return found


def observation(robot: str, rows: slice = slice(None)) -> tuple[PolicyObservation, Tensor]:
    """The cases' raw inputs; and all images of all times, the oldest first."""
    case, names = arrays(), {"libero": ("image", "wrist_image"), "new": ("front",)}
    cameras = names.get(robot, ("exterior_image_1_left", "wrist_image_left"))
    views = [case[f"raw/{robot}/{camera}"] for camera in cameras]
    frames = torch.stack([view if view.dim() == 5 else view.unsqueeze(1) for view in views], dim=2)
    newest = PolicyObservation(
        images=frames[rows, -1], proprio=case[f"raw/{robot}/state"][rows], task_descriptions=facts()["tasks"][rows]
    )
    return newest, frames.flatten(1, 2)[rows]


def inputs_of(policy: Any, robot: str, rows: slice = slice(None)) -> dict[str, Tensor]:
    newest, every = observation(robot, rows)
    inputs: dict[str, Tensor] = policy.preprocess(newest)
    assert inputs["pixel_values"].shape[1] == every.shape[1]
    return inputs | {"pixel_values": pictures.pixel_values(every, policy.geometry, torch.device("cpu"))}


def with_their_states(inputs: dict[str, Tensor], rows: slice = slice(None)) -> dict[str, Tensor]:
    return inputs | {"state": arrays()["in/state"][rows]}


def chain_of(policy: Any, condition: Any, noise: Tensor, steps: int) -> Tensor:
    """Points of denoising from noise to actions, `[B, K+1, H, A]`."""
    chain = [noise]
    grid = TimeGrid.rising(steps)
    for step in range(steps):
        time, _, _ = grid.at(torch.full((len(noise),), step))
        chain.append(chain[-1] - policy.denoise(condition, chain[-1], time).velocity / steps)
    return torch.stack(chain, dim=1)


# ----------------------------------------------------------------------------------------------------------- processing


@pytest.mark.parametrize("robot", TAGS)
def test_inputs(robot: str) -> None:
    policy, case = load(robot), arrays()
    inputs, (_, every) = inputs_of(policy, robot), observation(robot)
    start = f"prep/{robot}"
    for name in [each for each in case if each.startswith(f"{start}/frame/")]:
        raw = case[f"raw/{robot}/{name.rpartition('/')[2]}"]
        newest = raw if raw.dim() == 4 else raw[:, -1]
        assert_same(name, pictures.change(newest, policy.geometry.frame(*newest.shape[1:3])))
    patches = policy.network.backbone.visual.patches(inputs["pixel_values"].flatten(0, 1))
    assert_same(f"{start}/pixel_values", patches.flatten(0, 1))
    grid = policy.geometry.tokens(*every.shape[2:4])
    merge = policy.network.sizes.vlm.merge
    wanted = torch.tensor([1, grid[0] * merge, grid[1] * merge]).expand(every.shape[0] * every.shape[1], 3)
    assert_same(f"{start}/image_grid_thw", wanted)
    assert_same(f"{start}/input_ids", inputs["input_ids"])
    assert_same(f"{start}/attention_mask", inputs["attention_mask"])
    assert_near(f"{start}/state", inputs["state"])
    assert_same(f"{start}/embodiment_id", torch.tensor(policy.embodiment).expand(3))
    if f"{start}/action" not in case:
        steps = torch.zeros(case[f"{start}/action_mask"].shape)
        steps[:, : policy.files.robot.steps] = 1.0
        assert_same(f"{start}/action_mask", steps)
        return
    data, counts = policy.sft_targets(case[f"raw/{robot}/action"], inputs)
    assert_near(f"{start}/action", data)
    assert_same(f"{start}/action_mask", counts)


@pytest.mark.parametrize("robot", TAGS)
def test_decoding(robot: str) -> None:
    policy, case = load(robot), arrays()
    inputs = policy.preprocess(observation(robot)[0])
    name = "decode/libero/action_plain" if robot == "libero" else f"decode/{robot}/action"
    found = policy.finish(case[f"decode/{robot}/model"], inputs)
    assert_near(name, found)
    if robot == "libero":
        gripper = case["decode/libero/action"][..., -1]
        assert torch.equal(-(2.0 * found[..., -1] - 1.0).sign(), gripper)
        assert_near("decode/libero/action", torch.cat([found[..., :-1], gripper.unsqueeze(-1)], -1))


def test_prompts(policy: Any) -> None:
    for odd, wanted in facts()["odd_strings"].items():
        assert plain(odd) == wanted
    for robot, texts in facts()["prompts"].items():
        other = load(robot)
        prompts = other.prompts_for(tuple(observation(robot)[0].images.shape[2:4]))  # type: ignore[union-attr]
        pieces = prompts.grid[0] * prompts.grid[1]
        for task, text in zip(facts()["tasks"], texts, strict=True):
            assert prompts._write(task) == text.replace("<|image_pad|>", "<|image_pad|>" * pieces)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("torch", {"use_albumentations": False}),
        ("torch_letterbox", {"use_albumentations": False, "letter_box_transform": True}),
        ("cv2_letterbox", {"letter_box_transform": True}),
        ("cv2_crop_size", {"crop_fraction": None, "image_crop_size": [27, 27]}),
    ],
)
def test_other_images(policy: Any, name: str, settings: dict[str, Any]) -> None:
    case = arrays()
    changed = {**policy.files.processing.settings, **settings}
    geometry = type(policy.geometry).read(changed, "processor", policy.network.sizes.vlm, {}, (1, 10**9))
    image = case["image/in"]
    assert_same(f"image/{name}", pictures.change(image[None], geometry.frame(*image.shape[:2]))[0])


def test_other_groups() -> None:
    case = arrays()
    mean, std = case["groups/mean"].numpy(), case["groups/std"].numpy()
    for way in (Way.sin_cos, Way.mean_std):
        group = Group(key="group", size=3, way=way, first=mean, second=std)
        scale = GroupScale(group, clip=True)
        assert_near(f"groups/{way.value}", scale.normalize(case["groups/x"].float()))


# ------------------------------------------------------------------------------------------------------------- backbone


def keep(seen: dict[str, Tensor], name: str) -> Callable[..., None]:
    return lambda module, given, output: seen.update({name: output[0] if isinstance(output, tuple) else output})


@torch.inference_mode()
def test_vision_and_language(policy: Any) -> None:
    case, backbone = arrays(), policy.network.backbone
    inputs, visual, language = inputs_of(policy, "libero"), backbone.visual, backbone.language_model
    grid = inputs["pixel_values"].shape[3] // visual.sizes.patch, inputs["pixel_values"].shape[4] // visual.sizes.patch
    count = inputs["pixel_values"].shape[0] * inputs["pixel_values"].shape[1]
    positions = visual.positions(grid, torch.device("cpu")).expand(count, -1, -1)
    assert_near("backbone/pos_embed", positions.flatten(0, 1))
    parts = {"patch_embed": visual.patch_embed, "merger": visual.merger}
    parts |= {f"vision_block{index}": block for index, block in enumerate(visual.blocks)}
    parts |= {f"deepstack{index}": merger for index, merger in enumerate(visual.deepstack_merger_list)}
    parts |= {f"layer{index}": layer for index, layer in enumerate(language.layers)}
    seen: dict[str, Tensor] = {}
    hooks = [part.register_forward_hook(keep(seen, name)) for name, part in parts.items()]
    first = language.layers[0].register_forward_pre_hook(lambda module, given: seen.update(inputs_embeds=given[0]))
    features = policy.network.backbone(
        *(inputs[name] for name in ("pixel_values", "input_ids", "attention_mask", "places"))
    )
    for hook in (*hooks, first):
        hook.remove()
    for name in [each for each in case if each.startswith("backbone/")]:
        own = name.removeprefix("backbone/")
        if own in seen:
            assert_near(name, seen[own] if seen[own].shape == case[name].shape else seen[own].flatten(0, 1))
    assert len(seen) == len(parts) + 1
    assert_near("backbone/features", features)
    valid = inputs["attention_mask"]
    places = case["backbone/position_ids"].transpose(0, 1)
    assert torch.equal(inputs["places"].transpose(1, 2)[valid], places[:, 1:].transpose(1, 2)[valid])
    assert_same("backbone/attention_mask", valid)
    assert_same("backbone/image_mask", inputs["input_ids"] == policy.network.sizes.vlm.image_token)


@torch.inference_mode()
def test_a_row_without_padding(policy: Any) -> None:
    case = arrays()
    row = int(case["alone/row"])
    rows = slice(row, row + 1)
    alone = copy.copy(policy)
    alone._prompts = {}
    alone.embodiment = case["in/embodiment_id"][rows]
    inputs = with_their_states(inputs_of(alone, "libero", rows), rows)
    assert inputs["attention_mask"].all()
    features = alone.network.backbone(
        *(inputs[name] for name in ("pixel_values", "input_ids", "attention_mask", "places"))
    )
    assert_near("alone/features", features)
    chain = chain_of(alone, alone.condition(inputs), case["in/noise"][rows], 4)
    assert_near("alone/actions_4", chain[:, -1])
    assert (chain[:, -1] - case["head/actions_4"][rows]).abs().max() > 0.1


# ----------------------------------------------------------------------------------------------------------------- head


def velocities(policy: Any, condition: Any, buckets: Tensor) -> Tensor:
    noise = arrays()["in/noise"]
    head = policy.network.action_head
    found = [head.velocity(head.hidden(noise, bucket.expand(len(noise)), condition), condition) for bucket in buckets]
    return torch.stack(found, dim=1)


@pytest.fixture(scope="module")
def condition(policy: Any) -> Any:
    with torch.inference_mode():
        return policy.condition(with_their_states(inputs_of(policy, "libero")))


@torch.inference_mode()
def test_action_head(policy: Any, condition: Any) -> None:
    case, head = arrays(), policy.network.action_head
    assert_near("head/vlln", head.vlln(case["backbone/features"]))
    assert_near("head/vl_embs", condition.context)
    assert_near("head/state_features", condition.state)
    assert_near("head/velocity", velocities(policy, condition, case["head/buckets"]))
    bucket = torch.full((3,), 137)
    encoded = head.action_encoder(case["in/noise"], bucket, policy.embodiment)
    assert_near("head/action_features", encoded + head.position_embedding.weight[: encoded.shape[1]])
    seen: dict[str, Tensor] = {}
    parts = {"temb": head.model.timestep_encoder, "dit_out": head.model}
    parts |= {f"dit_block{index}": block for index, block in enumerate(head.model.transformer_blocks)}
    hooks = [part.register_forward_hook(keep(seen, name)) for name, part in parts.items()]
    head.hidden(case["in/noise"], bucket, condition)
    for hook in hooks:
        hook.remove()
    for name, output in seen.items():
        assert_near(f"head/{name}", output)
    assert {f"head/{name}" for name in seen} == {each for each in case if each.startswith(("head/dit", "head/temb"))}


@torch.inference_mode()
def test_denoising(policy: Any, condition: Any) -> None:
    case = arrays()
    chain = chain_of(policy, condition, case["in/noise"], 4)
    assert_near("head/chain_4", chain)
    assert_near("head/actions_4", chain[:, -1])
    assert_near("head/actions_7", chain_of(policy, condition, case["in/noise"], 7)[:, -1])
    plain_dit = copy.deepcopy(policy)
    plain_dit.network.action_head.model.text_every = None
    every = dataclasses.replace(condition, text=None, images=None, memory={})
    assert_near("plain_dit/actions_4", chain_of(plain_dit, every, case["in/noise"], 4)[:, -1])


@torch.inference_mode()
def test_real_time_chunking(condition: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, case = load(rtc=1.0, rtc_method="blended"), arrays()
    policy.embodiment = case["in/embodiment_id"]
    monkeypatch.setattr(policy, "recalled", lambda plan, inputs: plan)  # it is in the network's numbers already
    horizon, overlap, frozen, rate = 7, 4, 2, 6.0  # as reference.json says
    plan = torch.zeros_like(case["rtc/previous"])
    plan[:, :overlap] = case["rtc/previous"][:, horizon - overlap : horizon]
    ramp = 1.0 - (-rate * torch.linspace(0.0, 1.0, overlap - frozen + 2)).exp()
    weights = torch.zeros(plan.shape[:2])
    weights[:, :frozen], weights[:, frozen:overlap] = 1.0, 1.0 - (ramp / ramp[-1])[1:-1]
    inputs = with_their_states(inputs_of(policy, "libero")) | {PLAN: plan, PLAN_WEIGHTS: weights}
    decision = policy.decide(policy.condition(inputs), inputs, "eval", start=case["in/noise"])
    assert_near("rtc/actions", decision.trace["chain"][:, -1])
    assert torch.equal(decision.trace["chain"][:, -1, :frozen], plan[:, :frozen])


# ------------------------------------------------------------------------------------------------------------- learning


def test_loss_and_its_gradients() -> None:
    policy, case = load(), arrays()
    policy.embodiment = case["in/embodiment_id"]
    policy.network.requires_grad_(True)
    condition = policy.condition(with_their_states(inputs_of(policy, "libero")))
    time, counts = case["in/time"], case["in/action_mask"]
    errors = policy.flow_errors(condition, case["in/action"], case["in/noise"], time, 1.0 - time)
    assert_near("loss_unreduced", errors * counts)
    loss = masked_error(errors, counts)
    assert_near("loss", loss)
    loss.backward()  # type: ignore[no-untyped-call]
    wanted = [each for each in case if each.startswith("grad/")]
    own = {policy.naming.public(name): parameter for name, parameter in policy.network.named_parameters()}
    for name in wanted:
        gradient = own[name.removeprefix("grad/")].grad
        if gradient.shape != case[name].shape:  # of the robots that are there
            gradient = gradient[case["in/embodiment_id"]]
        assert_near(name, gradient)
    assert [name for name, parameter in own.items() if parameter.grad is None] == facts()[
        "no_gradient_when_all_unfrozen"
    ]


@torch.inference_mode()
def test_random_steps() -> None:
    case, grid = arrays(), TimeGrid.rising(4)
    _, before, after = grid.at(case["rl/steps"])
    for name, method, level in (("flow_sde", flow_sde, 0.5), ("flow_cps", flow_cps, 0.3)):
        levels = torch.full((3, 1, 1), level)
        transition = method(case["rl/x"], -case["rl/velocity"], before, after, levels)
        for part, found in (("mean", transition.mean), ("std", transition.std)):
            assert_near(f"rl/{name}/{part}", found)
        wanted, found = case[f"rl/{name}/logprobs"], transition.logprob(case["rl/next"])
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=2e-6)


@torch.inference_mode()
def test_small_numbers_in_norms(policy: Any) -> None:
    for name, norm in EPS.items():
        assert_near(f"eps/{name}/out", norm(policy.network, arrays()[f"eps/{name}/in"]))


@torch.inference_mode()
def test_bfloat16() -> None:
    policy, case = load(), arrays()
    policy.embodiment = case["in/embodiment_id"]
    inputs = with_their_states(inputs_of(policy, "libero"))
    with torch.autocast("cpu", torch.bfloat16):
        features = policy.network.backbone(
            *(inputs[name] for name in ("pixel_values", "input_ids", "attention_mask", "places"))
        )
        chain = chain_of(policy, policy.condition(inputs), case["in/noise"], 4)
    valid = inputs["attention_mask"]
    for name, found in (("bf16/features", features.float()[valid]), ("bf16/actions_4", chain[:, -1])):
        wanted = case[name] if "actions" in name else case[name][valid]
        assert (found - wanted).abs().mean() < 0.05 * wanted.abs().mean(), name


@pytest.mark.parametrize("name", MUTATIONS)
@torch.inference_mode()
def test_the_comparison_bites(policy: Any, name: str) -> None:
    mutated, case = copy.deepcopy(policy), arrays()
    inputs = MUTATIONS[name](mutated, with_their_states(inputs_of(policy, "libero")))
    condition = mutated.condition(inputs)
    errors = [
        off("head/velocity", velocities(mutated, condition, case["head/buckets"])),
        off("head/actions_4", chain_of(mutated, condition, case["in/noise"], 4)[:, -1]),
        *(off(f"eps/{part}/out", norm(mutated.network, case[f"eps/{part}/in"])) for part, norm in EPS.items()),
    ]
    assert max(errors) > 2.0
