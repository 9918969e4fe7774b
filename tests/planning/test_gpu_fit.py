"""benchmarks/gpu_fit.py and the page that it writes its table into."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from embodyrl.config import ConfigError
from embodyrl.registry import SIMULATORS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "gpu_fit.py"))


def test_its_experiments_and_settings_are_there(script: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert page.count(script["BEGIN"]) == page.count(script["END"]) == 1
    # A config is only loaded where its simulator is installed.
    installed = {each for each in ("libero", "maniskill") if not SIMULATORS.entry(each).missing()}
    names = [name for name in script["EXPERIMENTS"] if name.partition("_")[0] in installed]
    if not names:
        pytest.skip("neither LIBERO nor ManiSkill is installed")
    for name in names:
        loaded = script["load"](name, [*script["CHECKPOINTED"], "engine.parallel.world_size=8"])
        assert loaded.engine.gradient_checkpointing and loaded.engine.micro_batch_size == 8


def test_its_settings_are_on_the_page(script: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    for step, settings in script["LADDER"].items():
        assert f"\n| {step} | " in page
        assert all(setting.partition("=")[0] in page for setting in settings)


def test_a_cell_has_the_mildest_settings_that_fit(script: dict[str, Any]) -> None:
    needs = {(1, "a"): 100e9, (1, "b"): 47.4e9, (1, "d"): 20e9}
    assert [script["cell"](needs, 1, size) for size in (24, 48, 141)] == ["d (20)", "b (47)", "a (100)"]
    assert script["cell"](needs, 8, 141) == "-"


def test_an_experiment_that_is_not_there(script: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        script["load"]("nonsense", [])
