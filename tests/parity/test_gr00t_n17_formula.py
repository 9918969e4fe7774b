"""The numbers of GR00T N1.7 and N1.6 checkpoints with weights by formula, kept in gr00t_n17_formula.json.

They were computed when the same code agreed with the public code on all cases of `test_gr00t_n17_reference.py` and
`test_gr00t_n16_reference.py`, and guard that agreement in clones that lack those cases.
`python -m tests.parity.test_gr00t_n17_formula` computes them anew.
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
from tests.parity.formula import observation
from tests.parity.gr00t_n17_formula import CHUNK, HORIZON, TAG, write_checkpoint
from tests.parity.gr00t_n17_mutations import MUTATIONS

NUMBERS = Path(__file__).parent / "gr00t_n17_formula.json"
TOLERANCE = 1.5e-5
CASES = {
    "flow_sde": ("gr00t_n17", 0.5),
    "flow_cps": ("gr00t_n17", 0.3),
    "flow_noise": ("gr00t_n17", 0.5),
    "n16": ("gr00t_n16", 0.5),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("gr00t_n16", "gr00t_n17")
    return {name: write_checkpoint(tmp_path_factory.mktemp(name), name) for name in names}


def load(folder: Path, case: str) -> Any:
    model, level = CASES[case]
    method = "flow_sde" if case == "n16" else case
    options: dict[str, Any] = {"embodiment_tag": TAG, "noise_method": method, "noise_level": level, "prompt_length": 96}
    return load_policy(model, checkpoint=folder, chunk_size=CHUNK, **options)


@torch.inference_mode()
def numbers_of(policy: Any) -> dict[str, list[float]]:
    """A few numbers from every stage."""
    inputs = policy.preprocess(observation(2))
    acted, condition = policy.act(inputs, "eval"), policy.condition(inputs)
    places = torch.arange(2 * (len(policy.grid) + 1) * HORIZON * 7)
    trace = {
        "chain": (places * 0.37).sin().view(2, -1, HORIZON, 7) * 1.2,
        "step": torch.tensor([0, len(policy.grid) - 2]),
        "noise_level": torch.full((2,), policy.noise_level),
    }
    scored = policy.evaluate(inputs, trace)
    demonstrated = torch.linspace(-0.3, 0.4, acted.actions.numel()).view_as(acted.actions)
    data, counts = policy.sft_targets(demonstrated, inputs)
    time = torch.tensor([0.2, 0.7])
    errors = policy.flow_errors(condition, data, trace["chain"][:, 0], time, 1.0 - time)
    numbers = {
        "pixels": inputs["pixel_values"].flatten()[::397],
        "state": inputs["state"].flatten(),
        "context": condition.context.flatten()[::61],
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
        key: max(abs(a - b) - 5e-6 * abs(b) for a, b in zip(found[key], wanted[key], strict=True)) for key in wanted
    }


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_kept_ones(case: str, folders: dict[str, Path]) -> None:
    wanted = json.loads(NUMBERS.read_text())[case]
    off = differences(numbers_of(load(folders[CASES[case][0]], case)), wanted)
    assert not {key: value for key, value in off.items() if value > TOLERANCE}


UNSEEN = ("epsilon of the language model", "one weight of the vision transformer")
"""What weights by formula do not show."""


@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in UNSEEN])
@torch.inference_mode()
def test_the_comparison_bites(name: str, folders: dict[str, Path]) -> None:
    policy = load(folders["gr00t_n17"], "flow_sde")
    whole = policy.preprocess
    inputs = MUTATIONS[name](policy, whole(observation(2)))
    policy.preprocess = lambda observation: copy.copy(inputs)
    off = differences(numbers_of(policy), json.loads(NUMBERS.read_text())["flow_sde"])
    assert max(off["chain"], off["context"]) > 2 * TOLERANCE


if __name__ == "__main__":
    torch.set_num_threads(1)
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for case, (model, _) in CASES.items():
            folder = Path(place) / case
            folder.mkdir()
            kept[case] = numbers_of(load(write_checkpoint(folder, model), case))
    NUMBERS.write_text(json.dumps(kept, indent=1) + "\n")
