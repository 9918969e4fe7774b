"""The numbers of ACT with weights by formula, kept in act_formula.json.

They were computed when the same code agreed with LeRobot on all cases of `test_act_reference.py`, and guard that
agreement in clones that lack those cases. `python -m tests.parity.test_act_formula` computes them anew.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from embodyrl.models import build_policy
from embodyrl.models.act.config import ACTConfig, ScratchConfig
from embodyrl.models.policy import ACTION_WEIGHTS
from tests.parity.act_reference import CODE, NETWORKS
from tests.parity.formula import SPEC, fill, observation
from tests.parity.test_pi_formula import excesses

NUMBERS = Path(__file__).parent / "act_formula.json"
SIZES: dict[str, Any] = {"backbone_width": 4, "hidden_size": 24, "heads": 3, "feedforward_size": 32, "style_size": 5}
CASES: dict[str, dict[str, Any]] = {
    "style": {"scratch": ScratchConfig(**SIZES, encoder_layers=2, decoder_layers=2, style_layers=2)},
    "plain": {"scratch": ScratchConfig(**SIZES, encoder_layers=1, style=False), "state": "none"},
}
TOO_SMALL = {"batch-norm-epsilon", "layer-norm-epsilon", "whole-sigma"}
"""Changes that weights by formula hardly show."""


@torch.no_grad()
def numbers_of(case: str, mutation: Any = None) -> dict[str, list[float]]:
    """A few numbers from every stage."""
    config = ACTConfig(name="act", dropout=0.0, value_sizes=[16], **CASES[case])
    policy: Any = build_policy(config, dataclasses.replace(SPEC, image_size=(48, 48)), chunk_size=3, seed=0)
    fill(policy, multiply=("norm1.weight", "norm2.weight", "norm3.weight", "norm.weight", "bn1.weight", "_var"))
    if mutation is not None:
        mutation(policy.network)
    inputs = policy.preprocess(observation(2))
    acted = policy.act(inputs, "eval")
    wave = torch.linspace(-1.5, 1.7, 42).view(2, 3, 7)
    scored = policy.evaluate(inputs, {"sample": wave})
    weights = torch.tensor([[1.2, 1.2, 1.2], [1.2, 1.2, 0.0]])
    draws = {"style": wave[:, 0, :5], "dropout": torch.zeros(2, dtype=torch.int64)}
    loss = policy.sft_loss(inputs | {ACTION_WEIGHTS: weights}, 0.5 * wave, draws)
    _, memory = policy.network(inputs["images"], inputs["state"])
    numbers = {
        "images": inputs["images"].flatten()[::397],
        "memory": memory.flatten()[::3],
        "actions": acted.actions.flatten(),
        "logprobs": scored.logprobs.flatten(),
        "entropy": scored.entropy.flatten(),
        "critic": scored.values,
        "loss": loss.reshape(1),
    }
    return {key: value.tolist() for key, value in numbers.items()}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_kept_ones(case: str) -> None:
    found, wanted = numbers_of(case), json.loads(NUMBERS.read_text())[case]
    far = {key: excess for key, excess in excesses(found, wanted).items() if excess > 1.0}
    assert not far


@pytest.mark.parametrize("name", sorted({*NETWORKS, *CODE} - TOO_SMALL))
def test_the_comparison_bites(name: str) -> None:
    with CODE[name]() if name in CODE else nullcontext():
        found = numbers_of("style", NETWORKS.get(name))
    found = excesses(found, json.loads(NUMBERS.read_text())["style"])
    assert max(found[stage] for stage in ("memory", "actions", "loss")) > 2.0


if __name__ == "__main__":
    torch.set_num_threads(1)
    NUMBERS.write_text(json.dumps({case: numbers_of(case) for case in CASES}, indent=1) + "\n")
