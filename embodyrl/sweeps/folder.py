"""The folder of a sweep: sweep.json, the config that each run starts from, and a run directory for each run."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from embodyrl.config import LoadedConfig
from embodyrl.config.build import with_values
from embodyrl.config.issues import KeyPath
from embodyrl.errors import UserError, shell_command
from embodyrl.files import write_whole
from embodyrl.models.judging import KINDS
from embodyrl.runner.rundir import RunDir, is_free, make_numbered, near_path, write_config
from embodyrl.runs import CONFIG_FILE, published
from embodyrl.runs.record import RunRecord
from embodyrl.sweeps.axes import Point
from embodyrl.version import __version__

SWEEP_FILE = "sweep.json"
STARTS = ".configs"
"""Folder with the whole config of each run, so that one that starts later is what was asked for first."""
UNSAVED = ".unsaved"
"""Folder for what runs left that were killed before their first checkpoint."""


class SweepError(UserError):
    """Raised when the folder of a sweep exists already, is damaged, or a sweep cannot be run so."""

    exit_code = 2


class State(StrEnum):
    """State of one run, as its folder shows it."""

    missing = "missing"
    """It has no results."""
    interrupted = "interrupted"
    """It can continue from a checkpoint."""
    unsaved = "unsaved"
    """It has results, but nothing to continue from."""
    finished = "finished"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one run needs, the largest of the sweep; sizes in bytes."""

    cores: int = 1
    """Cores that it keeps busy at least."""
    threads: int = 1
    """Threads that `engine.threads: auto` stands for if the run has all cores of the machine."""
    host: float = 0.0
    gpus: int = 0
    gpu: float = 0.0
    gpu_memory: float | None = None
    """Memory of a GPU of this machine; None: unknown."""
    unknown: str = ""
    """Reason why it is not known, and runs are best alone; empty if it is."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Contents of sweep.json, which does not change once a run has started."""

    source: str
    """Name of the config in messages."""
    name: str
    """`run.name` of all runs."""
    words: Sequence[str]
    """Overrides that all runs share."""
    points: Sequence[Point]
    needs: Needs | None = None
    """None: not yet measured, and nothing was started."""
    at_once: int | None = None
    """Runs at once, if that was said; None: as many as fit."""
    threads: int | None = None
    """`engine.threads` of all runs where the config leaves it to the program and numbers depend on it."""
    version: str = __version__


def is_sweep(path: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    return (path / SWEEP_FILE).is_file()


def make_folder(loaded: LoadedConfig) -> Path:
    """Make the folder for a sweep: `run.dir`, else runs/<name>/<time>-sweep.

    Raises:
        SweepError: `run.dir` exists and is not empty.
    """
    run = loaded.config.run
    if run.dir is None:
        return make_numbered(Path("runs") / run.name / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-sweep")
    path = Path(run.dir)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        remedy = f"continue with it: {shell_command('resume', path)}" if is_sweep(path) else "choose another run.dir"
        raise SweepError(f"{path} exists already and is never overwritten: {remedy}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SweepError(f"run.dir = {path} cannot be made ({error.strerror}): choose another run.dir") from error
    return path


def write_plan(path: Path, plan: Plan) -> None:
    """Write sweep.json."""
    write_whole(path / SWEEP_FILE, json.dumps(asdict(plan), indent=2) + "\n")


def read_plan(path: Path) -> Plan:
    """Read sweep.json.

    Raises:
        SweepError: it is missing or damaged.
    """
    file = path / SWEEP_FILE
    try:
        found = json.loads(file.read_text())
        points = [Point(_folder_name(each["name"]), _texts(each["values"])) for each in found["points"]]
        if not points or len({point.name for point in points}) < len(points):
            raise ValueError("no runs, or two with one folder")
        given = {key.name: found[key.name] for key in dataclasses.fields(Plan)}
        return Plan(**given | {"points": points, "needs": found["needs"] and Needs(**found["needs"])})
    except FileNotFoundError as error:
        remedy = near_path(path, SWEEP_FILE) or "give the folder that a sweep made"
        raise SweepError(f"{path} is no sweep (no {SWEEP_FILE}): {remedy}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SweepError(
            f"{file} is damaged ({type(error).__name__}: {error}): its runs are whole, continue with each of them"
        ) from error


def _folder_name(value: Any) -> str:
    if not isinstance(value, str) or not value or "/" in value or value.startswith("."):
        raise ValueError(f"{value!r} is no name of a folder")
    return value


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise ValueError(f"{value!r} is no mapping of texts")
    return value


def start_of(sweep: Path, point: Point) -> Path:
    """Return the folder of the config that a run starts from."""
    return sweep / STARTS / point.name


def write_start(sweep: Path, point: Point, loaded: LoadedConfig, values: Mapping[KeyPath, Any]) -> LoadedConfig:
    """Write the config that a run starts from, with its own folder and further values; returns it."""
    settled = {("run", "dir"): str(sweep / point.name), **values}
    own = dataclasses.replace(loaded, config=with_values(loaded.config, settled))
    folder = start_of(sweep, point)
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, own)
    return own


def state_of(run_dir: Path) -> State:
    """Return the state of a run that no process is working on."""
    if not (run_dir / CONFIG_FILE).is_file() or is_free(run_dir):  # a run that finds somebody's own files says so
        return State.missing
    summary = RunRecord(run_dir).summary
    learned = any((run_dir / kind.folder).is_dir() for kind in KINDS)  # such runs write no summary
    if learned if summary is None else summary.get("stopped_by") is None:
        return State.finished
    return State.interrupted if published(run_dir) else State.unsaved


def set_aside(sweep: Path, run_dir: Path) -> Path:
    """Move what a run left that has nothing to continue from, so that it can start again; returns where it is."""
    RunDir(run_dir).close()  # refuses while another process uses it
    place = make_numbered(sweep / UNSAVED / run_dir.name)
    shutil.move(run_dir, place)
    return place / run_dir.name
