"""`embodyrl list`: lists registered components and configs, and whether they can be used here."""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

from rich.table import Table

from embodyrl.cli.arguments import CommandLineError
from embodyrl.config.files import builtin_folder, group_settings, list_experiments, list_groups, list_options
from embodyrl.config.infos import simulator_info
from embodyrl.errors import UserError, did_you_mean
from embodyrl.registry import (
    ADVANTAGES,
    ALGORITHMS,
    ENCODERS,
    EXPERTS,
    FILTERS,
    LOSSES,
    OPTIMIZERS,
    REWARDS,
    SIMULATORS,
    SINKS,
    STAGES,
    Registry,
    SupportedModel,
)
from embodyrl.terminal import Console

SECTIONS: dict[str, tuple[Registry[Any], ...]] = {
    "models": (SupportedModel,),
    "simulators": (SIMULATORS,),
    "algorithms": (ALGORITHMS, ADVANTAGES, LOSSES, REWARDS, FILTERS, ENCODERS),
    "stages": (STAGES,),
    "experts": (EXPERTS,),
    "optimizers": (OPTIMIZERS,),
    "sinks": (SINKS,),
}
CONFIGS = "configs"
PROTOCOLS = "protocols"
TASKS = "tasks"
WIDE = 10_000
"""Columns where there is no terminal."""


def show(what: str | None, which: str | None = None) -> None:
    """Print one section, or all of them but the tasks.

    Args:
        what: the section; None: all.
        which: of `tasks`, the simulator or the option of the group `env`; None: how many each simulator has.

    Raises:
        UserError: there is no such section, or no such simulator.
    """
    parts = {plural(registry.kind): (registry,) for registries in SECTIONS.values() for registry in registries}
    sections, known = parts | SECTIONS, [*SECTIONS, CONFIGS, PROTOCOLS, TASKS]
    if what is not None and what not in {*known, *sections}:
        hint = (
            f" - did you mean {CONFIGS!r}?"
            if what == "experiments"
            else did_you_mean(what, [*known, *sections], lead=" - ")
        )
        raise CommandLineError(f"cannot list {what!r}{hint} (one of {', '.join(known)})")
    if which is not None and what != TASKS:
        raise CommandLineError(f"only tasks are listed of something: `embodyrl list {TASKS} {which}`")
    for section in [what] if what else known[:-1]:
        if section == CONFIGS:
            _show_configs()
        elif section == PROTOCOLS:
            _show_protocols()
        elif section == TASKS:
            _show_tasks(which)
        else:
            for registry in sections[section]:
                _show_registry(registry)


def _print(table: Table) -> None:
    """Print a table that fits the terminal; elsewhere (`| grep`) every row is one line."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=WIDE)
    title, table.title = table.title, None  # which would be folded to the width of the table
    with console.capture() as captured:
        console.print(table)
    lines = [str(title), *captured.get().splitlines()]
    print("\n".join(line.rstrip() for line in lines), end="\n\n")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _show_registry(registry: Registry[Any]) -> None:
    origins = any(entry.source != "built-in" for entry in registry.entries())
    table = _table(plural(registry.kind), "name", "available here?", *(["from"] if origins else []), "what it is")
    for entry in registry.entries():
        missing = entry.missing()
        available = "yes" if not missing else f"no: {missing[0].install}"
        table.add_row(entry.name, available, *([entry.source] if origins else []), entry.summary)
    _print(table)


def _show_tasks(which: str | None) -> None:
    if which is None:
        table = _table("tasks (embodyrl list tasks SIMULATOR)", "simulator", "tasks", "as env=OPTION")
        for entry in SIMULATORS.entries():
            count = (
                "-"
                if entry.missing() or (every := simulator_info(entry.name).listed_tasks()) is None
                else str(len(every))
            )
            options = [option for option in list_options("env") if group_settings("env", option)["name"] == entry.name]
            table.add_row(entry.name, count, ", ".join(options))
        return _print(table)
    options = list_options("env")
    if which not in SIMULATORS and which not in options:
        known = [*SIMULATORS.names(), *options]
        hint = did_you_mean(which, known, otherwise=f"one of {', '.join(SIMULATORS.names())}")
        raise CommandLineError(f"there is no simulator {which!r} - {hint}")
    settings = group_settings("env", which) if which in options else {"name": which}
    entry = SIMULATORS.entry(settings["name"])
    if missing := entry.missing():
        raise UserError(f"{entry.name} is not installed here: {missing[0].install}")
    info = simulator_info(entry.name)
    names = settings.get("tasks", info.listed_tasks())
    if names is None:
        raise UserError(f"only the running simulator {entry.name} knows its tasks")
    table = _table(f"tasks of {which} (env.tasks)", "name", "task description")
    for name in names:
        table.add_row(name, info.task_description(name))
    _print(table)


def plural(noun: str) -> str:
    """Return the plural of a kind: `loss` -> `losses`."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def first_sentence(text: str) -> str:
    """Return the first sentence of the comment that a YAML file begins with."""
    comment = " ".join(line[1:].strip() for line in itertools.takewhile(lambda line: line[:1] == "#", text.split("\n")))
    return re.split(r"(?<=[.;])\s(?=[A-Z(])", comment, maxsplit=1)[0].rstrip(":;")


def _show_configs() -> None:
    table = _table("configs (embodyrl run NAME)", "name", "what it is")
    for name in list_experiments():
        text = (builtin_folder() / f"{name}.yaml").read_text()
        table.add_row(name.removeprefix("experiment/"), first_sentence(text))
    _print(table)
    groups = _table("config groups (defaults: [GROUP: CHOICE])", "group", "choices")
    for group in list_groups((builtin_folder(),)):
        groups.add_row(group, ", ".join(list_options(group)))
    _print(groups)


def _show_protocols() -> None:
    from embodyrl.evaluation.protocols import shipped

    table = _table("protocols (embodyrl eval --protocol NAME)", "name", "simulator", "episodes per task", "source")
    for protocol in shipped().values():
        source = f"{protocol.title} ({protocol.repository} {protocol.commit[:7]})"
        table.add_row(protocol.short_name, protocol.simulator, str(protocol.episodes_per_task), source)
    _print(table)
