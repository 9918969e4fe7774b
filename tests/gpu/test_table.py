"""Every kind of model on a stand-in for a CUDA device (tests/gpu/standin): the CPU's numbers, and how often the CPU
waits for the GPU. `python tests/gpu/table.py -v` shows the lines that wait or copy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import cases
import programs
import pytest
from slow import only_slow

from embodyrl.registry import SupportedModel

TABLE = Path(__file__).with_name("table.py")
ROWS = [(family, setting) for family, kind in cases.FAMILIES.items() for setting in cases.names(kind)]


def is_fast(family: str, setting: str) -> bool:
    """Whether a row is in `make test`: a line that waits, or is on the wrong device, is mostly so in all settings."""
    return setting == "float32" or (family, setting) in (("mlp", "full"), ("pi0", "bf16"))


def table(family: str, setting: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run it for one row, in a process of its own: the stand-in changes torch for good."""
    kind = cases.FAMILIES[family]
    for requirement in [] if kind.module else SupportedModel.entry(kind.options["name"]).missing():
        pytest.skip(f"needs {requirement.module}: {requirement.install}")
    words = [TABLE, *options, f"{family}/{setting}"]
    return programs.run(words, preload=cases.modules([family]), timeout=280)


def lines(row: dict[str, Any], part: str) -> list[str]:
    return row["counts"][part]["lines"]


@pytest.mark.parametrize(("family", "setting"), [row if is_fast(*row) else only_slow(row) for row in ROWS])
def test_acts_learns_saves_resumes_and_exports_with_the_cpus_numbers_and_waits_once_a_step(
    family: str, setting: str, standin: None, tmp_path: Path
) -> None:
    done = table(family, setting, "--json", str(tmp_path / "found.json"))
    assert (tmp_path / "found.json").is_file(), done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "found.json").read_text()).values()
    assert "error" not in row, row["traceback"]
    assert row["difference"] <= row["tolerance"], f"{row['where']} differs by {row['difference']:.1e}"
    # A policy that acts without waiting or copying can be recorded as a CUDA graph.
    found = {part: lines(row, part) for part in row["counts"] if part.startswith("Policy.act")}
    assert found and not any(found.values())
    assert row["counts"]["decision"]["syncs"] == 0, lines(row, "decision")
    if cases.FAMILIES[family].samples and setting == "float32":
        assert row["counts"]["optimiser step"]["syncs"] <= 1, lines(row, "optimiser step")


def test_the_table_fits_the_screen(standin: None) -> None:
    done = table("mlp", "float32")
    _, head, row = done.stdout.splitlines()
    assert head.startswith("model/setting") and row.split()[:2] == ["mlp/float32", "ok"]
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
