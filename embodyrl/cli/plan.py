"""`embodyrl plan`: which processes a run would start, and where, without starting any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from embodyrl.config import LoadedConfig, Use, load_config
from embodyrl.config.schema import Config, Device, Observe
from embodyrl.envs.manager import EnvManager
from embodyrl.envs.manager.memory import layout
from embodyrl.envs.types import EpisodeSpec, SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.placement.plan import Inventory, WorkerSpec, describe_binding, inventory, plan_env_workers, policy_gpu
from embodyrl.placement.topology import ROOT, format_ids, parse_ids
from embodyrl.planning.advice import Adviser
from embodyrl.planning.planner import Limits, Planner, Simulators
from embodyrl.planning.text import memory_table, model_rows, verdict

GB, MIB = 10**9, 2**20


def read_machine(folder: Path | None, cpus: str | None) -> Inventory:
    """The machine to plan for.

    Args:
        folder: a copy of its sys/ and proc/; None: this machine.
        cpus: the CPUs to use, in the kernel's list format `0-7,16`; None: those that this process may use, or all that
            a copy shows.

    Raises:
        UserError: they cannot be read.
    """
    if folder is not None and not (folder / "sys").is_dir():
        raise UserError(f"{folder} holds no folder sys: give a folder with a copy of the machine's sys/ and proc/")
    try:
        chosen = None if cpus is None else parse_ids(cpus)
    except ValueError as error:
        raise UserError(f"--cpus {cpus!r} is not a list like 0-7,16") from error
    if chosen is None and folder is not None:
        online = folder / "sys/devices/system/cpu/online"
        if not online.is_file():
            raise UserError(f"{online} is missing, so nothing says which CPUs there are: add --cpus, for instance 0-63")
        chosen = parse_ids(online.read_text())
    return inventory(ROOT if folder is None else folder, chosen)


def make_plan(config: Config, machine: Inventory) -> dict[str, Any]:
    """Everything that is known before the start, as plain data.

    Raises:
        UserError: the slots cannot be spread over the workers.
    """
    near = policy_gpu(config.engine.device, machine)
    workers = plan_env_workers(config.env, machine, near)
    common = _common([spec.env_vars for spec in workers])
    return {
        "machine": {
            "cpus": format_ids(machine.cpus),
            "cores": machine.cores,
            "numa_nodes": [asdict(node) | {"cpus": format_ids(node.cpus)} for node in machine.nodes],
            "gpus": [asdict(gpu) for gpu in machine.gpus],
        },
        "numa": describe_binding(config.env.numa, machine, workers, near),
        "preload": workers[0].preload,
        "workers": [_worker(spec, common) for spec in workers],
        "env_vars": common,
        "threads": {"per_worker": 1, "main_process": config.engine.threads},
        "memory": _memory(config),
    }


def _worker(spec: WorkerSpec, common: dict[str, str]) -> dict[str, Any]:
    return {
        "worker": spec.label,
        "slots": format_ids(spec.slots),
        "numa_node": spec.numa_node,
        "cpus": format_ids(spec.cpus),
        "memory_node": spec.memory_node,
        "env_vars": {name: value for name, value in spec.env_vars.items() if name not in common},
    }


def _common(variables: Sequence[Any]) -> dict[str, str]:
    """The variables that are the same for all."""
    return {name: value for name, value in variables[0].items() if all(v.get(name) == value for v in variables)}


def _memory(config: Config) -> dict[str, Any]:
    """Sizes that follow from the settings [MiB].

    How many numbers a state and an action have, only the simulator knows; pictures are nearly all of it.
    """
    env = config.env
    spec = SimulatorSpec(
        tasks={},
        actions=(),
        proprio_dim=0,
        max_episode_steps=env.max_episode_steps,
        control_frequency=1.0,
        cameras=tuple(env.cameras),
        image_size=(env.image_size[0], env.image_size[1]) if env.cameras else (0, 0),
    )
    size = layout(spec, env.num_envs, config.rollout.chunk_size).num_bytes
    return {
        "shared_segment_mib": round(size / MIB, 2),
        "not_included": ["the slots' state and action vectors, known after the start"],
    }


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says about the machine."""

    gpu_gb: float | None
    host_gb: float | None
    elsewhere: bool
    """It will run on another machine than this one."""
    start: bool
    """Start a simulator process."""
    trust: bool
    """Import the plug-ins of a saved config, whoever made it."""


def show(source: str | None, overrides: Sequence[str], machine: Inventory, asked: Asked, *, as_json: bool) -> int:
    """Print the plan; returns the exit code."""
    use = Use.elsewhere if asked.elsewhere else Use.check

    def load(more: Sequence[str]) -> LoadedConfig:
        return load_config(source, [*overrides, *more], use=use, trust=asked.trust)

    loaded = load([])
    config = loaded.config
    plan = make_plan(config, machine)
    simulators = start_one(loaded, len(plan["workers"])) if asked.start else None
    planner = Planner(limits_of(config, machine, asked), len(plan["workers"]), simulators)
    try:
        plan |= planner.plan(config)
        excesses = planner.excesses(config)
        plan["fits"] = not excesses
        plan["advice"] = Adviser(planner, lambda more: load(more).config).advise(config) if excesses else []
    except UserError as error:
        plan |= {"model": None, "why_not": str(error)}
    if as_json:
        print(json.dumps(plan, indent=2))
        return 0
    console = Console(highlight=False)
    for title, text in _rows(loaded, plan):
        console.print(f"{title:<11}{text}", soft_wrap=True, markup=False)
    console.print()
    console.print(_worker_table(plan["workers"]))
    console.print()
    console.print(f"{'variables':<11}{_pairs(plan['env_vars'])}", soft_wrap=True)
    if plan["model"] is not None:
        console.print()
        console.print(memory_table(plan["needs"]))
        for line in verdict(plan):
            console.print(line, soft_wrap=True, markup=False)
    return 0


def limits_of(config: Config, machine: Inventory, asked: Asked) -> Limits:
    """What the policy's GPU and the main memory hold: what was asked, else what this machine has."""
    device = config.engine.device
    cuda = device is Device.cuda or (device is Device.auto and bool(machine.gpus or asked.gpu_gb))
    gpu = None if asked.gpu_gb is None else asked.gpu_gb * GB
    host = None if asked.host_gb is None else asked.host_gb * GB
    if not asked.elsewhere:
        gpu = gpu if gpu is not None or not cuda else _gpu_memory()
        host = host or float(psutil.virtual_memory().total)
    return Limits(cuda=cuda, gpu=gpu, host=host)


def _gpu_memory() -> float | None:
    """Bytes of this machine's first GPU, if it has one that works."""
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def start_one(loaded: LoadedConfig, workers: int) -> Simulators:
    """Start one of the simulator processes with its share of slots, begin an episode in each, and end it.

    Raises:
        UserError: it cannot be started, for a reason that the user can mend.
        WorkerError: it failed.
    """
    config = loaded.config
    share = config.env.num_envs // workers
    env = replace(config.env, num_envs=share, workers=1)
    with EnvManager(
        env,
        chunk_size=config.rollout.chunk_size,
        every_step=config.rollout.observe is Observe.every_step,
        plugins=config.plugins,
        plugin_path=str(loaded.plugin_dir),
    ) as manager:
        episodes = [
            EpisodeSpec(task=config.env.tasks[slot % len(config.env.tasks)], start_state=0, seed=0)
            for slot in range(share)
        ]
        manager.reset(range(share), episodes)
        return Simulators(spec=manager.spec, bytes_per_worker=manager.offload())


def _rows(loaded: LoadedConfig, plan: dict[str, Any]) -> list[tuple[str, str]]:
    machine, memory, threads = plan["machine"], plan["memory"], plan["threads"]
    nodes = [
        f"node {node['id']}: {'CPUs ' + node['cpus'] if node['cpus'] else 'no CPU'}"
        f"{'' if node['memory'] else ', no memory'}"
        for node in machine["numa_nodes"]
    ]
    gpus = [
        f"{gpu['address']}, {'node unknown' if gpu['node'] is None else 'node ' + str(gpu['node'])}"
        for gpu in machine["gpus"]
    ]
    return [
        ("config", f"{loaded.source}: OK"),
        ("machine", f"CPUs {machine['cpus']}, of which {machine['cores']} can be busy at once"),
        ("nodes", "; ".join(nodes) or "the kernel shows none"),
        ("GPUs", "; ".join(gpus) or "no NVIDIA GPU"),
        ("NUMA", plan["numa"]),
        ("start", _start(plan["preload"])),
        ("memory", f"{_size(memory['shared_segment_mib'])} shared segment, plus {memory['not_included'][0]}"),
        *model_rows(plan),
        ("threads", f"{threads['per_worker']} per simulator process; main process: {threads['main_process']}"),
    ]


def _start(preload: Sequence[str] | None) -> str:
    if preload is None:
        return "every process is an interpreter of its own"
    return f"processes are forked from one that has imported {', '.join(preload) or 'nothing'}"


def _size(mib: float) -> str:
    return f"{mib:.1f} MiB" if mib >= 0.1 else "less than 0.1 MiB"


def _worker_table(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("worker", "slots", "node", "cpus", "memory from", "its own variables"):
        table.add_column(title, overflow="fold")
    for worker in workers:
        memory = "where it runs" if worker["memory_node"] is None else f"node {worker['memory_node']}"
        node = "any" if worker["numa_node"] is None else str(worker["numa_node"])
        table.add_row(worker["worker"], worker["slots"], node, worker["cpus"], memory, _pairs(worker["env_vars"]))
    return table


def _pairs(variables: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())
