"""The CNN policy: norms, weights of timm, what the critic trains, cameras, rows alone, images in the batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.models import PolicyError, PolicyObservation, build_policy
from embodyrl.models.cnn.network import build_backbone
from embodyrl.models.cnn.options import CNNConfig, Encoders
from embodyrl.models.libraries import timm

SPEC = SimulatorSpec(
    tasks={"push": "push the cube"},
    actions=(ActionField(name="all", meaning="native", unit="1", low=(-1.0,) * 3, high=(1.0,) * 3),),
    proprio_dim=5,
    max_episode_steps=10,
    control_frequency=20.0,
    cameras=("front", "hand"),
    image_size=(40, 56),
)


def options(**changes: Any) -> CNNConfig:
    given = {"name": "cnn", "encoder": "test_resnet", "image_features": 12, "hidden_sizes": [16]}
    return CNNConfig(**given | changes)


def make(*, spec: SimulatorSpec = SPEC, **changes: Any) -> Any:
    return build_policy(options(**changes), spec, chunk_size=2, seed=1)


def observation(batch: int = 4) -> PolicyObservation:
    draw = np.random.default_rng(5)
    return PolicyObservation(
        images=torch.from_numpy(draw.integers(0, 256, (batch, 2, 40, 56, 3), dtype=np.uint8)),
        proprio=torch.from_numpy(draw.normal(size=(batch, 5)).astype(np.float32)),
        task_descriptions=["push the cube"] * batch,
    )


def test_rollout_and_learning_agree_exactly() -> None:
    policy = make()
    inputs = policy.preprocess(observation())
    acted = policy.act(inputs, "train", torch.Generator().manual_seed(0))
    scored = policy.evaluate(inputs, acted.trace)
    assert torch.equal(scored.logprobs, acted.logprobs) and torch.equal(scored.values, acted.values)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    policy = make()
    seen = observation()
    together = policy.act(policy.preprocess(seen), "eval")
    alone = PolicyObservation(images=seen.images[2:3], proprio=seen.proprio[2:3], task_descriptions=["push the cube"])
    found = policy.act(policy.preprocess(alone), "eval")
    torch.testing.assert_close(found.actions, together.actions[2:3], atol=1e-6, rtol=0)
    torch.testing.assert_close(found.values, together.values[2:3], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["test_resnet", "resnet10t", "test_efficientnet"])
def test_no_batch_normalisation_is_left(name: str) -> None:
    backbone = build_backbone(name, 1).train()
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in backbone.modules())
    assert {part.num_groups for part in backbone.modules() if isinstance(part, torch.nn.GroupNorm)} == {8}
    plain = timm.create_model(name, pretrained=False, num_classes=0, global_pool="")
    assert sum(each.numel() for each in backbone.parameters()) == sum(each.numel() for each in plain.parameters())
    assert backbone(torch.zeros(1, 3, 64, 64)).shape == plain(torch.zeros(1, 3, 64, 64)).shape


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_weights_of_timm_are_read_and_a_saved_policy_does_not_need_them(name: str, tmp_path: Path) -> None:
    theirs = timm.create_model(name, pretrained=False).state_dict()
    file = tmp_path / "timm.safetensors"
    save_file({key: each + 0.25 for key, each in theirs.items() if each.is_floating_point()}, file)
    policy = make(encoder=name, pretrained=str(file))
    convolutions = {
        key: each for key, each in policy.features.encoders[0].backbone.state_dict().items() if "conv" in key
    }
    same = [torch.equal(each, theirs[key] + 0.25) for key, each in convolutions.items() if key in theirs]
    assert same and all(same)
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved, options(encoder=name, pretrained=str(file)))
    file.unlink()
    again = make(encoder=name, pretrained=str(file), checkpoint=str(saved))
    inputs = policy.preprocess(observation())
    assert torch.equal(again.act(inputs, "eval").actions, policy.act(inputs, "eval").actions)
    with pytest.raises(PolicyError, match="does not exist"):
        make(encoder=name, pretrained=str(file))


def test_frames_are_channels_and_weights_for_one_image_are_those_of_all(tmp_path: Path) -> None:
    file = tmp_path / "timm.safetensors"
    theirs = timm.create_model("test_resnet", pretrained=False).state_dict()
    save_file({key: each for key, each in theirs.items() if each.is_floating_point()}, file)
    single, several = (
        make(spec=dataclasses.replace(SPEC, frames=frames), pretrained=str(file), cameras=["hand", "front"])
        for frames in (1, 3)
    )
    seen = observation()
    older = [dataclasses.replace(seen, images=255 - seen.images), dataclasses.replace(seen, images=seen.images // 2)]
    stacked = dataclasses.replace(seen, images=torch.cat([each.images for each in (seen, *older)], 1))
    pixels = several.preprocess(stacked)["images"]
    assert pixels.shape == (4, 2, 9, 40, 56)
    alone = [single.preprocess(each)["images"] for each in (seen, *older)]
    assert torch.equal(pixels, torch.cat(alone, 2))
    backbones = [policy.features.encoders[0].backbone for policy in (single, several)]
    still = torch.cat([alone[0]] * 3, 2)[:, 0]
    torch.testing.assert_close(backbones[1](still), backbones[0](alone[0][:, 0]), atol=1e-5, rtol=1e-5)
    assert (backbones[1](pixels[:, 0]) - backbones[1](still)).abs().max() > 1e-3
    with pytest.raises(PolicyError, match=r"takes 6 image.*got 2"):
        several.preprocess(seen)


def test_other_weights_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    save_file({"stem.weight": torch.zeros(1)}, file)
    with pytest.raises(PolicyError, match=r"pretrained encoder does not fit: missing .*unexpected stem\.weight"):
        make(pretrained=str(file))
    with pytest.raises(PolicyError, match=r"timm has no network 'resnet10'.*did you mean 'resnet10t'"):
        make(encoder="resnet10")


@pytest.mark.parametrize(
    ("changes", "learns"),
    [
        ({}, True),
        ({"critic_gradient": False}, False),
        ({"shared": False}, False),
    ],
)
def test_what_the_value_loss_trains(changes: dict[str, Any], learns: bool) -> None:
    policy = make(**changes)
    inputs = policy.preprocess(observation())
    policy.evaluate(inputs, policy.act(inputs, "eval").trace).values.sum().backward()
    assert any(each.grad is not None for each in policy.features.parameters()) == learns
    assert all(each.grad is not None for each in policy.critic_parameters())
    assert (policy.critic_features is not None) == (changes.get("shared") is False)


def test_cameras_are_read_in_the_order_of_the_option() -> None:
    seen = observation()
    turned = dataclasses.replace(seen, images=seen.images.flip(1))
    straight, crossed, one = make(), make(cameras=["hand", "front"]), make(cameras=["hand"])
    assert torch.equal(crossed.preprocess(turned)["images"], straight.preprocess(seen)["images"])
    assert torch.equal(one.preprocess(seen)["images"], straight.preprocess(seen)["images"][:, 1:])
    assert len(make(encoders=Encoders.each).features.encoders) == 2
    with pytest.raises(PolicyError, match=r"env\.cameras has no 'hnad' - did you mean 'hand'"):
        make(cameras=["hnad"])


def test_without_a_state_none_is_read() -> None:
    blind = dataclasses.replace(SPEC, proprio_dim=0)
    with pytest.raises(PolicyError, match=r"set model\.state=false"):
        make(spec=blind)
    policy = make(spec=blind, state=False)
    assert policy.spec.proprio_dim == 0 and policy.normalizer is None
    assert "proprio" not in policy.preprocess(dataclasses.replace(observation(), proprio=None))
