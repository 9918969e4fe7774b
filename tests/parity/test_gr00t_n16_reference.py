"""The model of GR00T N1.6 against numbers of a public port of NVIDIA's code (see the reference.json beside the cases);
there are none of its images, texts and statistics.

The cases are not part of the repository; `test_gr00t_n17_formula.py` keeps a small part of the check in every clone.
"""

from __future__ import annotations

import copy
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from tokenizers import AddedToken, Tokenizer, models

from embodyrl.models import load_policy
from embodyrl.models.flow.denoising import TimeGrid
from embodyrl.models.flow.policy import masked_error
from embodyrl.models.gr00t.prompts import PIECE
from embodyrl.models.gr00t_n17.eagle import join_patches

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference" / "gr00t_n16"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the reference cases are not beside this clone")
ATOL, RELATIVE = 1.5e-5, 5e-6
"""As for N1.7."""


@cache
def arrays() -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in np.load(REFERENCE / "reference.npz").items()}


def off(name: str, found: Tensor) -> float:
    """Largest error, in tolerances."""
    wanted = arrays()[name]
    assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
    tolerance = ATOL + 2e-6 * float(wanted.abs()) if name == "loss" else ATOL
    if not ("velocity" in name or "actions" in name or name == "loss"):
        tolerance += RELATIVE * float(wanted.abs().max())
    return float((found.detach().double() - wanted.double()).abs().max()) / tolerance


def assert_near(name: str, found: Tensor) -> None:
    share = off(name, found)
    assert share <= 1.0, f"{name}: {share:.2f} of its tolerance"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With statistics and a tokenizer, which the cases lack, and with which nothing is computed here."""
    folder: Path = tmp_path_factory.mktemp("n16") / "checkpoint"
    shutil.copytree(REFERENCE / "checkpoint", folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    (folder / "eagle").chmod(0o755)
    shape = {key: len(arrays()[f"in/{key}"][0, 0]) for key in ("state", "action")}
    ends = {part: {part: {"min": [-1.0] * size, "max": [1.0] * size}} for part, size in shape.items()}
    groups = {part: {"modality_keys": [part]} for part in shape}
    modalities = {"robot": {"video": {"modality_keys": ["first", "second"]}, **groups}}
    (folder / "processor_config.json").write_text(json.dumps({"processor_kwargs": {"modality_configs": modalities}}))
    (folder / "statistics.json").write_text(json.dumps({"robot": ends}))
    eagle = json.loads((folder / "eagle" / "config.json").read_text())
    words = {f"word{number}": number for number in range(eagle["text_config"]["vocab_size"])}
    words[PIECE] = words.pop(f"word{eagle['image_token_index']}")
    tokenizer = Tokenizer(models.WordLevel(words, "word0"))
    tokenizer.add_special_tokens([AddedToken(PIECE, special=True)])
    (folder / "eagle" / "tokenizer.json").write_text(tokenizer.to_str())
    found: Any = load_policy("gr00t_n16", checkpoint=folder, vlm=str(folder / "eagle"), chunk_size=5, embodiment_id=0)
    found.embodiment = arrays()["in/embodiment_id"]
    return found


def embodied(policy: Any) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """What the action head reads, the language model's output, and what is inside; images of a row follow each
    other."""
    case, backbone, seen = arrays(), policy.network.backbone, {}
    cameras = [case["in/pixels0"], case["in/pixels1"]]
    grids = [(camera.shape[2] // backbone.vlm.patch, camera.shape[3] // backbone.vlm.patch) for camera in cameras]
    patches = [backbone.vision_model(camera) for camera in cameras]
    joined = [join_patches(each, grid, backbone.vlm.merge) for each, grid in zip(patches, grids, strict=True)]
    seen["vision"], seen["unshuffled"] = (torch.cat(parts, dim=1).flatten(0, 1)[None] for parts in (patches, joined))
    seen["mlp1"] = backbone.mlp1(seen["unshuffled"])
    assert torch.equal(case["spatial_shapes"], torch.tensor(grids * len(cameras[0])))
    for camera, grid, part in zip(cameras, grids, joined, strict=True):
        assert torch.equal(backbone.see(camera), backbone.mlp1(part)), grid
    last: list[Tensor] = []
    hook = backbone.language_model.layers[-1].register_forward_hook(lambda module, given, output: last.append(output))
    valid = case["in/attention_mask"].bool()
    features = backbone.read(seen["mlp1"], case["in/input_ids"], valid)
    hook.remove()
    seen["backbone/last_layer"] = last[0]
    inputs = {"input_ids": case["in/input_ids"], "attention_mask": valid, "state": case["in/state"]}
    return policy.network.attend(features, inputs, policy.embodiment), features, seen


def velocities(policy: Any, condition: Any) -> Tensor:
    case, head = arrays(), policy.network.action_head
    noise = case["in/noise"]
    hidden = [head.hidden(noise, bucket.expand(len(noise)), condition) for bucket in case["head/buckets"]]
    return torch.stack([head.velocity(each, condition) for each in hidden], dim=1)


def actions(policy: Any, condition: Any) -> Tensor:
    grid, x = TimeGrid.rising(4), arrays()["in/noise"]
    for step in range(4):
        time, _, _ = grid.at(torch.full((len(x),), step))
        x = x - policy.denoise(condition, x, time).velocity / 4
    return x


@torch.inference_mode()
def test_backbone_and_head(policy: Any) -> None:
    condition, features, seen = embodied(policy)
    valid = arrays()["in/attention_mask"].bool()
    for name, found in seen.items():
        assert_near(name, found)
    assert_near("backbone/features", features)
    assert_near("head/vl_embs", condition.context)
    assert_near("head/state_features", condition.state)
    assert_near("head/velocity", velocities(policy, condition))
    assert_near("head/actions_4", actions(policy, condition))
    # Nothing attends to padding, so that what is there does not reach the actions.
    other = copy.copy(condition)
    object.__setattr__(other, "context", condition.context.masked_fill(~valid.unsqueeze(-1), 7.0))
    object.__setattr__(other, "memory", {})
    assert torch.equal(actions(policy, other), actions(policy, condition))


def test_loss_and_its_gradients(policy: Any) -> None:
    case, learning = arrays(), copy.deepcopy(policy)
    condition, _, _ = embodied(learning)
    time, counts = case["in/time"], case["in/action_mask"]
    errors = learning.flow_errors(condition, case["in/action"], case["in/noise"], time, 1.0 - time)
    assert_near("loss_unreduced", errors * counts)
    loss = masked_error(errors, counts)
    assert_near("loss", loss)
    loss.backward()  # type: ignore[no-untyped-call]
    own = {learning.naming.public(name): parameter for name, parameter in learning.network.named_parameters()}
    wanted = [each for each in case if each.startswith("grad/")]
    assert wanted
    for name in wanted:
        assert_near(name, own[name.removeprefix("grad/")].grad)  # type: ignore[arg-type]


def _nudge(path: str) -> Any:
    def mutate(policy: Any) -> None:
        policy.network.get_parameter(path).data.view(-1)[0] += 1e-3

    return mutate


def no_final_norm(policy: Any) -> None:
    policy.network.backbone.language_model.applies_norm = False


def one_layer_fewer(policy: Any) -> None:
    del policy.network.backbone.language_model.layers[-1]


def all_tokens(policy: Any) -> None:
    policy.network.action_head.model.text_every = 1


def other_epsilon(policy: Any) -> None:
    policy.network.backbone.mlp1[0].eps = 1e-6


MUTATIONS = {
    "one weight of the DiT": _nudge("action_head.model.transformer_blocks.0.attn1.to_k.weight"),
    "one weight of the vision tower": _nudge("backbone.vision_model.encoder.layers.0.mlp.fc1.weight"),
    "one learned position": _nudge("backbone.vision_model.embeddings.position_embedding.weight"),
    "no final norm": no_final_norm,
    "one layer fewer": one_layer_fewer,
    "text in every cross-attention": all_tokens,
}


@pytest.mark.parametrize("name", MUTATIONS)
@torch.inference_mode()
def test_the_comparison_bites(policy: Any, name: str) -> None:
    mutated = copy.deepcopy(policy)
    MUTATIONS[name](mutated)
    condition, _, _ = embodied(mutated)
    found = [off("head/velocity", velocities(mutated, condition)), off("head/actions_4", actions(mutated, condition))]
    assert max(found) > 2.0
