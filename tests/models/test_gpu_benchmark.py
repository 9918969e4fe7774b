"""benchmarks/gpu.py does what it says, with a tiny model on the CPU; its figures are for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import programs
import pytest

pytest.importorskip("embodyrl.models.libraries", reason="needs the extra vla")
pytest.importorskip("peft", reason="needs the extra vla")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # the script changes it
    import gpu

    return gpu


TINY = Namespace(model="gr00t", scale="tiny", device="cpu", work="")


def test_an_engine_has_ended_before_the_next_one_is_made(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once would not fit, and the second would be said to take the memory of both."""
    alive: list[int] = []
    made: list[weakref.ref[Any]] = []

    class Engine:
        def __init__(self) -> None:
            alive.append(sum(engine() is not None for engine in made))
            made.append(weakref.ref(self))
            self.act = lambda observation, mode: self

    monkeypatch.setattr(gpu.Setup, "engine", lambda self, **settings: Engine())
    monkeypatch.setattr(gpu, "count_flops", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(gpu, "matrix_peak", lambda setup: 1.0)
    rows = list(gpu.measure_decisions(TINY))
    assert alive == [0, 0]
    assert [row["what"] for row in rows] == ["batch 1", "batch 4", "batch 1, CUDA graphs", "batch 4, CUDA graphs"]
    assert all("has no attribute 'rollout_mode'" in row["failed"] for row in rows), "each says why it was not measured"


def test_a_row_that_cannot_be_measured_leaves_the_others_alone(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speed(source: str, *_: object) -> float:
        if source.startswith("metaworld"):
            raise ImportError("no metaworld here")
        return 2.0

    def learn(setup: object, what: str, *_: object) -> dict[str, Any]:
        if what == "lora":
            raise ValueError("no adapters here")
        return {"seconds": 1.0, "peak_gb": None}

    monkeypatch.setattr(gpu, "steps_per_second", speed)
    monkeypatch.setattr(gpu, "measure_learning", learn)
    monkeypatch.setattr(gpu, "planned_bytes", lambda *_: 1)
    monkeypatch.setattr(gpu, "count_flops", lambda *_: (1.0, 1.0))
    rows = [*gpu.measure_rendering(TINY), *gpu.measure_updates(TINY)]
    assert [row.get("failed") for row in rows] == [
        "ImportError: no metaworld here",
        None,
        "ValueError: no adapters here",
        None,
    ]


def test_a_checkout_is_measured_without_being_installed(tmp_path: Path) -> None:
    for name, text in {
        "benchmarks/gpu.py": SCRIPT.read_text(),
        "benchmarks/mode_switch.py": "import embodyrl",
        "embodyrl/__init__.py": "import os; raise SystemExit('of this checkout: ' + os.environ['PYTHONPATH'])",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    words = [sys.executable, "benchmarks/gpu.py"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stderr == f"of this checkout: {tmp_path}\n"


def measure(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return programs.run([str(SCRIPT), "--scale", "tiny", "--device", "cpu", *words], cwd=folder, timeout=280)


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return dict(json.loads((folder / "gpu.json").read_text())["groups"])


@pytest.mark.slow
def test_rows_are_beside_their_bounds_and_kept(tmp_path: Path) -> None:
    done = measure(tmp_path, "--rows", "decide")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path)["decide"]
    assert [row["what"] for row in rows][:2] == ["batch 1", "batch 4"]
    assert all(row["share"] > 0 and row["bound_is"] and row["decisions/s"] > 0 for row in rows)
    again = measure(tmp_path, "--rows", "decide", "offload", "--minutes", "0")
    assert again.stdout.startswith(done.stdout), "what is known is not measured again"
    assert "offload: no time left; the same command continues from here" in again.stdout


@pytest.mark.slow
def test_updates_are_compared_with_their_plan(tmp_path: Path) -> None:
    done = measure(tmp_path, "--rows", "learn", "offload", "sync", "peak")
    assert done.returncode == 0, done.stderr
    assert [(row["what"], row["planned_gb"] > 0) for row in rows_of(tmp_path)["learn"]] == [
        ("lora", True),
        ("full", True),
    ]
    assert not any("failed" in row for rows in rows_of(tmp_path).values() for row in rows)
