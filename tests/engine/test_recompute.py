from __future__ import annotations

import importlib.util

import pytest
import torch
import vla
from engines import make_policy

from embodyrl.config.schema import LoraConfig, Precision
from embodyrl.engine.compute import recompute_blocks
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.minibatch import to_columns
from embodyrl.models import PolicyError, PolicyObservation

SETTINGS = {
    "plain": {},
    "bfloat16": {"precision": Precision.bfloat16},
    "adapters": {"lora": LoraConfig(rank=4)},
    "both": {"precision": Precision.bfloat16, "lora": LoraConfig(rank=4)},
}


def engine_of(name: str, **more: object) -> HybridEngine:
    if "lora" in SETTINGS[name] and importlib.util.find_spec("peft") is None:
        pytest.skip("needs peft: pip install 'embodyrl[vla]'")
    return vla.make_engine(**SETTINGS[name], **more)


def gradients(engine: HybridEngine) -> tuple[torch.Tensor, int]:
    """Gradients of an update's loss, and the bytes that its forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    columns = to_columns(vla.make_batch(engine), engine.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total = engine.learner._loss(columns, vla.TASK_DESCRIPTIONS, 1.0, 6)
        bytes_kept = sum(kept.values())
        total.loss.backward()
    found = [parameter.grad.flatten() for parameter in engine.optimizer.parameters if parameter.grad is not None]
    return torch.cat(found), bytes_kept


@pytest.mark.parametrize("name", SETTINGS)
def test_recomputing_keeps_less_and_gives_the_same_gradients(name: str) -> None:
    wanted, kept = gradients(engine_of(name))
    found, kept_now = gradients(engine_of(name, gradient_checkpointing=True))
    assert wanted.abs().max() > 0 and torch.equal(found, wanted)
    assert kept_now < 0.5 * kept


def test_the_policy_acts_as_before_and_random_numbers_in_a_block_are_drawn_again() -> None:
    plain, recomputing = vla.make_oft(), vla.make_oft()
    recompute_blocks(recomputing)
    for policy in (plain, recomputing):
        block = policy.get_submodule("network.language_model.model.layers.0")
        block.mlp = torch.nn.Sequential(block.mlp, torch.nn.Dropout(0.5)).train()
    found = []
    for policy in (plain, recomputing):
        torch.manual_seed(0)
        inputs = policy.preprocess(PolicyObservation.of(vla.make_observation()))
        policy.sft_loss(inputs, torch.zeros(6, vla.CHUNK, 2), {}).backward()
        grads = [parameter.grad for parameter in policy.parameters()]
        found.append(torch.cat([grad.flatten() for grad in grads if grad is not None]))
    assert torch.equal(*found)


def test_a_model_without_blocks_is_refused_with_the_remedy() -> None:
    with pytest.raises(PolicyError, match=r"'mlp' does not say which blocks.*set engine\.gradient_checkpointing=false"):
        recompute_blocks(make_policy())
