"""`embodyrl doctor`: reports what this machine has for a run, what is missing, and the remedies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from embodyrl.cli import checkup
from embodyrl.cli.checkup import CheckResult, Started, Status
from embodyrl.config import LoadedConfig
from embodyrl.config.infos import simulator_info
from embodyrl.config.schema import Config, Device
from embodyrl.placement.graphics import RenderingCheck
from embodyrl.placement.plan import Inventory, inventory
from embodyrl.placement.process import ProbeFailed
from embodyrl.registry import SIMULATORS, SimulatorEntry
from embodyrl.screen import counted
from embodyrl.terminal import Console

DEADLINE_S = 60.0
"""Longest time for all checks in other processes, which run in parallel [s]."""

STYLES = {Status.ok: "green", Status.absent: "yellow", Status.fault: "bold red"}


def run(loaded: LoadedConfig | None) -> int:
    """Print the table; returns the exit code, 1 if something needed is missing or broken.

    Args:
        loaded: check the needs of this config, all of which must be met; None: check everything.
    """
    findings = examine(loaded)
    console = Console()
    console.print(_table(findings))
    console.print(verdict(findings, loaded), soft_wrap=True)
    return 1 if any(finding.status is Status.fault for finding in findings) else 0


def examine(loaded: LoadedConfig | None) -> list[CheckResult]:
    """Return all findings, in the order of the table."""
    machine = inventory()
    started = _start(loaded, machine)
    deadline = time.monotonic() + DEADLINE_S
    try:
        quick = _look(loaded, machine)
        slow = [_finish(check, deadline) for check in started]
    finally:
        for check in started:
            check.probe.close()
    return [quick[0], slow[0], *quick[1:], *slow[1:]]


def _start(loaded: LoadedConfig | None, machine: Inventory) -> list[Started]:
    """Start the checks that take seconds; torch is the first."""
    config = loaded.config if loaded is not None else None
    started = [checkup.start_torch(machine, needs_cuda=config is not None and config.engine.device is Device.cuda)]
    videos = config is not None and config.tracking.video.episodes > 0
    needed = config is not None and (bool(config.env.cameras) or videos)
    for simulator in [None] if config is None else _simulators_of(config):
        started += [checkup.start_rendering(check, needed=needed) for check in _rendering_checks(simulator, machine)]
    if config is None or videos:
        started.append(checkup.start_videos(needed=videos))
    return started


def _simulators_of(config: Config) -> list[SimulatorEntry]:
    """Return the simulators of a config, each once."""
    return [SIMULATORS.entry(name) for name in dict.fromkeys(source.env.name for source in config.env.sources)]


def _rendering_checks(simulator: SimulatorEntry | None, machine: Inventory) -> list[RenderingCheck]:
    """Return the rendering checks that a simulator declares. For a simulator without any (and for None), return those
    of the simulators with the same graphics."""
    declared = None if simulator is None else simulator_info(simulator.name).rendering_checks(machine)
    if declared is None:
        graphics = None if simulator is None else simulator.graphics
        alike = [entry.name for entry in SIMULATORS.entries() if graphics in (None, entry.graphics)]
        declared = [check for name in alike for check in simulator_info(name).rendering_checks(machine) or ()]
    return list({check.subject: check for check in declared}.values())  # simulators on one engine have the same


def _look(loaded: LoadedConfig | None, machine: Inventory) -> list[CheckResult]:
    """Run the checks that take no time."""
    config = loaded.config if loaded is not None else None
    folder = Path("runs") if config is None or config.run.dir is None else Path(config.run.dir)
    findings = [
        checkup.python(),
        checkup.cpus(machine),
        checkup.memory(),
        checkup.shared_memory(),
        checkup.disk(folder),
    ]
    gpus = checkup.driver(machine, config)
    findings += [gpus] if gpus is not None else []
    entries = SIMULATORS.entries() if config is None else _simulators_of(config)
    for entry in entries:
        findings.append(checkup.simulator(entry, needed=config is not None))
        assets = checkup.assets(entry)
        findings += [assets] if assets is not None else []
    return findings


def _finish(check: Started, deadline: float) -> CheckResult:
    try:
        return check.judge(check.probe.result(deadline), None)
    except ProbeFailed as failure:
        return check.judge(None, failure)


def _table(findings: Sequence[CheckResult]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        status = Text(finding.status.value, STYLES[finding.status])
        table.add_row(finding.subject, status, f"{finding.found}{remedy}")
    return table


def verdict(findings: Sequence[CheckResult], loaded: LoadedConfig | None) -> str:
    """Return the last line."""
    faults = [finding.subject for finding in findings if finding.status is Status.fault]
    absent = [finding.subject for finding in findings if finding.status is Status.absent]
    if faults:
        return f"{counted(len(faults), 'fault')}: {', '.join(faults)}"
    what = "everything that every run needs is here" if loaded is None else f"everything {loaded.source} needs is here"
    return f"{what}; absent, needed by some runs: {', '.join(absent)}" if absent and loaded is None else what
