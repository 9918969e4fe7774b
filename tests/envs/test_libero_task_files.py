"""Further suites in LIBERO's layout (`env.task_files`): played as LIBERO's own tasks, and what is refused."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from libero_files import needs_assets

from embodyrl.config import ConfigError, load_config
from embodyrl.envs.types import EpisodeSpec
from embodyrl.registry import SIMULATORS

if SIMULATORS.entry("libero").missing():
    pytest.skip("LIBERO not installed", allow_module_level=True)

from embodyrl.envs.libero.simulator import Libero
from embodyrl.envs.libero.task_files import files_of, further_tasks
from embodyrl.envs.libero.tasks import start_states_file, task_file
from embodyrl.envs.options import LiberoConfig

STOVE = "libero_goal/7"
REWORDED = "mine/turn_on_the_stove_language_1"
OTHER_GOAL = "mine/turn_on_the_stove_somehow"
REACHED = "(True flat_stove_1)"
MOST = ["run.iterations=1", "env=libero/goal", "model=mlp", "algorithm=ppo", "env.cameras=[]", "eval.episodes=5"]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite made of LIBERO's stove: with another task description, and with a goal that is reached at once."""
    scenes, states = tmp_path / "files/bddl_files/mine", tmp_path / "files/init_files/mine"
    scenes.mkdir(parents=True)
    states.mkdir(parents=True)
    shutil.copy(start_states_file(STOVE), states / "turn_on_the_stove.pruned_init")
    text = task_file(STOVE).read_text()
    reworded = text.replace("(:language Turn on the stove)", "(:language Switch the  Stove on, please)")
    assert reworded != text and "(Turnon flat_stove_1)" in text
    (scenes / "turn_on_the_stove_language_1.bddl").write_text(reworded)
    (scenes / "turn_on_the_stove_somehow.bddl").write_text(text.replace("(Turnon flat_stove_1)", REACHED))
    (scenes / "turn_on_the_oven.bddl").write_text(text)  # without start states, so no task
    return tmp_path / "files"


def with_faults(suite: Path, *overrides: str) -> list[str]:
    """Return the faults of a config that plays tasks of the suite."""
    with pytest.raises(ConfigError) as raised:
        load_config(None, [*MOST, f"env.task_files={suite}", *overrides])
    return [str(fault) for fault in raised.value.faults]


def test_tasks_have_the_description_in_their_file_and_the_nearest_start_states(suite: Path) -> None:
    config = LiberoConfig(name="libero", tasks=[STOVE], task_files=str(suite))
    assert further_tasks(config) == {REWORDED: "switch the stove on, please", OTHER_GOAL: "turn on the stove"}
    assert files_of(REWORDED, config).start_states == suite / "init_files/mine/turn_on_the_stove.pruned_init"
    assert files_of(STOVE, config).scene == task_file(STOVE)
    assert further_tasks(LiberoConfig(name="libero", tasks=[STOVE], task_files=str(suite / "none"))) is None


@needs_assets
def test_they_are_played_beside_liberos_own_tasks(suite: Path) -> None:
    tasks = [STOVE, REWORDED, OTHER_GOAL]
    simulator = Libero(LiberoConfig(name="libero", tasks=tasks, task_files=str(suite)), 3)
    try:
        assert simulator.spec.tasks[REWORDED] == "switch the stove on, please"
        seen = simulator.reset([0, 1, 2], [EpisodeSpec(task=task, start_state=3, seed=0) for task in tasks])
        assert np.array_equal(seen.proprio[0], seen.proprio[1])
        still = np.zeros((3, 1, 7), np.float32)
        result = simulator.step_chunk([0, 1, 2], still)
        assert np.array_equal(result.observation.proprio[0], result.observation.proprio[1])
        assert result.success.ravel().tolist() == [False, False, True]
    finally:
        simulator.close()


@needs_assets
def test_what_libero_cannot_build_is_found_before_a_start(suite: Path, tmp_path: Path) -> None:
    scene = suite / "bddl_files/mine/turn_on_the_stove_language_1.bddl"
    text = scene.read_text()
    scene.write_text(text.replace("- plate", "- plat").replace("LIBERO_Tabletop_Manipulation", "Tabletop_light_3"))
    problem, thing = with_faults(suite, f"env.tasks=[{REWORDED}]")[::-1]
    assert f"{REWORDED!r}: the installed LIBERO has no object 'plat', which {scene} names - did you mean" in thing
    assert "has no problem 'tabletop_light_3'" in problem and "needs a LIBERO package of its own" in problem
    scene.write_text(text)

    (fault,) = with_faults(suite, "env.tasks=[mine/turn_on_the_stove_langage_1]")
    assert f"libero has no task 'mine/turn_on_the_stove_langage_1' - did you mean {REWORDED!r}?" in fault

    states = suite / "init_files/mine/turn_on_the_stove.pruned_init"
    states.write_bytes(states.read_bytes()[:1000])
    (fault,) = with_faults(suite, f"env.tasks=[{REWORDED}]")
    assert f"{states} cannot be read: " in fault and fault.endswith("fetch it again")
    with zipfile.ZipFile(states, "w") as archive:
        archive.writestr("archive/data.pkl", np.zeros((3, 20)).dumps())
    (fault,) = with_faults(suite, f"env.tasks=[{REWORDED}]")
    assert f"{states} has 3 start states, fewer than 50 - make 50" in fault

    repository = tmp_path / "repository/libero"
    repository.mkdir(parents=True)
    (repository / "libero").symlink_to(suite)
    (fault,) = with_faults(repository.parent, "env.tasks=[libero_goal/7]")
    assert f"has no folder bddl_files/ - did you mean '{repository}/libero'?" in fault
    (fault,) = with_faults(tmp_path / "nothing", f"env.tasks=[{REWORDED}]")
    assert "env.task_files" in fault and "is no folder" in fault
