"""`embodyrl list`: lists registered components and configs, and whether they can be used here."""

from __future__ import annotations

import itertools
import re
from typing import Any

from rich.console import Console
from rich.table import Table

from embodyrl.config.files import builtin_folder, list_experiments, list_groups, list_options
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


def show(what: str | None) -> None:
    """Print one section, or all of them.

    Raises:
        UserError: there is no such section.
    """
    known = [*SECTIONS, CONFIGS, PROTOCOLS]
    if what is not None and what not in known:
        hint = did_you_mean(what, known, lead=" - ")
        raise UserError(f"cannot list {what!r}{hint} (one of {', '.join(known)})")
    console = Console()
    for section in [what] if what else known:
        if section == CONFIGS:
            _show_configs(console)
        elif section == PROTOCOLS:
            _show_protocols(console)
        else:
            for registry in SECTIONS[section]:
                _show_registry(console, registry)


def _show_registry(console: Console, registry: Registry[Any]) -> None:
    table = Table(title=plural(registry.kind), title_justify="left", box=None, pad_edge=False)
    origins = any(entry.source != "built-in" for entry in registry.entries())
    for title in ("name", "available here?", *(["from"] if origins else []), "what it is"):
        table.add_column(title, overflow="fold")
    for entry in registry.entries():
        missing = entry.missing()
        available = "yes" if not missing else f"no: {missing[0].install}"
        table.add_row(entry.name, available, *([entry.source] if origins else []), entry.summary)
    console.print(table)
    console.print()


def plural(noun: str) -> str:
    """Return the plural of a kind: `loss` -> `losses`."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def first_sentence(text: str) -> str:
    """Return the first sentence of the comment that a YAML file begins with."""
    comment = " ".join(line[1:].strip() for line in itertools.takewhile(lambda line: line[:1] == "#", text.split("\n")))
    return re.split(r"(?<=[.;:])\s(?=[A-Z(])", comment, maxsplit=1)[0].rstrip(":;")


def _show_configs(console: Console) -> None:
    table = Table(title="configs (embodyrl run NAME)", title_justify="left", box=None, pad_edge=False)
    for title in ("name", "what it is"):
        table.add_column(title, overflow="fold")
    for name in list_experiments():
        text = (builtin_folder() / f"{name}.yaml").read_text()
        table.add_row(name.removeprefix("experiment/"), first_sentence(text))
    console.print(table)
    console.print()
    groups = Table(title="config groups (defaults: [GROUP: CHOICE])", title_justify="left", box=None, pad_edge=False)
    for title in ("group", "choices"):
        groups.add_column(title, overflow="fold")
    for group in list_groups((builtin_folder(),)):
        groups.add_row(group, ", ".join(list_options(group)))
    console.print(groups)


def _show_protocols(console: Console) -> None:
    from embodyrl.evaluation.protocols import shipped

    table = Table(title="protocols (embodyrl eval --protocol NAME)", title_justify="left", box=None, pad_edge=False)
    for title in ("name", "simulator", "episodes per task", "source"):
        table.add_column(title, overflow="fold")
    for protocol in shipped().values():
        source = f"{protocol.title} ({protocol.repository} {protocol.commit[:7]})"
        table.add_row(protocol.short_name, protocol.simulator, str(protocol.episodes_per_task), source)
    console.print(table)
    console.print()
