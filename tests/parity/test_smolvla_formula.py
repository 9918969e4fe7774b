"""The numbers of SmolVLA with weights by formula, kept in smolvla_formula.json.

They were computed when the same code agreed with LeRobot on all cases of `test_smolvla_reference.py`, and guard that
agreement in clones that lack those cases. `python -m tests.parity.test_smolvla_formula` computes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the extra vla")

from embodyrl.models import SupportedModel, build_policy
from embodyrl.models.smolvla.config import ScratchConfig
from tests.parity.formula import SPEC, fill, observation
from tests.parity.smolvla_mutations import MUTATIONS
from tests.parity.test_pi_formula import CHUNK, excesses, typed

NUMBERS = Path(__file__).parent / "smolvla_formula.json"
SHAPE = ScratchConfig(
    image_size=32, patch_size=8, shuffle=2, vision_size=32, vision_layers=2, hidden_size=48, layers=4, mlp_ratio=2.0
)
CASES: dict[str, dict[str, Any]] = {
    "mixed": {"noise_method": "flow_sde", "noise_level": 0.5},
    "mixed-cps": {"noise_method": "flow_cps", "noise_level": 0.3, "state": "none"},
    "mixed-noise": {"noise_method": "flow_noise", "joint_logprob": True},
}
TOO_SMALL = {"one-weight", "time-in-float32", "vision-epsilon"}
"""Changes that weights by formula hardly show."""


@torch.no_grad()
def numbers_of(case: str, mutation: Any = None) -> dict[str, list[float]]:
    """A few numbers from every stage."""
    dataclass: Any = SupportedModel.entry("smolvla").load_options()
    options = typed(dataclass, {"frozen": "language", **CASES[case]})
    sizes = {"scratch": SHAPE, "value_sizes": [16, 8], "horizon": CHUNK + (case == "mixed")}
    config = dataclass(name="smolvla", denoising_steps=4, **sizes, **options)
    policy: Any = build_policy(config, SPEC, chunk_size=CHUNK, seed=0)
    fill(policy, multiply=("norm.weight", "layernorm.weight", "norm1.weight", "norm2.weight"))
    if mutation is not None:
        mutation(policy.network)
    inputs = policy.preprocess(observation(2))
    acted = policy.act(inputs, "eval")
    seen = policy.see(inputs)
    prefix = policy.condition(inputs)
    length = policy.start.shape[0]
    x = torch.linspace(-1.5, 1.7, 2 * length * 7).view(2, length, 7)
    time = torch.tensor([1.0, 0.3])
    chain = torch.stack([x * (1 - 0.2 * number) for number in range(5)], dim=1)
    trace = {"chain": chain, "step": torch.tensor([0, 2]), "noise_level": torch.full((2,), policy.noise_level)}
    scored = policy.evaluate(inputs, trace | {"seen": seen})
    loss = policy.sft_loss(inputs, acted.actions, {"time": time, "noise": x})
    there = prefix.mask
    numbers = {
        "pixels": inputs["pixel_values"].flatten()[::397],
        "tokens": inputs["input_ids"].flatten().float(),
        "seen": seen.flatten()[::29],
        "keys": prefix.memory[2][0].transpose(1, 2)[there].flatten()[::23],
        "values": prefix.memory[3][1].transpose(1, 2)[there].flatten()[::23],
        "velocity": policy.denoise(prefix, x, time).velocity.flatten()[::2],
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


@pytest.mark.parametrize("name", sorted(MUTATIONS.keys() - TOO_SMALL))
def test_the_comparison_bites(name: str) -> None:
    found = excesses(numbers_of("mixed", MUTATIONS[name]), json.loads(NUMBERS.read_text())["mixed"])
    assert max(found[stage] for stage in ("seen", "keys", "values", "velocity")) > 2.0


if __name__ == "__main__":
    torch.set_num_threads(1)
    NUMBERS.write_text(json.dumps({case: numbers_of(case) for case in CASES}, indent=1) + "\n")
