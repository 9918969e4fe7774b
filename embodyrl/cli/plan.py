"""`embodyrl plan`: which processes a run would start, and where, without starting any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from embodyrl.config import LoadedConfig
from embodyrl.config.schema import Config
from embodyrl.envs.manager.memory import layout
from embodyrl.envs.types import SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.placement.plan import Inventory, WorkerSpec, describe_binding, inventory, plan_env_workers, policy_gpu
from embodyrl.placement.topology import ROOT, format_ids, parse_ids

MIB = 2**20


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


def show(loaded: LoadedConfig, machine: Inventory, *, as_json: bool) -> None:
    """Print the plan."""
    plan = make_plan(loaded.config, machine)
    if as_json:
        print(json.dumps(plan, indent=2))
        return
    console = Console(highlight=False)
    for title, text in _rows(loaded, plan):
        console.print(f"{title:<11}{text}", soft_wrap=True)
    console.print()
    console.print(_worker_table(plan["workers"]))
    console.print()
    console.print(f"{'variables':<11}{_pairs(plan['env_vars'])}", soft_wrap=True)


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
        ("config", f"{loaded.source}: OK, nothing was started"),
        ("machine", f"CPUs {machine['cpus']}, of which {machine['cores']} can be busy at once"),
        ("nodes", "; ".join(nodes) or "the kernel shows none"),
        ("GPUs", "; ".join(gpus) or "no NVIDIA GPU"),
        ("NUMA", plan["numa"]),
        ("start", _start(plan["preload"])),
        ("memory", f"{_size(memory['shared_segment_mib'])} shared segment, plus {memory['not_included'][0]}"),
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
