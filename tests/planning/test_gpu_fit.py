"""benchmarks/gpu_fit.py and the page that it writes its table into."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from embodyrl.config import ConfigError, load_config
from embodyrl.config.build import with_values
from embodyrl.config.schema import ParallelBackend
from embodyrl.planning.choices import BACKEND, CHECKPOINTING
from embodyrl.planning.planner import Limits, Planner
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
        loaded = script["load"](name, [*script["SMALLER"], "engine.parallel.world_size=8"])
        assert loaded.engine.micro_batch_size == 8


def test_its_settings_are_on_the_page(script: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    for step, settings in script["LADDER"].items():
        assert f"\n| {step} | " in page
        assert all(setting.partition("=")[0] in page for setting in settings)


def test_a_cell_has_the_mildest_settings_that_fit(script: dict[str, Any]) -> None:
    planner = Planner(Limits(cuda=True, gpu=None, host=None), 1, None)
    assert script["cell"](planner, "gym_pendulum", 1, 24) == "a (1)"
    planner.limits["gpu"] = 1e6
    assert script["cell"](planner, "gym_pendulum", 1, 0) == "-"
    config = load_config("gym_pendulum", ["engine.parallel.backend=fsdp"]).config
    assert script["marks"](config) == "+"
    assert script["marks"](with_values(config, {CHECKPOINTING: True, BACKEND: ParallelBackend.none})) == "*"


def test_an_experiment_that_is_not_there(script: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        script["load"]("nonsense", [])
