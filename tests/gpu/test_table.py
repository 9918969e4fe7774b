"""Every kind of model on a stand-in for a CUDA device (tests/gpu/standin): the CPU's numbers, and how often the CPU
waits for the GPU. `python tests/gpu/table.py -v` shows the lines that wait or copy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embodyrl.registry import SupportedModel

HERE = Path(__file__).parent
VLAS = ("openvla", "openvla_oft", "openvla_oft_l1", "pi0", "smolvla", "act", "gr00t")
EXAMPLES = ("linear", "text", "conv")
"""Models of examples/."""
FAMILIES = ("mlp", "cnn", *EXAMPLES, *VLAS)
LEARNERS = [family for family in FAMILIES if family != "openvla_oft_l1"]
FAST = ("float32", "bf16", "lora")


def need(family: str) -> None:
    if family not in EXAMPLES:
        for requirement in SupportedModel.entry(family.removesuffix("_l1")).missing():
            pytest.skip(f"needs {requirement.module}: {requirement.install}")


def check(rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        assert "error" not in row, f"{name}: {row['traceback']}"
        assert row["difference"] <= row["tolerance"], f"{name}: {row['where']} differs by {row['difference']:.1e}"


def lines(row: dict[str, Any], part: str) -> list[str]:
    return row["counts"][part]["lines"]


@pytest.fixture
def table(family: str, play: Callable[..., Any], pytestconfig: pytest.Config) -> dict[str, Any]:
    """Rows of a model, all by one process: its libraries take longer to import than a row to compute."""
    need(family)
    settings = FAST if "not slow" in pytestconfig.getoption("markexpr") else (*FAST, "full")
    return dict(play(*(f"{family}/{setting}" for setting in settings)))


# One test of each model, because its rows take long and no process shall wait for another that computes them.
@pytest.mark.parametrize("family", FAMILIES)
def test_acts_learns_saves_resumes_and_exports_with_the_cpus_numbers_and_waits_once_a_step(
    family: str, table: dict[str, Any]
) -> None:
    rows = {name: row for name, row in table.items() if not name.endswith("/full")}
    assert len(rows) == (3 if family in VLAS[:2] + VLAS[3:] else 2), list(rows)
    check(rows)
    for row in rows.values():
        # A policy that acts without waiting or copying can be recorded as a CUDA graph.
        found = {part: lines(row, part) for part in row["counts"] if part.startswith("Policy.act")}
        assert found and not any(found.values())
        assert row["counts"]["decision"]["syncs"] == 0, lines(row, "decision")
    if family in LEARNERS:
        row = rows[f"{family}/float32"]
        assert row["counts"]["optimiser step"]["syncs"] <= 1, lines(row, "optimiser step")


@pytest.mark.slow
@pytest.mark.parametrize("family", LEARNERS)
def test_all_weights_with_a_reference_policy(family: str, table: dict[str, Any]) -> None:
    check({"full": table[f"{family}/full"]})


def test_the_table_fits_the_screen(standin: None) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "table.py"), "mlp/float32"], capture_output=True, text=True, check=True
    )
    _, head, row = done.stdout.splitlines()
    assert head.startswith("model/setting") and row.split()[:2] == ["mlp/float32", "ok"]
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
