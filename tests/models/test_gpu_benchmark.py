"""benchmarks/gpu.py does what it says, with a tiny model on the CPU; its figures are for a GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import programs
import pytest

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
pytest.importorskip("peft", reason="needs the extra vla")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def measure(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return programs.run([str(SCRIPT), "--scale", "tiny", "--device", "cpu", *words], cwd=folder, timeout=280)


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return dict(json.loads((folder / "gpu.json").read_text())["groups"])


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_rows_are_beside_their_bounds_and_kept(tmp_path: Path) -> None:
    done = measure(tmp_path, "--rows", "decide")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path)["decide"]
    assert [row["what"] for row in rows][:2] == ["batch 1", "batch 4"]
    assert all(row["share"] > 0 and row["bound_is"] and row["decisions/s"] > 0 for row in rows)
    again = measure(tmp_path, "--rows", "decide", "offload", "--minutes", "0")
    assert again.stdout.startswith(done.stdout), "what is known is not measured again"
    assert "offload: no time left; the same command goes on from here" in again.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_updates_are_compared_with_their_plan(tmp_path: Path) -> None:
    done = measure(tmp_path, "--rows", "learn", "offload", "sync", "peak")
    assert done.returncode == 0, done.stderr
    assert [(row["what"], row["planned_gb"] > 0) for row in rows_of(tmp_path)["learn"]] == [
        ("lora", True),
        ("full", True),
    ]
    assert not any("failed" in row for rows in rows_of(tmp_path).values() for row in rows)
