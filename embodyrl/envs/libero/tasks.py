"""Names, task descriptions and files of LIBERO's tasks. LIBERO is not imported, so that a config is checked quickly.

A task is called `<suite>/<number>`, `libero_spatial/0` for instance, in the order of LIBERO's own list, which is also
that of public evaluations.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import pickle
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

ASSETS_VARIABLE = "EMBODYRL_LIBERO_ASSETS"
"""Environment variable that names the assets folder where the config does not."""

ASSETS_PARTS = ("articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects", "turbosquid_objects")
"""Folders that LIBERO's assets folder must have."""

ASSETS_REMEDY = (
    f"set env.assets (or the environment variable {ASSETS_VARIABLE}) to the folder libero/libero/assets of LIBERO's "
    f"source repository, or to what `hf download lerobot/libero-assets --repo-type dataset --local-dir FOLDER` fetches"
)


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
    """Return the names of each suite's task files, in LIBERO's order."""
    source = (package() / "benchmark" / "libero_suite_task_map.py").read_text()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign):
            table: dict[str, list[str]] = ast.literal_eval(statement.value)
            return table
    raise UserError("the installed package libero has no list of its tasks: make libero installs the right version")


def known_tasks() -> list[str]:
    """Return all task names, suite by suite."""
    return [f"{suite}/{number}" for suite, names in suites().items() for number in range(len(names))]


def _suite_and_name(task: str) -> tuple[str, str]:
    suite, _, number = task.partition("/")
    return suite, suites()[suite][int(number)]


def task_description(task: str) -> str:
    """Return LIBERO's `Task.language` of `task`, the task description that public checkpoints were trained with.

    It is made from the file's name. For 29 tasks, the file contains a different description.
    """
    _, name = _suite_and_name(task)
    if name[0].isupper():  # LIVING_ROOM_SCENE2_put_both_...
        name = name.partition("SCENE")[2].partition("_")[2]
    return name.replace("_", " ")


def task_file(task: str) -> Path:
    """Return the file with the scene and the goal of `task`."""
    suite, name = _suite_and_name(task)
    return package() / "bddl_files" / suite / f"{name}.bddl"


def start_states_file(task: str) -> Path:
    """Return the file with the official start states of `task`."""
    suite, name = _suite_and_name(task)
    return package() / "init_files" / suite / f"{name}.pruned_init"


def read_states(path: Path) -> NDArray[np.float64]:
    """Read the start states of a task `[50, numbers]`: time, positions and velocities."""
    with zipfile.ZipFile(path) as archive:  # as `torch.save` writes an array; torch itself is not needed to read it
        (member,) = (entry for entry in archive.namelist() if entry.endswith("/data.pkl"))
        states: NDArray[np.float64] = _ArrayUnpickler(io.BytesIO(archive.read(member))).load()
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


ASSETS_BELOW = ("assets", "libero/assets", "libero/libero/assets")
"""Where they are in folders that are named instead: LIBERO's package, its parent, its source repository."""


def find_assets(config: LiberoConfig) -> Path:
    """Return the folder of meshes, textures and scenes: `env.assets`, else $EMBODYRL_LIBERO_ASSETS, else LIBERO's own
    or its download folder.

    Raises:
        UserError: it does not exist, or is not a folder of LIBERO's assets.
    """
    own = (package() / "assets", Path.home() / ".cache" / "libero" / "assets")
    named = config.assets or os.environ.get(ASSETS_VARIABLE)
    place = Path(named).expanduser() if named else next((place for place in own if place.is_dir()), own[0])
    absent = _absent_parts(place)
    if not absent:
        return place.resolve()
    if not named:
        raise UserError(f"LIBERO's meshes and textures, which its package lacks, are not installed: {ASSETS_REMEDY}")
    source = "env.assets" if config.assets else f"${ASSETS_VARIABLE}"
    what = f"has no folder {absent[0]}/" if place.is_dir() else "does not exist"
    inner = next((each for each in ASSETS_BELOW if not _absent_parts(place / each)), None)
    remedy = ASSETS_REMEDY if inner is None else f"its folder {inner}/ has all; did you mean {str(place / inner)!r}?"
    raise UserError(f"{source} = {named!r} {what}: {remedy}")


def _absent_parts(place: Path) -> list[str]:
    """Return the folders that a folder of LIBERO's assets lacks."""
    return [part for part in ASSETS_PARTS if not (place / part).is_dir()]
