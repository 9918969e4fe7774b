"""What a run directory holds, read for a report. Nothing in it is executed, and odd parts are left out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from embodyrl.config.files import read_document
from embodyrl.config.rules import described_tasks, known_tasks
from embodyrl.errors import UserError, shell_command, without_controls
from embodyrl.screen import counted
from embodyrl.tracking.intervals import outcomes, wilson_interval
from embodyrl.tracking.report.summary import EVALUATIONS, GRAPH_FILE, SUMMARY_FILE, VIDEOS, is_evaluation, read_summary
from embodyrl.tracking.sinks import METRICS_FILE, read_rows

Row = dict[str, Any]
CONFIG_FILE, LOG_FILE, LAST = "config.yaml", "run.log", "checkpoints/last"
EPISODE: Mapping[str, type | tuple[type, ...]] = {
    "task": str,
    "start_state": int,
    "success": (bool, type(None)),
    "total_reward": (int, float),
    "length": int,
}
"""Keys of an episode's line that a report shows, with their types."""
MOST_WARNINGS = 12
"""Warnings of run.log that are shown."""


class RecordError(UserError):
    """Raised when a folder holds no run, or nothing that could be shown."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A success rate and its 95 % interval."""

    name: str
    successes: int
    trials: int

    @property
    def rate(self) -> float:
        """Successes of the trials, 0 .. 1."""
        return self.successes / self.trials

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson interval."""
        return wilson_interval(self.successes, self.trials)


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One evaluation of a run."""

    iteration: int
    env_steps: float
    """Of the run up to here."""
    metrics: dict[str, float]
    """Named `eval/...`."""
    episodes: Sequence[Row] = ()
    """Its episodes, first one first; empty for runs that kept none."""

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

    def by_task(self) -> list[Rate]:
        """Return the success of each task, in the order of their first episodes, where it is known."""
        tasks = dict.fromkeys(episode["task"] for episode in self.episodes)
        solved = {task: outcomes(each["success"] for each in self.episodes if each["task"] == task) for task in tasks}
        return [Rate(name=task, successes=sum(found), trials=len(found)) for task, found in solved.items() if found]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run as its directory shows it; see `read_run`."""

    path: Path
    config: Row
    """Plain data of config.yaml; empty if it cannot be read."""
    config_text: str
    rows: Sequence[Row]
    """Of metrics.jsonl."""
    odd_lines: int
    """Lines of metrics.jsonl that are no rows."""
    summary: Row | None
    """Of summary.json; None for a run that has not come to its end."""
    evaluations: Sequence[EvaluationRecord]
    videos: Sequence[Path]
    graph: str
    """Mermaid text of the iteration."""
    log: Sequence[str] = field(default=())
    """Lines of run.log, without times."""

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
    def iterations(self) -> Sequence[Row]:
        """Rows of iterations, without that of an evaluation before training."""
        return [row for row in self.rows if row["iteration"] > 0]

    @cached_property
    def last_iteration(self) -> int:
        """Number of the last iteration that is known."""
        return max([0, *(int(row["iteration"]) for row in self.rows)])

    @cached_property
    def env_steps(self) -> float:
        """Control steps of the whole run."""
        return max([0.0, *(row.get("env/total_steps") or 0.0 for row in self.rows)])

    @cached_property
    def state(self) -> tuple[str, str]:
        """How the run stands, in a word (`done`, `stopped`, `unfinished`) and in a sentence."""
        if self.summary is None:
            go_on = f": {shell_command('resume', self.path)}" if (self.path / LAST).is_symlink() else "."
            return "unfinished", f"No {SUMMARY_FILE}: the run continues, was killed or failed, see {LOG_FILE}{go_on}"
        by = self.summary.get("stopped_by")
        if by:
            return (
                "stopped",
                f"Stopped by {by} after iteration {self.last_iteration}: {shell_command('resume', self.path)}",
            )
        return "done", f"Done after {counted(self.summary['iterations'], 'iteration')}."

    @cached_property
    def final(self) -> EvaluationRecord | None:
        """The last evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    @cached_property
    def recorded(self) -> int:
        """Episodes that a video of an evaluation shows."""
        episodes = self.setting("tracking", "video", "episodes")
        most = self.setting("eval", "episodes")
        return min(episodes, most) if isinstance(episodes, int) and isinstance(most, int) else 0

    @cached_property
    def minutes(self) -> dict[int, float]:
        """Wall clock after each iteration, evaluations and checkpoints included [min]; empty if it was not recorded."""
        found, total = {}, 0.0
        for row in self.rows:
            total += (row.get("time/iteration") or 0.0) + (row.get("time/eval") or 0.0)
            found[row["iteration"]] = total / 60.0
        return found if total else {}

    @property
    def x_key(self) -> str:
        """Metric on the horizontal axis: env steps, or iterations where none are taken."""
        return "env/total_steps" if self.env_steps else "iteration"

    def setting(self, *path: str) -> Any:
        """Return a setting of the config, or None."""
        found: Any = self.config
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found


def read_run(run_dir: Path) -> RunRecord:
    """Read a run directory, of a run that ended or not, of this version or an older one.

    Raises:
        SummaryError: summary.json is damaged.
        RecordError: it is no run directory, or holds no results yet.
    """
    config = run_dir / CONFIG_FILE
    if not config.is_file():
        raise RecordError(f"{run_dir} holds no {CONFIG_FILE}: give the directory of a run")
    metrics = run_dir / METRICS_FILE
    rows, odd = read_rows(metrics) if metrics.is_file() else ([], 0)
    summary = read_summary(run_dir) if (run_dir / SUMMARY_FILE).exists() else None
    if not rows and summary is None:
        raise RecordError(
            f"{run_dir} holds no results yet, neither {METRICS_FILE} nor {SUMMARY_FILE}: wait for its first iteration"
        )
    return RunRecord(
        path=run_dir,
        config=read_document(config, CONFIG_FILE).data,
        config_text=_text(config),
        rows=rows,
        odd_lines=odd,
        summary=summary,
        evaluations=_evaluations(run_dir, rows, summary),
        videos=sorted((run_dir / VIDEOS).glob("*.mp4")),
        graph=_text(run_dir / GRAPH_FILE),
        log=[line[21:] for line in _text(run_dir / LOG_FILE).splitlines()],
    )


def find_runs(folder: Path) -> list[Path]:
    """Return the run directories at or below a folder, at most two levels down, in the order of their names.

    Raises:
        RecordError: there are none.
    """
    if (folder / CONFIG_FILE).is_file():
        return [folder]
    # Hidden folders hold what is no run: the configs that those of a sweep start from.
    places = (path.parent for level in ("*", "*/*") for path in folder.glob(f"{level}/{CONFIG_FILE}"))
    found = sorted(place for place in places if not any(part[0] == "." for part in place.relative_to(folder).parts))
    if not found:
        raise RecordError(f"{folder} holds no {CONFIG_FILE}, nor does a folder below it: give the directory of a run")
    return found


def warnings_of(run: RunRecord) -> list[str]:
    """Return the first warnings of run.log, each once."""
    found = dict.fromkeys(line for line in run.log if line.startswith("warning"))
    return list(found)[:MOST_WARNINGS]


def machine_of(run: RunRecord) -> dict[str, str]:
    """Return facts about the machine: those of summary.json, and what the first screen said of it."""
    kept = (run.summary or {}).get("machine")
    facts = {str(name): str(value) for name, value in kept.items()} if isinstance(kept, dict) else {}
    for row in ("machine", "placement"):
        said = [line.strip().removeprefix(row).strip() for line in run.log if line.split()[:1] == [row]]
        facts |= {row: said[-1]} if said else {}
    return facts


def task_descriptions_of(run: RunRecord) -> dict[str, str]:
    """Return the task description of each task of the last evaluation for which the config or the simulator has one."""
    own, simulator = run.setting("env", "task_descriptions"), run.setting("env", "name")
    tasks = {rate.name for rate in run.final.by_task()} if run.final else set()
    known = set(known_tasks(simulator) or ()) if isinstance(simulator, str) else set()
    found: dict[str, str] = described_tasks(str(simulator), tasks & known) if tasks & known else {}
    own_texts = {str(task): str(text) for task, text in own.items()} if isinstance(own, dict) else {}
    return {task: text for task, text in (found | own_texts).items() if text != task}


def _evaluations(run_dir: Path, rows: Sequence[Row], summary: Row | None) -> list[EvaluationRecord]:
    """Return the evaluations in the rows, and those that only the summary has."""
    steps = {row["iteration"]: row.get("env/total_steps") or 0.0 for row in rows}
    found = {int(number): metrics for number, metrics in (summary or {"evaluations": {}})["evaluations"].items()}
    for row in rows:
        metrics = {name: value for name, value in row.items() if name.startswith("eval/")}
        if is_evaluation(metrics):
            found[row["iteration"]] = metrics
    return [
        EvaluationRecord(
            iteration=number,
            env_steps=steps.get(number, 0.0),
            metrics=found[number],
            episodes=_episodes(run_dir / EVALUATIONS / f"{number:06d}.jsonl"),
        )
        for number in sorted(found)
    ]


def _episodes(path: Path) -> list[Row]:
    """Return the episodes in a file of `evaluations/`; what is none is left out."""
    found = []
    for line in _text(path).splitlines():
        try:
            episode = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(episode, dict) and all(isinstance(episode.get(key), kind) for key, kind in EPISODE.items()):
            found.append(episode)
    return found


def _text(path: Path) -> str:
    """Return a file's text, whatever bytes it has; empty if there is none."""
    return without_controls(path.read_text(errors="replace")) if path.is_file() else ""
