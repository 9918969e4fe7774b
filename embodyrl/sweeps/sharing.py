"""How many runs fit a machine at once, and which CPUs and GPUs each of them gets."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from embodyrl.config.schema import Config, Device, PlacementBackend
from embodyrl.errors import UserError
from embodyrl.placement.plan import Inventory, inventory, plan_env_workers
from embodyrl.placement.process import Probe, ProbeFailed
from embodyrl.placement.ranks import gpu_names, gpus_wanted
from embodyrl.planning.planner import ranks_of
from embodyrl.screen import counted
from embodyrl.sweeps.folder import Needs

SIMULATOR = 0.6 * 2**30
"""Main memory of a simulator process [bytes]; those of LIBERO have more for themselves, 0.75 GB, MetaWorld's less."""
FULL = 0.9
"""Share of a memory that runs may fill together."""
PLANNING_S = 300.0
"""Longest time for planning all settings of a sweep [s]."""
_MAIN = "from embodyrl.sweeps.sharing import main; main()"


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one of the runs at once has of the machine."""

    cpus: tuple[int, ...] = ()
    """Empty: all."""
    gpus: tuple[str, ...] = ()
    """Names for CUDA_VISIBLE_DEVICES; empty: all."""


def needs_of(config: Config, machine: Inventory) -> Needs:
    """Return what a run needs, by a dry run of its policy; imports torch. Simulators are not started, so that their
    memory is assumed."""
    import torch

    from embodyrl.planning.planner import Limits, Planner

    cuda = config.engine.device is not Device.cpu and torch.cuda.is_available()
    gpu = float(torch.cuda.get_device_properties(0).total_memory) if cuda else None
    workers = len(plan_env_workers(config.env, machine))
    limits = Limits(cuda=cuda, gpu=gpu, host=float(psutil.virtual_memory().total), cores=machine.cores)
    planner = Planner(limits, workers, None)
    ranks = ranks_of(config)
    asked = config.env.workers if isinstance(config.env.workers, int) else 1
    needs = Needs(cores=max(ranks, asked), gpus=gpus_wanted(config, ranks) if cuda else 0, gpu_memory=gpu)
    try:
        plan, places = planner.plan(config), planner.needs(config)
    except UserError as error:  # the run will say it, too
        return replace(needs, unknown=str(error))
    chosen = {choice["setting"]: choice["value"] for choice in plan["choices"]}
    sizes = {place: float(max(need.total for need in phases.values())) for place, phases in places.items()}
    return replace(
        needs,
        threads=int(chosen.get("engine.threads", 1)),
        host=sizes["host"] + workers * SIMULATOR,
        gpu=sizes.get("gpu", 0.0),
    )


def largest(all_needs: Sequence[Needs]) -> Needs:
    """Return needs that suffice for each of some runs."""
    unknown = next((each.unknown for each in all_needs if each.unknown), "")
    return Needs(
        cores=max(each.cores for each in all_needs),
        threads=max(each.threads for each in all_needs),
        host=max(each.host for each in all_needs),
        gpus=max(each.gpus for each in all_needs),
        gpu=max(each.gpu for each in all_needs),
        gpu_memory=all_needs[0].gpu_memory,
        unknown=unknown,
    )


def plan_elsewhere(folders: Sequence[Path], *, trust: bool) -> Needs:
    """Return the needs of runs with these configs, planned in another process: importing torch would take this one
    more memory than it needs for the rest of the sweep."""
    probe = Probe(_MAIN, json.dumps([[str(folder) for folder in folders], trust]))
    try:
        return Needs(**probe.result(time.monotonic() + PLANNING_S))
    except ProbeFailed as failure:
        return Needs(unknown=f"planning failed: {failure}")


def main() -> None:
    """Plan the runs of the configs that the command line names, and print the largest needs as JSON."""
    from embodyrl.runner.rundir import read_config

    folders, trust = json.loads(sys.argv[3])
    machine = inventory()
    needs = [needs_of(read_config(Path(folder), [], trust=trust).config, machine) for folder in folders]
    print(json.dumps(asdict(largest(needs))))


def most_at_once(needs: Needs, machine: Inventory, memory: float, runs: int) -> tuple[int, str]:
    """Return how many runs fit at once, at least 1, and what limits them.

    Args:
        needs: of each of them.
        machine: its CPUs and GPUs.
        memory: main memory that is free [bytes].
        runs: number of runs.
    """
    if needs.unknown:
        return 1, f"it is not known what they need ({needs.unknown})"
    limits = {
        "runs": runs,
        f"{counted(machine.cores, 'core')}, {needs.cores} for each": machine.cores // needs.cores,
        f"{memory / 1e9:.1f} GB of free memory, {needs.host / 1e9:.1f} GB for each": (
            int(FULL * memory // needs.host) if needs.host else runs
        ),
    }
    if needs.gpus:
        gpus = len(gpu_names(machine, needs.gpus))
        beside = 1
        if needs.gpus == 1 and needs.gpu and needs.gpu_memory:
            beside = max(1, int(FULL * needs.gpu_memory // needs.gpu))
        limits[f"{counted(gpus, 'GPU')}, {beside} on each"] = gpus // needs.gpus * beside
    reason = min(limits, key=lambda each: limits[each])
    return max(1, limits[reason]), "all of them" if reason == "runs" else reason


def is_elsewhere(config: Config) -> bool:
    """Return whether a run's processes are on other machines, which this one does not share out."""
    return config.placement.backend is PlacementBackend.ray


def shares_of(machine: Inventory, at_once: int, needs: Needs) -> list[Share]:
    """Divide CPUs and GPUs among runs at once: neighbouring CPUs of one NUMA node, as far as it goes. With more runs
    than CPUs each has all of them."""
    names = gpu_names(machine, needs.gpus) if needs.gpus else []
    order = [cpu for node in machine.usable_nodes for cpu in node.cpus] or list(machine.cpus)
    bounds = [index * len(order) // at_once for index in range(at_once + 1)]
    return [
        Share(
            cpus=tuple(order[bounds[index] : bounds[index + 1]]) if 1 < at_once <= len(order) else (),
            gpus=_gpus_of(index, names, needs.gpus) if at_once > 1 and len(names) > 1 else (),
        )
        for index in range(at_once)
    ]


def _gpus_of(index: int, names: Sequence[str], wanted: int) -> tuple[str, ...]:
    """Return the GPUs of a run: in turns, and never a part of those of another one."""
    first = index * wanted % (len(names) // wanted * wanted)
    return tuple(names[first : first + wanted])


def free_memory() -> float:
    """Return the main memory that new processes can have [bytes], also within the limit of a container."""
    free = float(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, float(limit) - float((group / "memory.current").read_text()))
    except (OSError, ValueError):  # another version of control groups, or none
        return free
    return max(free, 0.0)


def variables(share: Share) -> dict[str, str]:
    """Return the environment of a run with this share."""
    own = {"CUDA_VISIBLE_DEVICES": ",".join(share.gpus)} if share.gpus else {}
    return {**os.environ, **own}
