"""A run as its files tell it, while it continues or afterwards. Nothing here writes to the run or takes its lock."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
import yaml

from embodyrl.errors import UserError, without_controls
from embodyrl.runner.rundir import CONFIG_FILE, LOCK_FILE, LOG_FILE
from embodyrl.tracking.report import SummaryError, read_summary
from embodyrl.tracking.sinks import METRICS_FILE, rows_in

LOCKS = Path("/proc/locks")
"""The kernel's list of file locks."""
FAILED = "failed: "
"""Beginning of the last entry in run.log of a run that failed."""
WORTH_SEEING = ("warning:", FAILED, "replaced a simulator process", "nothing was learned")
"""What lines of run.log begin with that a watcher shows."""
DEPTH = 3
"""Levels of folders below a folder in which runs are looked for."""


class WatchError(UserError):
    """Raised when there is no run to watch."""

    exit_code = 2


class Status(StrEnum):
    """What a run is doing."""

    running = "running"
    done = "done"
    stopped = "stopped"
    """By a signal or a callback; saved."""
    failed = "failed"
    """It ended with an error, which run.log has."""
    died = "died"
    """No process works on it, and none has said that it ended: it was killed."""
    not_started = "not started"
    """It has a config and nothing else."""


ENDED = frozenset({Status.done, Status.stopped, Status.failed, Status.died})
"""States that do not change by themselves."""


@dataclass
class RunView:
    """What is known of a run at a moment."""

    path: Path
    name: str
    iterations: int | None
    """Iterations that it will have; None: its config says nothing about it."""
    status: Status = Status.not_started
    pid: int | None = None
    """The process that works on it, if it is one of this machine."""
    reason: str = ""
    """Why it ended, if it failed or was stopped."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows of metrics.jsonl."""
    notes: list[str] = field(default_factory=list)
    """Lines of run.log that are worth seeing, with their times."""
    silent_s: float | None = None
    """Seconds since it has last written metrics or log; None if it never has."""

    @property
    def iteration(self) -> int:
        """The last iteration that is in the metrics."""
        return max((row["iteration"] for row in self.rows), default=0)

    @property
    def training(self) -> list[dict[str, Any]]:
        """Rows of iterations, without that of the evaluation before training."""
        return [row for row in self.rows if "time/iteration" in row]

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The row of the last evaluation."""
        return next((row for row in reversed(self.rows) if row.get("eval/return") is not None), None)

    @property
    def left_s(self) -> float | None:
        """Seconds that the remaining iterations take if they are like the newest, with their evaluations."""
        newest = self.training[-20:]
        if self.iterations is None or not newest or self.status is not Status.running:
            return None
        seconds = sum((row["time/iteration"] or 0.0) + (row.get("time/eval") or 0.0) for row in newest)
        return seconds / len(newest) * max(self.iterations - self.iteration, 0)

    def memory(self) -> tuple[int, int] | None:
        """Return the memory of the processes that work on it [bytes] and their number; None if they are not here.
        Memory that they share counts once for each."""
        if self.pid is None:
            return None
        try:
            first = psutil.Process(self.pid)
            sizes = [_size(each) for each in (first, *first.children(recursive=True))]
        except psutil.Error:
            return None
        return sum(sizes), len(sizes)


def _size(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


class RunWatcher:
    """Looks at a run's files again and again; reads only what is new of its metrics.

    Args:
        path: of the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[int, int] = (0, 0)
        """The metrics file (its inode) and the bytes of it that have been read."""
        self._rows: list[dict[str, Any]] = []

    def look(self) -> RunView:
        """Return what the files say now.

        Raises:
            WatchError: the run has gone.
        """
        if not (self.path / CONFIG_FILE).is_file():
            raise WatchError(f"{self.path} has no {CONFIG_FILE} any more: it was removed")
        name, iterations = settings_of(self.path)
        name = without_controls(name)  # config and log may be a stranger's
        view = RunView(path=self.path, name=name, iterations=iterations, rows=self._metrics())
        log = _log(self.path)
        view.notes = [line for line in log if line[21:].startswith(WORTH_SEEING)]
        view.silent_s = _silence(self.path)
        view.status, view.pid, view.reason = _status(self.path, view, log)
        return view

    def _metrics(self) -> list[dict[str, Any]]:
        """Return all rows; a file that was written anew, as a resume does, is read from its beginning."""
        path = self.path / METRICS_FILE
        try:
            with path.open("rb") as file:
                facts = os.fstat(file.fileno())
                inode, end = self._read
                if facts.st_ino != inode or facts.st_size < end:
                    self._rows, end = [], 0
                file.seek(end)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new.rfind(b"\n") + 1  # the last line may be half written
        self._read = facts.st_ino, end + whole
        self._rows += rows_in(new[:whole].decode(errors="replace"))[0]
        return list(self._rows)


def find_runs(folder: Path) -> list[Path]:
    """Return the runs at or below a folder, by name.

    Raises:
        WatchError: there is none.
    """
    if not folder.is_dir():
        raise WatchError(f"{folder}: no such folder: give the directory of a run, or a folder of runs")
    found = sorted(_runs_below(folder, DEPTH))
    if not found:
        raise WatchError(f"{folder} holds no run (a folder with {CONFIG_FILE} and {LOG_FILE} that `embodyrl run` made)")
    return found


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / CONFIG_FILE).is_file() and (folder / LOCK_FILE).exists():
        yield folder
    elif depth:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in names:
            yield from _runs_below(folder / name, depth - 1)


def settings_of(run_dir: Path) -> tuple[str, int | None]:
    """Return the name of a run or a checkpoint, and its number of iterations; None if its config does not say it. Its
    config is not checked: the run has done that."""
    try:
        run = yaml.safe_load((run_dir / CONFIG_FILE).read_text())["run"]
        return str(run["name"]), int(run["iterations"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return run_dir.name, None


def _log(run_dir: Path) -> list[str]:
    """Return the lines of run.log, each with its time, without control characters."""
    try:
        return without_controls((run_dir / LOG_FILE).read_text(errors="replace")).splitlines()
    except FileNotFoundError:
        return []


def _silence(run_dir: Path) -> float | None:
    times = [path.stat().st_mtime for name in (METRICS_FILE, LOG_FILE) if (path := run_dir / name).exists()]
    return max(0.0, time.time() - max(times)) if times else None


def _status(run_dir: Path, view: RunView, log: list[str]) -> tuple[Status, int | None, str]:
    """Return what a run is doing, its process, and why it ended."""
    holder = lock_holder(run_dir / LOCK_FILE)
    if holder is not None:
        return Status.running, holder or None, ""
    last = next((line[21:] for line in reversed(log) if not line[21:].startswith(" ")), "")
    if last.startswith(FAILED):
        return Status.failed, None, last.removeprefix(FAILED)
    if not view.rows and not log:
        return Status.not_started, None, ""
    try:
        summary = read_summary(run_dir)
    except SummaryError:
        return (Status.stopped, None, last) if last.startswith("stopped by") else (Status.died, None, "")
    if summary["iterations"] < view.iteration or not last.startswith(("report:", "next:")):
        return Status.died, None, ""  # that summary is of an earlier process
    by = summary["stopped_by"]
    return (Status.done, None, "") if by is None else (Status.stopped, None, f"stopped by {by}, saved")


def lock_holder(lock: Path) -> int | None:
    """Return the process that holds a run's lock, 0 if it is one that cannot be seen from here, None if nobody does.

    The kernel's list is read instead of trying the lock, since a run that starts at that moment would find it taken.
    """
    try:
        inode = lock.stat().st_ino
        held = [line.split() for line in LOCKS.read_text().splitlines()]
    except OSError:
        return None
    for words in held:
        # 1: FLOCK ADVISORY WRITE <pid> <major>:<minor>:<inode> 0 EOF; one that waits has "->" as its second word
        if "FLOCK" in words[1:2] and words[5].rpartition(":")[2] == str(inode):
            pid = int(words[4])
            return pid if pid > 0 and psutil.pid_exists(pid) else 0
    return None
