"""What a run directory says of its run. Nothing in it is executed, and odd parts are left out."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from embodyrl.config.files import read_document
from embodyrl.errors import UserError, shell_command, without_controls
from embodyrl.runs import (
    CHECKPOINTS,
    CONFIG_FILE,
    LAST,
    LOCK_FILE,
    LOG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    episodes_file,
    runs_below,
)
from embodyrl.runs.metrics import MetricsReader, Row, read_json_lines, seconds_left, seconds_of
from embodyrl.screen import counted

SUMMARY: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "iterations": int,
    "env_steps": int,
    "wall_s": (int, float),
    "env_steps_per_s": (int, float),
    "seed": int,
    "evaluations": dict,
    "config_hash": str,
    "versions": dict,
}
"""Keys that every summary.json has, with their types."""
EVALUATED = ("eval/return", "eval/episode_length", "eval/episodes")
"""Metrics that every evaluation has."""
SUCCESS = ("eval/success_once", "eval/success_low", "eval/success_high")
"""Metrics of evaluations that an evaluation has all or, where the simulator does not say what success is, none of."""
EPISODE: Mapping[str, type | tuple[type, ...]] = {
    "task": str,
    "start_state": int,
    "success": (bool, type(None)),
    "total_reward": (int, float),
    "length": int,
}
"""Keys of an episode's line that readers use, with their types."""
TIMED = len("2026-01-31 12:00:00  ")
"""Characters in front of what a line of run.log says."""
FAILED = "failed: "
"""Beginning of the last entry in run.log of a run that failed."""
LOCKS = Path("/proc/locks")
"""The kernel's list of file locks."""


class SummaryError(UserError):
    """Raised when summary.json is missing or damaged."""


class RecordError(UserError):
    """Raised when a folder holds no run, or nothing that could be shown."""


class Status(StrEnum):
    """State of a run."""

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


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation of a run."""

    run_dir: Path
    iteration: int
    env_steps: float
    """Of the run up to here."""
    metrics: dict[str, float]
    """Named `eval/...`."""

    @cached_property
    def episodes(self) -> Sequence[Row]:
        """Its episodes, first one first; empty for runs that kept none."""
        found = read_json_lines(episodes_file(self.run_dir, self.iteration))
        return [each for each in found if _has(each, EPISODE)]

    @property
    def success(self) -> float | None:
        """Success rate, 0 .. 1; None: the simulator does not say what success is."""
        return self.metrics.get("eval/success_once")

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the success rate."""
        return None if self.success is None else (self.metrics["eval/success_low"], self.metrics["eval/success_high"])

    @property
    def sampled(self) -> bool:
        """True if actions were drawn; else they were the policy's most likely ones."""
        return bool(self.metrics.get("eval/sampled"))


class RunRecord:
    """A run of this version or an older one, that goes on or has ended. A file is read when its contents are first
    asked for, and only then.

    Args:
        path: the run directory.
        metrics: has read some of its metrics already.
    """

    def __init__(self, path: Path, metrics: MetricsReader | None = None) -> None:
        self.path = path
        self._metrics = metrics or MetricsReader(path / METRICS_FILE)

    def again(self) -> RunRecord:
        """Return the run as it is now; of its metrics only what was added is read."""
        return RunRecord(self.path, self._metrics)

    def text(self, name: str) -> str:
        """Return the text of one of its files, whatever bytes that has, without control characters; empty if there is
        none."""
        file = self.path / name
        return without_controls(file.read_text(errors="replace")) if file.is_file() else ""

    # ---- settings

    @cached_property
    def config(self) -> Row:
        """Plain data of config.yaml, which nobody checks again; empty if it cannot be read."""
        return read_document(self.path / CONFIG_FILE, CONFIG_FILE).data

    def setting(self, *path: str) -> Any:
        """Return a setting of the config, or None."""
        found: Any = self.config
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    @cached_property
    def name(self) -> str:
        """Name of the run."""
        return str((self.summary or {}).get("name") or self.setting("run", "name") or self.path.name)

    @cached_property
    def seed(self) -> int | None:
        """Seed of the run, if it is known."""
        seed = (self.summary or {}).get("seed", self.config.get("seed"))
        return seed if isinstance(seed, int) else None

    @cached_property
    def iterations(self) -> int | None:
        """Iterations that it will have; None: its config says nothing about it."""
        number = self.setting("run", "iterations")
        return number if isinstance(number, int) else None

    @cached_property
    def recorded(self) -> int:
        """Episodes that a video of an evaluation shows."""
        episodes = self.setting("tracking", "video", "episodes")
        most = self.setting("eval", "episodes")
        return min(episodes, most) if isinstance(episodes, int) and isinstance(most, int) else 0

    # ---- results

    @cached_property
    def rows(self) -> Sequence[Row]:
        """Rows of metrics.jsonl."""
        self._metrics.read()
        return list(self._metrics.rows)

    @property
    def odd_lines(self) -> int:
        """Lines of metrics.jsonl that are no rows."""
        return self._metrics.odd_lines

    @cached_property
    def summary(self) -> Row | None:
        """Contents of summary.json; None for a run that has not come to its end, or if it is damaged."""
        try:
            return read_summary(self.path)
        except SummaryError:
            return None

    @cached_property
    def evaluations(self) -> Sequence[EvaluationRecord]:
        """Evaluations in the rows, and those that only the summary has."""
        steps = {row["iteration"]: row.get("env/total_steps") or 0.0 for row in self.rows}
        found = dict(sorted_evaluations(self.summary))
        for row in self.rows:
            if is_evaluation(row):
                found[row["iteration"]] = {name: value for name, value in row.items() if name.startswith("eval/")}
        return [EvaluationRecord(self.path, number, steps.get(number, 0.0), found[number]) for number in sorted(found)]

    @property
    def final(self) -> EvaluationRecord | None:
        """The last evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def training(self) -> Sequence[Row]:
        """Rows of iterations, without those that an evaluation has alone."""
        return [row for row in self.rows if "time/iteration" in row]

    @cached_property
    def last_iteration(self) -> int:
        """Number of the last iteration that is known."""
        return max((row["iteration"] for row in self.rows), default=0)

    @cached_property
    def env_steps(self) -> float:
        """Control steps of the whole run."""
        return max([0.0, *(row.get("env/total_steps") or 0.0 for row in self.rows)])

    @cached_property
    def minutes(self) -> dict[int, float]:
        """Wall clock after each iteration, evaluations and checkpoints included [min]; empty if it was not recorded."""
        found, total = {}, 0.0
        for row in self.rows:
            total += seconds_of([row])
            found[row["iteration"]] = total / 60.0
        return found if total else {}

    @property
    def x_key(self) -> str:
        """Metric on the horizontal axis: env steps, or iterations where none are taken."""
        return "env/total_steps" if self.env_steps else "iteration"

    # ---- state

    @cached_property
    def log(self) -> Sequence[str]:
        """Lines of run.log, each with its time."""
        return self.text(LOG_FILE).splitlines()

    @property
    def said(self) -> Sequence[str]:
        """Lines of run.log, without times."""
        return [line[TIMED:] for line in self.log]

    @cached_property
    def process(self) -> int | None:
        """The process that works on it, 0 if it is one that cannot be seen from here; None: nobody does."""
        return lock_holder(self.path / LOCK_FILE)

    @property
    def status(self) -> Status:
        """What the run is doing."""
        return self._standing[0]

    @property
    def reason(self) -> str:
        """Why it ended, if it failed or was stopped."""
        return self._standing[1]

    @cached_property
    def _standing(self) -> tuple[Status, str]:
        if self.process is not None:
            return Status.running, ""
        last = next((line for line in reversed(self.said) if not line.startswith(" ")), "")
        if last.startswith(FAILED):
            return Status.failed, last.removeprefix(FAILED)
        if not self.rows and not self.log:
            return Status.not_started, ""
        if self.summary is None:
            return (Status.stopped, last) if last.startswith("stopped by") else (Status.died, "")
        if self.summary["iterations"] < self.last_iteration or not last.startswith(("report:", "next:")):
            return Status.died, ""  # that summary is of an earlier process
        by = self.summary.get("stopped_by")
        return (Status.done, "") if by is None else (Status.stopped, f"stopped by {by}, saved")

    @cached_property
    def state(self) -> tuple[str, str]:
        """How the run stands by its results, in a word (`done`, `stopped`, `unfinished`) and in a sentence."""
        if self.summary is None:
            is_saved = (self.path / CHECKPOINTS / LAST).is_symlink()
            go_on = f": {shell_command('resume', self.path)}" if is_saved else "."
            return "unfinished", f"No {SUMMARY_FILE}: the run continues, was killed or failed, see {LOG_FILE}{go_on}"
        by = self.summary.get("stopped_by")
        if by:
            after = f"Stopped by {by} after iteration {self.last_iteration}"
            return "stopped", f"{after}: {shell_command('resume', self.path)}"
        return "done", f"Done after {counted(self.summary['iterations'], 'iteration')}."

    @property
    def silent_s(self) -> float | None:
        """Seconds since it has last written metrics or log; None if it never has."""
        files = (self.path / METRICS_FILE, self.path / LOG_FILE)
        times = [path.stat().st_mtime for path in files if path.exists()]
        return max(0.0, time.time() - max(times)) if times else None

    @property
    def left_s(self) -> float | None:
        """Seconds that the remaining iterations take; None if that is not known, or it does not run."""
        if self.iterations is None or self.status is not Status.running:
            return None
        return seconds_left(self.rows, self.iterations)


def read_run(run_dir: Path) -> RunRecord:
    """Read a run that has something to show.

    Raises:
        SummaryError: summary.json is damaged.
        RecordError: it is no run directory, or holds no results yet.
    """
    if not (run_dir / CONFIG_FILE).is_file():
        raise RecordError(f"{run_dir} holds no {CONFIG_FILE}: give the directory of a run")
    run = RunRecord(run_dir)
    if (run_dir / SUMMARY_FILE).exists():
        run.summary = read_summary(run_dir)
    elif not run.rows:
        raise RecordError(
            f"{run_dir} holds no results yet, neither {METRICS_FILE} nor {SUMMARY_FILE}: wait for its first iteration"
        )
    return run


def find_runs(folder: Path) -> list[Path]:
    """Return the run directories at or below a folder, at most two levels down, in the order of their names.

    Raises:
        RecordError: there are none.
    """
    found = list(runs_below(folder, 2))
    if not found:
        raise RecordError(f"{folder} holds no {CONFIG_FILE}, nor does a folder below it: give the directory of a run")
    return found


def read_summary(run_dir: Path) -> Row:
    """Return the contents of a run's summary.json.

    Raises:
        SummaryError: it is missing or damaged.
    """
    path = run_dir / SUMMARY_FILE
    try:
        summary = json.loads(path.read_text())
        if _has(summary, SUMMARY) and all(
            int(iteration) >= 0 and is_evaluation(found) for iteration, found in summary["evaluations"].items()
        ):
            return dict(summary)
    except FileNotFoundError as error:
        raise SummaryError(f"{run_dir} holds no {SUMMARY_FILE}: give the directory of a run that ended") from error
    except (OSError, ValueError, RecursionError):
        pass
    raise SummaryError(f"{path} is damaged: have it written anew with {shell_command('resume', run_dir)}")


def sorted_evaluations(summary: Mapping[str, Any] | None) -> list[tuple[int, dict[str, float]]]:
    """Return iteration and metrics of every evaluation in a summary, in order; nothing without one."""
    found = summary["evaluations"] if summary else {}
    return [(int(iteration), found[iteration]) for iteration in sorted(found, key=int)]


def is_evaluation(found: object) -> bool:
    """Return whether these are the metrics of an evaluation."""
    if not isinstance(found, dict):
        return False
    wanted = (*EVALUATED, *(SUCCESS if any(found.get(name) is not None for name in SUCCESS) else ()))
    return all(isinstance(found.get(name), int | float) for name in wanted)


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


def _has(found: object, keys: Mapping[str, type | tuple[type, ...]]) -> bool:
    """Return whether data is a mapping with keys of these types."""
    return isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in keys.items())
