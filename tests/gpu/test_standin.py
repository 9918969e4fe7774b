"""The stand-in itself: it sees each mistake and each wait that is made on purpose, at its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cases
import programs
import pytest
from standin import build

PROGRAM = Path(__file__).with_name("mistakes.py")
GRAPHS = Path(__file__).with_name("graphs.py")
UNREGISTERED = "Attempt to increase offset for a CUDA generator not in capture mode."
ALLOWED = {
    "sum with a single number of the CPU",
    "copy within the GPU",
    "layer on the GPU",
    "threads of autograd",
    "deep copy",
    "random numbers",
    "comparison with a number of the GPU",
}
COUNTED = {  # synchronisations, copies
    "number": (1, 0),
    "condition": (1, 0),
    "range": (1, 0),
    "list": (1, 1),
    "mask": (1, 0),
    "nonzero": (1, 0),
    "unique": (1, 0),
    "equal": (1, 0),
    "device": (1, 0),
    "event": (1, 0),
    "download": (1, 1),
    "download not waited for": (0, 1),
    "upload": (0, 1),
    "upload of a literal": (0, 1),
    "upload in place": (0, 1),
    "index of the CPU": (0, 1),
}


def test_every_mistake_is_an_error_with_its_line_and_all_else_is_counted(standin: None) -> None:
    done = programs.run([PROGRAM], check=True)
    said: dict[str, dict[str, Any]] = json.loads(done.stdout)
    errors = {name: each for name, each in said.items() if name not in ALLOWED | COUNTED.keys()}
    assert len(errors) == 15
    for name, each in errors.items():
        assert each.get("error", "none").startswith(f"WrongDeviceError: {each['at']}: "), name
    for name in ALLOWED:
        assert said[name]["lines"] == [], name
    for name, counted in COUNTED.items():
        assert (said[name]["syncs"], said[name]["copies"]) == counted, name
        assert all(line.endswith(f" at {said[name]['at']}") for line in said[name]["lines"]), name


def test_graphs_repeat_what_was_recorded_and_an_engine_does_without_those_that_it_cannot_trust(standin: None) -> None:
    done = programs.run([GRAPHS], preload=cases.modules(["mlp"]), check=True)
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["replays"], "on other numbers, with the generator's next ones"
    assert said["freed"] == "CUDA error: a graph reads memory that was freed after it was recorded"
    refused = "CUDA error: operation not permitted when stream is capturing"
    assert [each.partition(" (")[0] for each in said["refused"].values()] == [refused] * 4 + [UNREGISTERED]
    assert said["MLPPolicy"] == {"warning": None, "graphs": 2, "alike": True}, "one graph for each size that comes back"
    for policy, why in {"Waits": refused, "Counts": "a replay came to other numbers", "Draws": UNREGISTERED}.items():
        warning = f"the policy acts without CUDA graphs, which is slower and the same otherwise: {why}"
        assert said[policy]["warning"].startswith(warning) and said[policy]["graphs"] == 0
        assert said[policy]["alike"] == (policy != "Counts"), "what Python counts, a second look has counted too"


def test_a_cuda_build_of_torch_or_a_machine_without_compiler_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.missing() == "needs g++ to compile the stand-in for CUDA"
    monkeypatch.setattr(build.shutil, "which", lambda _: "/usr/bin/g++")
    monkeypatch.setattr(build, "torch_folder", lambda: tmp_path)
    (tmp_path / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n")
    assert "CUDA of its own" in (build.missing() or "")
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert build.missing() is None
