"""benchmarks/vla_real_size.py does what it says, with a model that fits a CPU; its figures are for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
pytest.importorskip("peft", reason="needs the extra vla")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["openvla_oft", "pi0"])
def test_a_tiny_model_is_measured(tmp_path: Path, model: str) -> None:
    small = ["--model", model, "--tiny", "--batches", "1", "2", "--samples", "2", "--micro-batch", "1", "--rounds", "1"]
    command = [sys.executable, str(ROOT / "benchmarks" / "vla_real_size.py"), *small, "--json", "out.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["batch"] for row in result["rollout"]] == [1, 2]
    assert [row["what"] for row in result["learning"]] == ["lora", "full", "sft"]
    assert all(row["share_of_peak"] > 0 and "failed" not in row for row in result["rollout"] + result["learning"])
    assert result["flop_per_decision"] > 2e7  # two for each weight and token, about
    assert "tokens/s" in done.stdout and "chunks/s" in done.stdout
