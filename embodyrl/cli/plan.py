"""`embodyrl plan`: shows the processes of a run, their placement and memory, without starting any."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from embodyrl.config import ConfigUse, LoadedConfig, load_config
from embodyrl.config.schema import Config, Device, PlacementBackend
from embodyrl.errors import UserError
from embodyrl.placement.plan import Inventory
from embodyrl.placement.run_plan import Machine
from embodyrl.planning.planner import Adviser, Limits, Planner
from embodyrl.planning.processes import plan_processes, start_one
from embodyrl.planning.text import layout_table, memory_table, pairs, rows, verdict, worker_table
from embodyrl.screen import announced, say
from embodyrl.terminal import Console

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line about the machine."""

    gpu_gb: float | None
    host_gb: float | None
    elsewhere: bool
    """The run will be on another machine."""
    start: bool
    """Start a simulator process to measure it."""
    trust: bool
    """Import the plug-ins of a saved config, whoever wrote it."""


def show(source: str | None, overrides: Sequence[str], machine: Inventory, options: Options, *, as_json: bool) -> int:
    """Print the plan; returns the exit code."""
    use = ConfigUse.elsewhere if options.elsewhere else ConfigUse.check

    def load(more: Sequence[str]) -> LoadedConfig:
        return load_config(source, [*overrides, *more], use=use, trust=options.trust)

    loaded = load([])
    config = loaded.config
    plan = plan_processes(config, machine, _cluster(config, options))
    simulators = None
    if options.start:
        print("measuring a simulator process while it plays one task after the other ...", file=sys.stderr)
        simulators = start_one(loaded, len(plan["workers"]))
    planner = Planner(limits_of(config, machine, options), len(plan["workers"]), simulators)
    try:
        with announced("computing what the policy needs, without its weights ..."):
            plan |= planner.plan(config)
            excesses = planner.excesses(config)
            plan["fits"] = not excesses
            plan["advice"] = Adviser(planner, lambda more: load(more).config).advise(config) if excesses else []
    except UserError as error:
        plan |= {"model": None, "why_not": str(error)}
    if as_json:
        print(json.dumps(plan, indent=2))
        return 0
    console = Console()
    for title, text in rows(loaded.source, plan):
        say(f"{title:<11}{text}")
    console.print()
    console.print(layout_table(plan["layout"]))
    console.print()
    console.print(worker_table(plan["workers"]))
    console.print()
    say(f"{'variables':<11}{pairs(plan['env_vars'])}")
    if plan["model"] is not None:
        console.print()
        console.print(memory_table(plan["needs"]))
        for line in verdict(plan):
            say(line)
    return 0


def _cluster(config: Config, options: Options) -> Sequence[Machine]:
    """Return the machines of the cluster that the config names; none if it names none, or the run will be elsewhere."""
    placement = config.placement
    if placement.backend is not PlacementBackend.ray or options.elsewhere:
        return []
    from embodyrl.placement.cluster import RayCluster

    with RayCluster(str(placement.address), timeout_s=placement.start_timeout_s) as cluster:
        return cluster.machines()


def limits_of(config: Config, machine: Inventory, options: Options) -> Limits:
    """Return the memory of the policy's GPU and of the host: as given on the command line, else this machine's."""
    device = config.engine.device
    cuda = device is Device.cuda or (device is Device.auto and bool(machine.gpus or options.gpu_gb))
    gpu = None if options.gpu_gb is None else options.gpu_gb * GB
    host = None if options.host_gb is None else options.host_gb * GB
    if not options.elsewhere:
        gpu = gpu if gpu is not None or not cuda else _gpu_memory()
        host = host or float(psutil.virtual_memory().total)
    return Limits(cuda=cuda, gpu=gpu, host=host, cores=machine.cores)


def _gpu_memory() -> float | None:
    """Return the memory of this machine's first GPU [bytes]; None without a usable GPU."""
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None
