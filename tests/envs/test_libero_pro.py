"""LIBERO-PRO's suites: their names, words and files, and what is said where something of them is missing."""

from __future__ import annotations

from pathlib import Path

import libero_files
import pytest
from libero_files import needs_pro

from embodyrl.config import ConfigError, load_config
from embodyrl.envs.libero import pro, tasks
from embodyrl.envs.libero.info import _known, _object_types
from embodyrl.registry import SIMULATORS

if SIMULATORS.entry("libero").missing():
    pytest.skip("LIBERO not installed", allow_module_level=True)

MOST = ["model=mlp", "algorithm=ppo", "env=libero_pro/goal_object", "env.cameras=[]", "eval.episodes=5"]


def faults(*overrides: str) -> list[str]:
    """Return the faults of a config that plays LIBERO-PRO."""
    try:
        load_config(None, [*MOST, *overrides])
    except ConfigError as error:
        return [f"{fault.message} - {fault.hint}" for fault in error.faults]
    return []


@needs_pro
def test_every_task_has_its_files_its_start_states_and_objects_that_are_known() -> None:
    suites = {suite: names for suite, names in tasks.suites().items() if pro.has(suite)}
    assert len(suites) == 32 and {len(names) for names in suites.values()} == {10}
    for task in (f"{suite}/{number}" for suite in suites for number in range(10)):
        scene = tasks.task_file(task).read_text()
        assert tasks.read_states(tasks.start_states_file(task)).shape[0] == 50, task
        assert not set(_object_types(scene)) - _known("object"), task
        assert tasks.task_description(task), task


@needs_pro
def test_other_words_and_other_goals_have_the_description_of_their_file() -> None:
    said = {kind: tasks.task_description(f"libero_goal_{kind}/0") for kind in ("lan", "task", "object", "swap")}
    assert said == {
        "lan": "open the cabinet\u2019s middle drawer",
        "task": "open the bottom drawer of the cabinet",
        "object": "open the middle drawer of the cabinet",
        "swap": "open the middle drawer of the cabinet",
    }
    for suite in pro.REWORDED:
        base = suite.rpartition("_")[0]
        same = [
            number
            for number in range(10)
            if tasks.task_description(f"{suite}/{number}") == tasks.task_description(f"{base}/{number}")
        ]
        assert len(same) <= 1, (suite, same)
    assert tasks.task_description("libero_goal_with_mug/0") == "open the middle drawer of the cabinet"


def test_task_files_that_are_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pro, "ROOT", tmp_path / "nowhere")
    tasks.suites.cache_clear()
    try:
        found = faults("env.tasks=[libero_goal_lan/3]")
        assert any(
            fault.startswith(
                "env.tasks[0] = 'libero_goal_lan/3' is one of LIBERO-PRO, whose task files are not installed"
            )
            and " - make libero, or pip install --no-deps --target" in fault
            for fault in found
        )
        assert "libero_goal_with_mug/0" not in tasks.known_tasks()
    finally:
        tasks.suites.cache_clear()


@needs_pro
def test_a_folder_of_assets_without_their_models(tmp_path: Path) -> None:
    place = libero_files.place()
    assert place is not None
    for part in place.iterdir():
        if part.name != "articulated_objects":
            (tmp_path / part.name).symlink_to(part)
    (tmp_path / "articulated_objects").mkdir()
    (fault,) = faults(f"env.assets={tmp_path}", "env.tasks=[libero_goal_object/0, libero_goal_swap/0]")
    assert "'libero_goal_object/0'" in fault and "has no model 'yellow_cabinet', which is LIBERO-PRO's" in fault
    assert faults("env.tasks=[libero_goal_object/0, libero_goal_swap/0]") == []


@needs_pro
@pytest.mark.parametrize(
    "name", ["libero_goal_swap/30", "libero_goal_swap/abc", "libero_goal_swap", "libero_goal_swap/"]
)
def test_a_task_that_there_is_not_is_a_fault(name: str) -> None:
    (fault,) = faults(f"env.tasks=[{name}]")
    assert f"libero has no task '{name}'" in fault


@needs_pro
def test_suites_that_lack_something_are_not_offered() -> None:
    (fault,) = faults("env.tasks=[libero_goal_env/0]")
    assert "libero has no task 'libero_goal_env/0'" in fault
