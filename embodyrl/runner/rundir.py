"""The run directory: created once, its results never overwritten, used by one process at a time."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from embodyrl.config import ConfigUse, LoadedConfig, load_config, to_commented_yaml, to_plain
from embodyrl.config.issues import KeyPath
from embodyrl.config.plugins import ORIGIN_FILE, claims, read_origin, sign
from embodyrl.config.schema import BROUGHT, Config
from embodyrl.config.values import escape
from embodyrl.errors import RunError, UserError, near_match, shell_command
from embodyrl.files import entries_in, is_file, why_no_place, write_whole
from embodyrl.models.saved import stands_alone
from embodyrl.runner.checkpoint import MANIFEST, POLICY
from embodyrl.runs import (
    CHECKPOINTS,
    CONFIG_FILE,
    CONSOLE_FILE,
    EVALUATIONS,
    GRAPH_FILE,
    LAST,
    LOCK_FILE,
    LOG_FILE,
    METRICS_FILE,
    TENSORBOARD,
    VIDEOS,
    WORKER_LOGS,
)

MEETING_FILE = ".ranks"
"""File through which ranks found each other, in runs of earlier versions."""
NO_RESULTS = b"no results yet\n"
"""Contents of the lock file until the first row of metrics."""
OF_A_START = (
    *(LOCK_FILE, CONFIG_FILE, ORIGIN_FILE, LOG_FILE, CONSOLE_FILE, GRAPH_FILE, METRICS_FILE),
    *(
        f"{WORKER_LOGS}/*.log",
        f"{TENSORBOARD}/events.out.*",
        "tracking/*",
        f"{EVALUATIONS}/*.jsonl",
        f"{VIDEOS}/*.mp4",
        MEETING_FILE,
        ".*.tmp",
    ),
)
"""Files of a run without results; anything else in the folder is somebody's own."""


SOURCES: Sequence[KeyPath] = [("model", name) for name in BROUGHT]
"""Settings that name the files that a policy is built from."""


class RunDirError(UserError):
    """Raised when a run directory exists already, is not one, or is in use."""

    exit_code = 2


class RunDirLostError(RunError):
    """Raised when a run directory was deleted or moved while its run was running."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} is not there any more: it was deleted or moved during the run, and the checkpoints with it. The "
            f"run has stopped, and what it learned since the last one is lost. If you moved it, continue with: "
            f"{shell_command('resume', 'NEW_PLACE')}; if not, start a new run"
        )


class RunDir:
    """A locked run directory.

    Args:
        path: the folder; must exist.

    Raises:
        RunDirError: another process is using it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = _inode(path)
        self._lock: int | None = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise RunDirError(f"{path} is in use by another process: wait for it to end, or stop it") from error

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """Make the folder that the config asks for. A start that failed before it had any result leaves the folder to
        the next one.

        Raises:
            RunDirError: `run.dir` exists and is not empty, or cannot be made.
        """
        if config.run.dir is None:
            path = Path("runs") / config.run.name / time.strftime("%Y-%m-%d_%H-%M-%S")
        else:
            path = Path(config.run.dir)
        is_numbered = config.run.dir is None and path.exists()
        if not is_numbered and (reason := why_not(path)) is not None:
            raise RunDirError(": ".join(reason))
        try:
            if config.run.dir is None:
                path = make_numbered(path)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(f"{path} cannot be made: {error.strerror}: choose another run.dir") from error
        directory = cls(path)
        directory._begin()
        return directory

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open an existing run directory.

        Raises:
            RunDirError: it is not one.
        """
        refuse_other_than_run(path)
        if (path / MANIFEST).exists():  # nothing may be written there
            run_dir = path.absolute().parents[1]
            raise RunDirError(
                f"{path} is a checkpoint, and only a whole run can continue: {shell_command('resume', run_dir)}"
            )
        directory = cls(path)
        directory._clear()
        return directory

    @classmethod
    def prepare(cls, path: Path) -> None:
        """Make a folder that a run can start in, and others can write its `CONSOLE_FILE` to before. It must be free."""
        path.mkdir(exist_ok=True)
        (path / LOCK_FILE).write_bytes(NO_RESULTS)

    @classmethod
    def shared(cls, path: Path) -> RunDir:
        """Return a run directory that another rank has locked and writes."""
        directory = cls.__new__(cls)
        directory.path, directory._inode, directory._lock = path, _inode(path), None
        return directory

    @property
    def is_lost(self) -> bool:
        """Whether the folder has been deleted or moved, or another one is in its place."""
        return _inode(self.path) != self._inode

    def _begin(self) -> None:
        """Remove the files of an earlier start, and note that there are no results."""
        for entry in entries_in(self.path):
            if entry.name not in (LOCK_FILE, CONSOLE_FILE) and _is_of_a_start(entry.relative_to(self.path)):
                entry.unlink()
        assert self._lock is not None, "this process has made the folder"
        os.pwrite(self._lock, NO_RESULTS, 0)

    def keep(self) -> None:
        """Note that there are results: no start may take this folder any more.

        Raises:
            RunDirLostError: it was deleted or moved.
        """
        if self._lock is None:
            return
        if self.is_lost:
            raise RunDirLostError(self.path)
        os.ftruncate(self._lock, 0)

    def _clear(self) -> None:
        """Remove unfinished files of a process that was killed."""
        for pattern in (".*.tmp", f"{EVALUATIONS}/.*.tmp", f"{VIDEOS}/.*.partial", MEETING_FILE):
            for path in self.path.glob(pattern):
                path.unlink()

    def note(self, text: str) -> None:
        """Append lines to run.log, with the time; it holds what the screen showed except the table."""
        if self._lock is None:
            return
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with (self.path / LOG_FILE).open("a") as log:
            log.writelines(f"{now}  {line}\n" for line in text.splitlines())

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)


def refuse_other_than_run(path: Path) -> None:
    """Raise `RunDirError` unless a folder is a run directory or a checkpoint; the text names a run nearby."""
    if (path / CONFIG_FILE).is_file():
        return
    what = f"is not a run directory (no {CONFIG_FILE})" if path.exists() else "does not exist"
    remedy = near_path(path, CONFIG_FILE) or "give the folder that `embodyrl run` made"
    raise RunDirError(f"{path} {what}: {remedy}")


def near_path(path: Path, file: str) -> str:
    """Return the hint for a path without `file`: the folder with one that is newest below it, or whose name is most
    similar; empty if there is none in sight."""
    below = _with(file, path, levels=(1, 2))
    beside = [] if below else _with(file, path.parent, levels=(1,)) + _with(file, path.parent.parent, levels=(2,))
    near = near_match(str(path), beside)
    if near:
        return f"did you mean {near!r}?"
    found = below or beside or _with(file, Path("runs"), levels=(2,))
    return f"give the folder of one, for instance {found[-1]}" if found else ""


def _with(file: str, folder: Path, levels: Sequence[int]) -> list[str]:
    """Return the folders with `file` so many levels below a folder, hidden ones apart; that with the newest file comes
    last."""
    found = [place for level in levels for place in folder.glob("/".join(["[!.]*"] * level + [file]))]
    return [str(place.parent) for place in sorted(found, key=lambda place: place.stat().st_mtime)]


def _inode(path: Path) -> tuple[int, int] | None:
    """Return what identifies a folder, whatever its name; None if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def why_not(path: Path) -> tuple[str, str] | None:
    """Return why a run cannot have this folder for its directory, and the remedy; None if it can."""
    if os.path.lexists(path):
        if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            return f"{path} is not writable", "choose another run.dir, or change its permissions"
        if path.is_dir() and is_free(path):
            return None
        if not path.is_dir():
            return f"{path} is a file", "choose another run.dir"
        return f"{path} exists already and is never overwritten", _what_to_do_with(path)
    reason = why_no_place(path)
    return None if reason is None else (f"{path} cannot be made, because {reason}", "choose another run.dir")


def is_free(path: Path) -> bool:
    """Return whether a folder is empty, or holds nothing but the files of a start that had no results."""
    if not path.is_dir():
        return False
    if not any(path.iterdir()):
        return True
    lock = path / LOCK_FILE  # looked at first, so that a folder such as / or /proc is not listed as a whole
    if not os.path.lexists(lock) or not is_file(lock) or lock.read_bytes() != NO_RESULTS:
        return False
    return all(_is_of_a_start(entry.relative_to(path)) for entry in entries_in(path))


def _is_of_a_start(name: Path) -> bool:
    return any(fnmatch(str(name), pattern) for pattern in OF_A_START)


def _what_to_do_with(path: Path) -> str:
    if not (path / CONFIG_FILE).is_file():
        return "choose another run.dir"
    if not (path / CHECKPOINTS / LAST).is_symlink():
        return "that run saved nothing to continue from, so remove the folder, or choose another run.dir"
    return f"choose another run.dir, or continue with it: {shell_command('resume', path)}"


def write_config(folder: Path, loaded: LoadedConfig) -> None:
    """Write the whole config into a run directory or a checkpoint, with the origin of it and of its plug-ins, which is
    signed if there are any. Existing files are replaced atomically."""
    plugin_dir = loaded.plugin_dir.absolute()
    origin = {"source": loaded.source, "plugin_dir": str(plugin_dir)}
    named = claims(escape(to_plain(loaded.written)))
    if named and (signature := sign(plugin_dir, named)) is not None:
        origin["signature"] = signature
    for name, text in {
        CONFIG_FILE: to_commented_yaml(loaded.written),
        ORIGIN_FILE: json.dumps(origin, indent=2) + "\n",
    }.items():
        write_whole(folder / name, text)


def read_config(
    folder: Path,
    overrides: Sequence[str],
    not_needed: Sequence[KeyPath] = (),
    *,
    use: ConfigUse = ConfigUse.run,
    model: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> LoadedConfig:
    """Load what `write_config` wrote, with changes from the command line.

    Args:
        folder: of a run or a checkpoint.
        overrides: `key=value` from the command line.
        not_needed: settings that name files which may be missing.
        use: purpose of the config, `run` or `play`.
        model: see `config.load_config`.
        trust: import its plug-ins even if somebody else made the folder.

    Raises:
        ConfigError: the config is not valid (any more), or a plug-in has been moved.
        UntrustedError: it has plug-ins, and the folder is not this user's own.
        RunDirError: the folder holds no config.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise RunDirError(f"{folder} holds no {CONFIG_FILE}: give a folder that `embodyrl run` made")
    file = folder / CONFIG_FILE
    loaded = load_config(file, overrides, use=use, not_needed=not_needed, model=model, trust=trust)
    return dataclasses.replace(loaded, source=read_origin(folder).get("source", loaded.source))


def restore_files(run_dir: Path, checkpoint: Path) -> str | None:
    """Restore damaged files of a run directory from its checkpoint; returns a warning if there were any."""
    is_whole = {CONFIG_FILE: bool((run_dir / CONFIG_FILE).read_bytes().strip()), ORIGIN_FILE: _is_origin(run_dir)}
    damaged = [name for name, whole in is_whole.items() if not whole]
    for name in damaged:
        write_whole(run_dir / name, (checkpoint / name).read_text())
    if not damaged:
        return None
    what = f"{' and '.join(damaged)} of {run_dir} {'are' if len(damaged) > 1 else 'is'} damaged or missing"
    return f"warning: {what}: taken from {checkpoint.name} instead"


def _is_origin(folder: Path) -> bool:
    """Return whether a folder's origin.json has the form that `write_config` writes."""
    try:
        found = json.loads((folder / ORIGIN_FILE).read_text())
        return all(isinstance(found[name], str) for name in ("source", "plugin_dir"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def sources_not_needed(checkpoint: Path) -> Sequence[KeyPath]:
    """Return the settings for a policy's source files, if its checkpoint does not need them: it does if it holds
    adapters."""
    return SOURCES if stands_alone(checkpoint / POLICY) else ()


def read_saved(
    checkpoint: Path, overrides: Sequence[str], *, model: Mapping[str, Any] | None = None, trust: bool = False
) -> LoadedConfig:
    """Load the config of a checkpoint whose policy, or another `model` in its place, only acts, so that demonstrations
    may be missing.

    Raises:
        ConfigError, RunDirError, UntrustedError: see `read_config`.
    """
    unread = [("data", "path"), *sources_not_needed(checkpoint)]
    return read_config(checkpoint, overrides, unread, use=ConfigUse.play, model=model, trust=trust)


def make_numbered(path: Path) -> Path:
    """Make `path`, or `path-2`, `path-3`, ... where runs start within the same second."""
    number = 1
    while True:
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return candidate
