"""The numbers of pi0-FAST with weights by formula, kept in pi0_fast_formula.json.

They were computed when the same code agreed with the public code on all arrays of `test_pi0_fast_reference.py`, and
guard that agreement in clones that lack them. `python -m tests.parity.test_pi0_fast_formula` computes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from embodyrl.models import build_policy
from embodyrl.models.pi0_fast.config import Convention, Decoding, Pi0FastConfig, ScratchConfig, ValueFrom
from tests.parity.formula import SPEC, fill, observation
from tests.parity.pi0_fast_mutations import MUTATIONS
from tests.parity.test_pi_formula import excesses

NUMBERS = Path(__file__).parent / "pi0_fast_formula.json"
CHUNK = 3
SHAPE = ScratchConfig(image_size=28, patch_size=14, vision_size=32, hidden_size=64, layers=2, heads=4)
CASES: dict[str, dict[str, Any]] = {
    "lerobot": {"temperature": 0.7},
    "openpi": {
        "convention": Convention.openpi,
        "decoding": Decoding.all,
        "value_from": ValueFrom.mean,
        "relative_action_dims": 2,
    },
}
OF_THE_NETWORK = ("vision", "prefix", "answer", "loss")
"""Stages that a mutation of the network changes."""


@torch.no_grad()
def numbers_of(case: str, mutation: Any = None) -> dict[str, list[float]]:
    """A few numbers from every stage."""
    config = Pi0FastConfig(name="pi0_fast", value_sizes=[16, 8], scratch=SHAPE, **CASES[case])
    policy: Any = build_policy(config, SPEC, chunk_size=CHUNK, seed=0)
    fill(policy)
    if mutation is not None:
        mutation(policy)
    inputs = policy.preprocess(observation(2))
    chunks = torch.linspace(-0.9, 0.8, 2 * CHUNK * 7).view(2, CHUNK, 7).roll(5, 1)
    actions = policy.finish(chunks, inputs)
    answers, there = policy.answers(inputs, actions)
    read, hidden = policy.predicting(inputs, policy.begin, answers)
    codes = answers[:, 0 if config.decoding is Decoding.all else len(policy.vocabulary.prefix) :]
    tokens = torch.where(policy.counted(codes), codes, policy.vocabulary.stop)
    scored = policy.evaluate(inputs, {"tokens": tokens})
    seen = policy.network.vision(pixel_values=inputs["pixel_values"].flatten(0, 1)).last_hidden_state
    numbers = {
        "pixels": inputs["pixel_values"].flatten()[::397],
        "tokens": inputs["input_ids"].flatten().float(),
        "answers": answers.flatten().float(),
        "vision": seen.flatten()[::5],
        "prefix": read.prefix[read.there].flatten()[::71],
        "answer": hidden[there].flatten()[::41],
        "decoded": policy.decode(tokens)[0].flatten(),
        "logprobs": scored.logprobs.flatten(),
        "entropy": scored.entropy.flatten(),
        "values": scored.values,
        "loss": policy.sft_loss(inputs, actions, {}).view(1),
    }
    return {key: value.tolist() for key, value in numbers.items()}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_kept_ones(case: str) -> None:
    found, wanted = numbers_of(case), json.loads(NUMBERS.read_text())[case]
    far = {key: excess for key, excess in excesses(found, wanted).items() if excess > 1.0}
    assert not far


@pytest.mark.parametrize("name", [name for name in MUTATIONS if name != "vision-epsilon"])  # lost in large variances
def test_the_comparison_bites(name: str) -> None:
    found = excesses(numbers_of("lerobot", MUTATIONS[name]), json.loads(NUMBERS.read_text())["lerobot"])
    assert max(found[stage] for stage in OF_THE_NETWORK) > 2.0


if __name__ == "__main__":
    torch.set_num_threads(1)
    NUMBERS.write_text(json.dumps({case: numbers_of(case) for case in CASES}, indent=1) + "\n")
