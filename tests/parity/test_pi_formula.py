"""The numbers of pi0 and pi0.5 with weights by formula, kept in pi_formula.json.

They were computed when the same code agreed with the public code within 1e-5 on all cases of `test_pi_reference.py`,
and guard that agreement in clones that lack those cases. `python -m tests.parity.test_pi_formula` computes them anew.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from embodyrl.models import SupportedModel, build_policy
from embodyrl.models.pi.config import Normalization, ScratchConfig
from embodyrl.models.pi.network import time_embedding
from tests.parity.formula import SPEC, fill, observation
from tests.parity.mutations import Mutation
from tests.parity.pi_mutations import MUTATIONS, rough_time_embedding
from tests.parity.test_formula import differences

NUMBERS = Path(__file__).parent / "pi_formula.json"
TOLERANCE = 1e-5
CHUNK = 3
SHAPE = ScratchConfig(image_size=28, patch_size=14, vision_size=32, hidden_size=64, expert_size=48, layers=2, heads=4)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pi0": ("pi0", {"noise_method": "flow_sde", "noise_level": 0.5}),
    "pi0-cps": ("pi0", {"noise_method": "flow_cps", "noise_level": 0.3, "normalization": "quantile"}),
    "pi05": ("pi05", {"noise_method": "flow_noise", "joint_logprob": True, "relative_action_dims": 2}),
    "pi05-prefix": ("pi05", {"state": "none", "value_from": "prefix"}),
}


@torch.no_grad()
def numbers_of(case: str, mutation: Mutation | None = None) -> dict[str, list[float]]:
    """A few numbers from every stage."""
    name, options = CASES[case]
    dataclass: Any = SupportedModel.entry(name).load_options()
    config = dataclass(name=name, denoising_steps=4, value_sizes=[16, 8], scratch=SHAPE, **typed(dataclass, options))
    policy: Any = build_policy(config, SPEC, chunk_size=CHUNK, seed=0)
    fill(policy)
    if mutation is not None:
        mutation.apply(policy)
    inputs = policy.preprocess(observation(2))
    acted = policy.act(inputs, "eval")
    seen = policy.condition(inputs)
    x = torch.linspace(-1.5, 1.7, 2 * CHUNK * 7).view(2, CHUNK, 7)
    time = torch.tensor([1.0, 0.3])
    chain = torch.stack([x * (1 - 0.2 * number) for number in range(5)], dim=1)
    trace = {"chain": chain, "step": torch.tensor([0, 2]), "noise_level": torch.full((2,), policy.noise_level)}
    scored = policy.evaluate(inputs, trace)
    data, counts = policy.sft_targets(acted.actions, inputs)
    numbers = {
        "pixels": inputs["pixel_values"].flatten()[::397],
        "tokens": inputs["input_ids"].flatten().float(),
        "memory": seen.prefix.memory[0][1].flatten()[::41],
        "prefix": seen.prefix.hidden[seen.prefix.mask].flatten()[::71],
        "velocity": policy.denoise(seen, x, time).velocity.flatten()[::2],
        "actions": acted.actions.flatten(),
        "logprobs": scored.logprobs.flatten(),
        "entropy": scored.entropy.flatten(),
        "values": scored.values,
        "loss": (policy.flow_errors(seen, data, x, time, time) * counts).flatten()[::3],
    }
    return {key: value.tolist() for key, value in numbers.items()}


def typed(dataclass: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options with words in the place of enumerations' members."""
    kinds = {"normalization": Normalization}  # null where no option is given
    defaults = dataclass(name="pi0")
    return {key: kinds.get(key, type(getattr(defaults, key)))(value) for key, value in options.items()}


def excesses(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> dict[str, float]:
    """By how many tolerances the numbers of each stage differ; it is relative for those larger than 1."""
    sizes = {key: max(1.0, *map(abs, numbers)) for key, numbers in wanted.items()}
    return {key: gap / (TOLERANCE * sizes[key]) for key, gap in differences(found, wanted).items()}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_kept_ones(case: str) -> None:
    found, wanted = numbers_of(case), json.loads(NUMBERS.read_text())[case]
    far = {key: excess for key, excess in excesses(found, wanted).items() if excess > 1.0}
    assert not far


@pytest.mark.parametrize("name", [name for name in MUTATIONS if "float32" not in name])
def test_the_comparison_bites(name: str) -> None:
    mutation = MUTATIONS[name]
    found = excesses(numbers_of(mutation.model, mutation), json.loads(NUMBERS.read_text())[mutation.model])
    assert max(found[stage] for stage in ("memory", "prefix", "velocity")) > 2.0


def test_the_time_embedding_has_the_digits_of_float64() -> None:
    times = torch.tensor([1.0, 0.7, 0.1])
    periods = [0.004 * 1000.0 ** (number / 7) for number in range(8)]
    angles = [[2 * math.pi * float(time) / period for period in periods] for time in times]
    wanted = [[*map(math.sin, row), *map(math.cos, row)] for row in angles]
    torch.testing.assert_close(time_embedding(times, 16), torch.tensor(wanted), atol=1e-7, rtol=0)
    assert (rough_time_embedding(times, 16) - torch.tensor(wanted)).abs().max() > 2 * TOLERANCE


if __name__ == "__main__":
    torch.set_num_threads(1)
    NUMBERS.write_text(json.dumps({case: numbers_of(case) for case in CASES}, indent=1) + "\n")
