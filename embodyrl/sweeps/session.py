"""A sweep from its first line on the screen to its last, as the command line and Python start it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_changes
from pathlib import Path

from embodyrl.config import LoadedConfig
from embodyrl.config.issues import KeyPath
from embodyrl.config.plugins import can_sign, code_of_its_own
from embodyrl.config.schema import AUTO
from embodyrl.errors import UserError, shell_command
from embodyrl.placement.plan import Inventory, inventory
from embodyrl.placement.ranks import is_launched
from embodyrl.runner.build import PROGRAM, ProgramInfo
from embodyrl.runner.rundir import SOURCES, RunDir, read_config
from embodyrl.runner.session import held, show
from embodyrl.runs import CONFIG_FILE, REPORT_FILE
from embodyrl.runs.record import read_run
from embodyrl.screen import counted
from embodyrl.sweeps.axes import Loader, Point, Seeds, load_all, points_of, split_words, together, with_seeds
from embodyrl.sweeps.folder import (
    Needs,
    Plan,
    State,
    SweepError,
    is_sweep,
    make_folder,
    read_plan,
    set_aside,
    start_of,
    state_of,
    write_plan,
    write_start,
)
from embodyrl.sweeps.progress import Screen, Task, short_names
from embodyrl.sweeps.results import Results, read_results, remarks, results_table, write_results
from embodyrl.sweeps.runner import SweepRunner
from embodyrl.sweeps.sharing import free_memory, is_elsewhere, most_at_once, plan_elsewhere, shares_of
from embodyrl.terminal import Console
from embodyrl.tracking.report import needs_packages

THREADS: KeyPath = ("engine", "threads")
Speak = Callable[[str], None]
"""Writes lines to the screen and to the sweep's log."""


@dataclass(frozen=True, kw_only=True)
class SweepEnding:
    """The end of a sweep."""

    path: Path
    exit_code: int
    """0 if all runs have finished, 1 if one failed, 128 + number of the signal that stopped the sweep."""
    results: Results
    failed: Sequence[str] = ()
    """For each run that failed its name, the reason and its log."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How a sweep is to be carried on."""

    at_once: int | None = None
    """Runs at once; None: as many as fit."""
    overrides: Sequence[str] = ()
    """Settings that may change on resume, of all its runs; with any, finished runs continue, too."""
    trust: bool = False
    """Run plug-ins that somebody else wrote."""


def start(
    load: Loader,
    words: Sequence[str],
    *,
    seeds: Seeds = None,
    options: SweepOptions | None = None,
    host: ProgramInfo = PROGRAM,
) -> SweepEnding:
    """Run every combination of the settings that have several values.

    Args:
        load: loads the config with overrides.
        words: overrides; some may have several values.
        seeds: see `Seeds`.
        options: see `SweepOptions`.
        host: whether progress is shown.

    Raises:
        ConfigError: a config is wrong; names the faults of all of them. Nothing was started.
        SweepError: the folder exists already.
    """
    if is_launched(os.environ):
        raise SweepError("torchrun starts the ranks of one run: start a sweep without it, and set world_size instead")
    options = options or SweepOptions()
    plain, axes = split_words(words)
    if seeds is None and not axes:
        raise SweepError("nothing has several values: give seeds, or a setting as in 'algorithm.gamma=0.9,0.99'")
    points = points_of(with_seeds(load, plain, axes, seeds))
    loaded = load_all(load, plain, points)
    first = loaded[0]
    path = make_folder(first)
    with held(RunDir(path), is_sweep) as directory:
        plan = Plan(
            source=first.source, name=first.config.run.name, words=plain, points=points, at_once=options.at_once
        )
        for point, each in zip(points, loaded, strict=True):
            write_start(path, point, each, {})
        write_plan(path, plan)
        show(directory, f"sweep of {counted(len(points), 'run')}   ({first.source})", host)
        # What is read back has been imported from the config already, so where nothing can be signed it is trusted.
        own = bool(code_of_its_own(first.config)) and not can_sign()
        return _carry_on(path, plan, with_changes(options, trust=options.trust or own), directory, host)


def go_on(path: Path, options: SweepOptions | None = None, host: ProgramInfo = PROGRAM) -> SweepEnding:
    """Continue a sweep: finished runs are kept, interrupted ones continue from their checkpoints, others start.

    Raises:
        ConfigError: a config is not valid (any more); names the faults of all of them. Nothing was started.
        SweepError: it is no sweep.
    """
    plan = read_plan(path)
    with held(RunDir(path), is_sweep) as directory:
        show(directory, f"sweep of {counted(len(plan.points), 'run')}   ({plan.source})", host)
        return _carry_on(path, plan, options or SweepOptions(), directory, host)


def _carry_on(path: Path, plan: Plan, options: SweepOptions, directory: RunDir, host: ProgramInfo) -> SweepEnding:
    def say(text: str) -> None:
        show(directory, text, host)

    states = {point.name: state_of(path / point.name) for point in plan.points}
    todo = [point for point in plan.points if options.overrides or states[point.name] is not State.finished]
    say(f"  {'output':<11}{path}/  ({len(plan.points) - len(todo)} finished, {len(todo)} to do)")
    tasks: list[Task] = []
    stopped_by = None
    if todo:
        configs = _configs(path, todo, states, options)
        if plan.needs is None:
            plan, configs = _measured(path, plan, todo, configs, options, say)
        tasks = _tasks(path, todo, states, configs, options, say)
        machine = inventory()
        number, why = _at_once(plan, options, configs, machine)
        say(f"  {'at once':<11}{counted(number, 'run')} ({why})")
        screen = Screen(tasks, shown=host.progress, note=directory.note)
        runner = SweepRunner(tasks, shares_of(machine, number, plan.needs or Needs()), screen, host.leave)
        try:
            runner.run()
        finally:
            screen.close()
        stopped_by = runner.stopped_by
    return _end(path, plan, tasks, stopped_by, directory, host)


def _configs(
    path: Path, todo: Sequence[Point], states: Mapping[str, State], options: SweepOptions
) -> list[LoadedConfig]:
    """Read the config of every run that is to be started or continued; a sweep may have been moved.

    Raises:
        ConfigError: with the faults of all of them.
    """

    def read(point: Point) -> LoadedConfig:
        if states[point.name] in (State.interrupted, State.finished):
            return read_config(path / point.name, options.overrides, SOURCES, trust=options.trust)
        loaded = read_config(start_of(path, point), options.overrides, trust=options.trust)
        run_dir = path / point.name
        if Path(str(loaded.config.run.dir)).absolute() != run_dir.absolute():
            loaded = write_start(path, point, loaded, {})
        return loaded

    return together(todo, read)


def _measured(
    path: Path, plan: Plan, todo: Sequence[Point], configs: list[LoadedConfig], options: SweepOptions, say: Speak
) -> tuple[Plan, list[LoadedConfig]]:
    """Find what the runs need, and settle how many threads each has, if numbers depend on it: that must not change
    with the number of runs beside it."""
    cores = inventory().cores
    if (
        len(todo) == 1
        or options.at_once == 1
        or is_elsewhere(configs[0].config)
        or (cores == 1 and not options.at_once)
    ):
        needs = Needs()
    else:
        say(f"  {'planning':<11}what a run needs, a few seconds ...")
        settings = {point.setting: start_of(path, point) for point in todo}
        needs = plan_elsewhere(list(settings.values()), trust=options.trust)
    plan = with_changes(plan, needs=needs)
    number, _ = _at_once(plan, options, configs, inventory())
    if needs.threads > 1 and number > 1:
        plan = with_changes(plan, threads=max(1, cores // number))
        say(f"  {'threads':<11}{plan.threads} in every run: its numbers depend on them")
        configs = [
            write_start(path, point, each, {THREADS: plan.threads} if each.config.engine.threads == AUTO else {})
            for point, each in zip(todo, configs, strict=True)
        ]
    write_plan(path, plan)
    return plan, configs


def _at_once(plan: Plan, options: SweepOptions, configs: Sequence[LoadedConfig], machine: Inventory) -> tuple[int, str]:
    """Return how many runs there are at once, and why."""
    asked = options.at_once or plan.at_once
    if asked is not None:
        return min(asked, len(configs)), "as asked"
    if is_elsewhere(configs[0].config):
        return 1, "they are on a cluster; --at-once says otherwise"
    return most_at_once(plan.needs or Needs(), machine, free_memory(), len(configs))


def _tasks(
    path: Path,
    todo: Sequence[Point],
    states: Mapping[str, State],
    configs: Sequence[LoadedConfig],
    options: SweepOptions,
    say: Speak,
) -> list[Task]:
    """Return what is to be done, in the order of the sweep."""
    tasks = []
    names = short_names([point.values for point in todo])
    for name, point, loaded in zip(names, todo, configs, strict=True):
        run_dir, state = path / point.name, states[point.name]
        if state is State.unsaved:
            say(f"  {name} had saved nothing to resume from and starts again; what it left: {set_aside(path, run_dir)}")
        if state in (State.interrupted, State.finished):
            arguments = ["resume", str(run_dir)]
        else:
            arguments = ["run", str(start_of(path, point) / CONFIG_FILE)]
        arguments += [*options.overrides, *(["--trust"] if options.trust else [])]
        tasks.append(Task(name, arguments, run_dir, loaded.config.run.iterations))
    return tasks


def _end(
    path: Path, plan: Plan, tasks: Sequence[Task], stopped_by: int | None, directory: RunDir, host: ProgramInfo
) -> SweepEnding:
    """Write the results, show them, and say how the sweep ended."""
    results = read_results(path, plan)
    write_results(path, results)
    if host.progress:
        console = Console()
        console.print()
        console.print(results_table(results))
    for line in remarks(results):
        show(directory, line, host)
    failed = [task for task in tasks if task.reason and (stopped_by is None or task.state == "failed")]
    reasons = [f"{task.name}: {task.reason}; log: {task.log}" for task in failed]
    for task, reason in zip(failed, reasons, strict=True):
        show(directory, f"{task.state}: {reason}", host)
    finished = sum(run.state is State.finished for run in results.runs)
    show(directory, f"{finished} of {counted(len(results.runs), 'run')} finished; results: {path}/", host)
    try:
        if (report := _report(path, results)) is not None:
            show(directory, f"report: {report}", host)
    except (UserError, OSError) as error:  # the results are written
        again = shell_command("report", path)
        show(directory, f"warning: no {REPORT_FILE}: {error}. Once that is fixed: {again}", host)
    if finished < len(results.runs):
        show(directory, f"next: {shell_command('resume', path)}", host)
    exit_code = 128 + stopped_by if stopped_by is not None else 1 if failed else 0
    return SweepEnding(path=path, exit_code=exit_code, results=results, failed=reasons)


def _report(path: Path, results: Results) -> Path | None:
    """Write the page that shows all runs side by side, seeds as mean and band; returns it, None without any results."""
    runs = [read_run(path / run.point.name) for run in results.runs if run.summary]
    if not runs:
        return None
    with needs_packages():
        from embodyrl.tracking.report.comparison import write_comparison
    return write_comparison(runs, path / REPORT_FILE)
