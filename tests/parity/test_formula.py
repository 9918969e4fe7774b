"""The numbers of a checkpoint with weights by formula, kept in formula.json.

They were computed when the same code agreed with the public code within 2e-5 on all cases of `test_reference.py`, and
guard that agreement in clones that lack those cases. `python -m tests.parity.test_formula` computes them anew.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from embodyrl.models import load_policy
from tests.parity.formula import CHUNK, observation, write_checkpoint
from tests.parity.mutations import MUTATIONS, Mutation

NUMBERS = Path(__file__).parent / "formula.json"
TOLERANCE = 2e-5
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "openvla": ("openvla", {"unnorm_key": "second", "temperature": 1.6}),
    "discrete": ("openvla_oft", {"unnorm_key": "first", "temperature": 1.6, "chunk_size": CHUNK}),
    "l1": (
        "openvla_oft",
        {"unnorm_key": "first", "action_head": "l1", "num_images": 2, "use_proprio": True, "chunk_size": CHUNK},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("formula"))


@torch.inference_mode()
def numbers_of(case: str, folder: Path, mutation: Mutation | None = None) -> dict[str, list[float]]:
    """A few numbers from every stage."""
    name, options = MODELS[case]
    policy: Any = load_policy(name, checkpoint=folder, **options)
    if mutation is not None:
        mutation.apply(policy)
    inputs = policy.preprocess(observation(options.get("num_images", 1)))
    acted = policy.act(inputs, "eval")
    wanted = torch.linspace(-0.3, 0.4, acted.actions.numel()).view_as(acted.actions)
    numbers = {
        "pixels": inputs["pixel_values"].flatten()[::997],
        "projected": policy.embed_images(inputs).flatten()[::131],
        "values": acted.values,
        "sft_loss": policy.sft_loss(inputs, wanted, {})[None],
    }
    if case == "l1":
        return {key: value.tolist() for key, value in (numbers | {"actions": acted.actions.flatten()}).items()}
    tokens = (torch.arange(2 * policy.entries) * 29 % 256).view(2, -1)
    states = policy.answer_states(inputs, tokens) if name == "openvla" else policy.slot_states(inputs)
    scored = policy.evaluate(inputs, {"tokens": tokens})
    numbers |= {
        "states": states.flatten()[::17],
        "logits": policy.network.action_logits(states).flatten()[::331],
        "logprobs": scored.logprobs.flatten(),
        "entropy": scored.entropy.flatten(),
        "decoded": policy.finish(policy.bins.decode(tokens)).flatten(),
    }
    return {key: value.tolist() for key, value in numbers.items()}


def differences(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> dict[str, float]:
    assert found.keys() == wanted.keys()
    return {key: max(abs(a - b) for a, b in zip(found[key], wanted[key], strict=True)) for key in wanted}


@pytest.mark.parametrize("case", MODELS)
def test_numbers_are_the_kept_ones(case: str, folder: Path) -> None:
    wanted = json.loads(NUMBERS.read_text())[case]
    far = {key: value for key, value in differences(numbers_of(case, folder), wanted).items() if value > TOLERANCE}
    assert not far


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_comparison_bites(name: str, folder: Path) -> None:
    mutation = MUTATIONS[name]
    case = "openvla" if mutation.model == "openvla" else "discrete"
    wanted = json.loads(NUMBERS.read_text())[case]
    found = differences(numbers_of(case, folder, mutation), wanted)
    assert max(found["states"], found["logits"]) > 2 * TOLERANCE


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        kept = {case: numbers_of(case, write_checkpoint(Path(place))) for case in MODELS}
    NUMBERS.write_text(json.dumps(kept, indent=1) + "\n")
