"""Names, task descriptions and files of the tasks of LIBERO and LIBERO-PRO. Neither is imported, so that a config is
checked quickly.

A task is called `<suite>/<number>`, `libero_spatial/0` for instance, in the order of LIBERO's own list, which is also
that of public evaluations. The suites of LIBERO-PRO (`pro`) have the tasks of LIBERO's in the same order.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import re
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.envs.libero import pro
from embodyrl.envs.options import LiberoConfig
from embodyrl.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


OFFICIAL_STATES = 50
"""Start states that LIBERO has for every task."""

ROBOT_STATE = 8
"""Size of the robot's state: position and rotation of the end effector (6), positions of both fingers (2)."""

ACTION_DIM = 7
"""Size of an action (D): displacement (3) and rotation (3) of the end effector, and the gripper."""

CONTROL_FREQUENCY = 20.0
"""Control steps per simulated second [Hz]."""

CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
"""Camera name -> LIBERO's name of it."""


def package() -> Path:
    """Return the folder of LIBERO's own files. The package is not imported, because that asks questions on stdin.

    Raises:
        UserError: LIBERO is not installed, or it is another version than the one that is known here.
    """
    spec = importlib.util.find_spec("libero")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "libero" / "benchmark").is_dir():
            return Path(place) / "libero"
    raise UserError("the package libero is not installed, or has no benchmark in it: make libero")


@lru_cache(maxsize=1)
def suites() -> dict[str, list[str]]:
    """Return the names of each suite's task files, in LIBERO's order: LIBERO's suites, then LIBERO-PRO's."""
    own = pro.read_task_map(package())
    return own | pro.suites(own)


def known_tasks() -> list[str]:
    """Return all task names, suite by suite."""
    return [f"{suite}/{number}" for suite, names in suites().items() for number in range(len(names))]


def suite_and_name(task: str) -> tuple[str, str]:
    """Return the suite of a task, and the name of its files."""
    suite, _, number = task.partition("/")
    return suite, suites()[suite][int(number)]


def task_description(task: str) -> str:
    """Return LIBERO's `Task.language` of `task`, the task description that public checkpoints were trained with.

    It is made from the file's name. For 29 tasks, the file contains a different description. Suites of LIBERO-PRO that
    change the words or the goal keep the names of LIBERO's files, so that the new description is only in the file; it
    is empty where that is not installed.
    """
    suite, name = suite_and_name(task)
    if suite in pro.REWORDED:
        return description_in(task_file(task)) if pro.is_here() else ""
    if name[0].isupper():  # LIVING_ROOM_SCENE2_put_both_...
        name = name.partition("SCENE")[2].partition("_")[2]
    return name.replace("_", " ")


def description_in(scene: Path) -> str:
    """Return the task description in a task's file, as LIBERO reads it; empty if there is none."""
    found = re.search(r"\(:language\s+([^()]*)\)", scene.read_text())
    return " ".join(found[1].split()).lower() if found else ""


def task_file(task: str) -> Path:
    """Return the file with the scene and the goal of `task`."""
    suite, name = suite_and_name(task)
    return _root(suite) / "bddl_files" / suite / f"{name}.bddl"


def start_states_file(task: str) -> Path:
    """Return the file with the official start states of `task`."""
    suite, name = suite_and_name(task)
    return _root(suite) / "init_files" / suite / f"{name}.pruned_init{pro.SUFFIX if pro.has(suite) else ''}"


def _root(suite: str) -> Path:
    return pro.ROOT if pro.has(suite) else package()


def read_states(path: Path) -> NDArray[np.float64]:
    """Read the start states of a task `[50, numbers]`: time, positions and velocities."""
    if path.suffix == pro.SUFFIX:
        import numpy as np

        with np.load(path, allow_pickle=False) as file:
            states: NDArray[np.float64] = file["states"]
        return states
    with zipfile.ZipFile(path) as archive:  # as `torch.save` writes an array; torch itself is not needed to read it
        (member,) = (entry for entry in archive.namelist() if entry.endswith("/data.pkl"))
        states = _ArrayUnpickler(io.BytesIO(archive.read(member))).load()
    return states


class _ArrayUnpickler(pickle.Unpickler):
    """Reads a pickled numpy array and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function of a pickled array under its present name; refuse all others."""
        allowed = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
        if name == "_reconstruct" and module.startswith("numpy."):
            return super().find_class("numpy._core.multiarray", name)
        if (module, name) in allowed:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of an array")


def official_state(start_state: int, config: LiberoConfig) -> int:
    """Return the number of the official start state, 0 .. 49, for an id.

    Training draws ids below `env.start_states`; evaluation uses ids from `eval.first_start_state` on, at or above it.
    Evaluation's ids cycle through the states that training does not use, or with `share_start_states` through all.
    """
    if config.share_start_states:
        return start_state % OFFICIAL_STATES
    if start_state < config.start_states:
        return start_state
    return config.start_states + (start_state - config.start_states) % (OFFICIAL_STATES - config.start_states)
