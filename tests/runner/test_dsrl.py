"""What a config of runs that steer a frozen pi0 through its noise must fit; the runs: `test_learners.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from learners import BASE, STEERED, Learner
from small_runs import Runs

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
pytest.importorskip("pygame", reason="needs gymnasium[classic-control]")

from embodyrl.config import ConfigError, load_config
from embodyrl.models import load_policy
from embodyrl.planning.planner import Limits, Planner


@pytest.fixture
def base(runs_of: Callable[[str], tuple[Learner, Runs]]) -> Path:
    """The checkpoint of a pi0 with random weights."""
    return runs_of("steered")[1].folder / "base"


def test_what_does_not_fit_the_checkpoint_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(STEERED)

    def faults(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(str(tmp_path / "my.yaml"), [f"model.checkpoint={base}", *words])
        return str(caught.value)

    assert "steering.rows = 3, but the checkpoint denoises 2 actions together" in faults(
        "algorithm.off_policy.steering.rows=3"
    )
    # One number of noise: a uniform distribution of it has log 2.
    entropy = "algorithm.off_policy.temperature.target_entropy=0.7"
    assert "which no distribution of 1 number in -1 .. 1 reaches" in faults(entropy)
    load_config(
        str(tmp_path / "my.yaml"), [f"model.checkpoint={base}", entropy, "algorithm.off_policy.steering.rows=2"]
    )
    steered = tmp_path / "steered"
    steered.mkdir()
    for path in base.iterdir():
        (steered / path.name).write_bytes(path.read_bytes())
    description = json.loads((base / "policy.json").read_text())
    saved = {"limit": 1.5, "rows": 1, "hidden_sizes": [8]}
    (steered / "policy.json").write_text(json.dumps(description | {"steering": saved}))
    assert "steering.hidden_sizes = [16], but the checkpoint was saved with [8]" in faults(
        f"model.checkpoint={steered}"
    )
    (tmp_path / "base.yaml").write_text(BASE)
    with pytest.raises(
        ConfigError, match=r"holds a policy that is steered through its noise .* algorithm 'ppo' would change"
    ):
        load_config(str(tmp_path / "base.yaml"), [f"model.checkpoint={steered}"])


def test_plans_know_that_nothing_large_learns(base: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(STEERED)
    loaded = load_config(str(tmp_path / "my.yaml"), [f"model.checkpoint={base}", "model.prompt_length=20"])
    plan = Planner(Limits(cuda=True, gpu=None, host=None), 1, None).plan(loaded.config)
    policy = load_policy("pi0", checkpoint=base)
    size = 64 + 2 * 1 + 1  # expert's width, velocities, noise
    assert plan["model"]["trainable"] == (size - 1 + 1) * 16 + (16 + 1) * 2
    assert plan["model"]["parameters"] == sum(each.numel() for each in policy.parameters()) + plan["model"]["trainable"]
    gpu, host = plan["needs"]["gpu"]["train"], plan["needs"]["host"]["both"]
    assert gpu.get("optimiser", 0.0) + gpu.get("gradients", 0.0) < 0.05 < gpu["weights"]
    row = 2 * (size - 1) + 4 * 1 + 2 * 4 + 2 + 3
    assert host["replay"] == round(80 * row / 2**20, 2)
