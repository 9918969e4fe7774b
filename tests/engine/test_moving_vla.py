"""A vision-language-action model whose tensors leave the device for a while, or go to a policy elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from vla import TASK_DESCRIPTIONS, make_batch, make_engine, make_observation

from embodyrl.config.schema import LoraConfig, Offload
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.sync import SharedReceiver, SharedSender
from embodyrl.models import Policy, PolicyObservation

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'embodyrl[vla]'"
)
RANKS = [0, pytest.param(4, marks=needs_peft)]
"""Of adapters; 0: all weights learn."""


def learned(folder: Path, setting: Offload, rank: int) -> HybridEngine:
    engine = make_engine(kl_coef=0.1, folder=folder, offload=setting, lora=LoraConfig(rank=rank))
    for _ in range(3):
        engine.learner.update(make_batch(engine), TASK_DESCRIPTIONS)
    return engine


@pytest.mark.parametrize("rank", RANKS)
def test_offloading_changes_no_number(disk: Path, rank: int) -> None:
    plain, moved = (learned(disk, setting, rank) for setting in (Offload.none, Offload.all))
    for name, tensor in moved.policy.state_dict().items():
        assert torch.equal(tensor, plain.policy.state_dict()[name]), name
    # With adapters the reference is the policy without them: nothing of its own that could leave.
    freed = {"memory/optimizer_freed_mib"} | ({"memory/reference_freed_mib"} if rank == 0 else set())
    assert moved.offload.metrics().keys() == freed and not plain.offload.metrics()


def decide(policy: Policy) -> Tensor:
    with torch.inference_mode():
        seen = policy.preprocess(PolicyObservation.of(make_observation()))
        return policy.act(seen, "train", torch.Generator().manual_seed(3)).logprobs.clone()


@needs_peft
def test_of_an_adapted_policy_adapters_and_heads_travel_alone() -> None:
    engine, elsewhere = (make_engine(lora=LoraConfig(rank=4)) for _ in range(2))
    for parameter in elsewhere.policy.parameters():
        nn.init.normal_(parameter, std=0.1)
    sender = SharedSender(engine.policy, timeout_s=1.0)
    receiver = SharedReceiver(elsewhere.policy, sender.address, timeout_s=1.0)
    sizes = []
    for version in range(3):
        sizes.append(sender.send(version))
        receiver.receive(version)
        assert torch.equal(decide(elsewhere.policy), decide(engine.policy)), version
        engine.learner.update(make_batch(engine), TASK_DESCRIPTIONS)
    learning = sum(each.numel() * 4 for each in engine.policy.parameters() if each.requires_grad)
    everything = sum(each.numel() * 4 for each in engine.policy.parameters())
    assert everything <= sizes[0] and learning <= sizes[1] == sizes[2] < 0.5 * sizes[0]
