"""The numbers of a GR00T checkpoint with weights by formula, kept in gr00t_formula.json.

They were computed when the same code agreed with the public code on all cases of `test_gr00t_reference.py`, and guard
that agreement in clones that lack those cases. `python -m tests.parity.test_gr00t_formula` computes them anew.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")

from embodyrl.models import load_policy
from tests.parity.gr00t_formula import CHUNK, HORIZON, TAG, two_views, write_checkpoint
from tests.parity.gr00t_mutations import MUTATIONS

NUMBERS = Path(__file__).parent / "gr00t_formula.json"
TOLERANCE = 1.5e-5
METHODS = {"flow_sde": 0.5, "flow_cps": 0.3, "flow_noise": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("formula"))


def load(folder: Path, method: str) -> Any:
    return load_policy(
        "gr00t",
        checkpoint=folder,
        chunk_size=CHUNK,
        embodiment_tag=TAG,
        embodiment_id=0,
        noise_method=method,
        noise_level=METHODS[method],
        prompt_length=48,
        interpolation="bicubic",  # rounds: no last digit of a machine decides about a grey level, as where it cuts off
    )


@torch.inference_mode()
def numbers_of(policy: Any) -> dict[str, list[float]]:
    """A few numbers from every stage."""
    inputs = policy.preprocess(two_views())
    condition = policy.condition(inputs)
    acted = policy.act(inputs, "eval")
    places = torch.arange(2 * (len(policy.grid) + 1) * HORIZON * 7)
    trace = {
        "chain": (places * 0.37).sin().view(2, -1, HORIZON, 7),
        "step": torch.tensor([0, len(policy.grid) - 2]),
        "noise_level": torch.full((2,), policy.noise_level),
    }
    scored = policy.evaluate(inputs, trace)
    demonstrated = torch.linspace(-0.3, 0.4, acted.actions.numel()).view_as(acted.actions)
    data, counts = policy.sft_targets(demonstrated, inputs)
    time = torch.tensor([0.2, 0.7])
    errors = policy.flow_errors(condition, data, trace["chain"][:, 0], time, 1.0 - time)
    numbers = {
        "pixels": inputs["pixel_values"].flatten()[::997],
        "state": inputs["state"].flatten(),
        "context": condition.context.flatten()[::31],
        "chain": acted.trace["chain"].flatten()[::7],
        "actions": acted.actions.flatten(),
        "logprobs": scored.logprobs.flatten()[::3],
        "values": scored.values,
        "errors": (errors * counts).flatten()[::5],
    }
    return {name: value.tolist() for name, value in numbers.items()}


def differences(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> dict[str, float]:
    """Beyond the share of each number that float32 cannot tell."""
    assert found.keys() == wanted.keys()
    return {
        key: max(abs(a - b) - 2e-6 * abs(b) for a, b in zip(found[key], wanted[key], strict=True)) for key in wanted
    }


@pytest.mark.parametrize("method", METHODS)
def test_numbers_are_the_kept_ones(method: str, folder: Path) -> None:
    wanted = json.loads(NUMBERS.read_text())[method]
    off = differences(numbers_of(load(folder, method)), wanted)
    assert not {key: value for key, value in off.items() if value > TOLERANCE}


@pytest.fixture(scope="module")
def policy(folder: Path) -> Any:
    return load(folder, "flow_sde")


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_comparison_bites(name: str, policy: Any) -> None:
    mutated = copy.deepcopy(policy)
    MUTATIONS[name](mutated.network)
    off = differences(numbers_of(mutated), json.loads(NUMBERS.read_text())["flow_sde"])
    assert max(off["chain"], off["context"]) > 2 * TOLERANCE


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        whole = write_checkpoint(Path(place))
        kept = {method: numbers_of(load(whole, method)) for method in METHODS}
    NUMBERS.write_text(json.dumps(kept, indent=1) + "\n")
