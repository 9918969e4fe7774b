"""Plan the processes of a run and their placement; optionally start one to measure its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from embodyrl.config import LoadedConfig
from embodyrl.config.schema import Config, Device, Observe, PlacementConfig
from embodyrl.envs.manager import start_env_manager
from embodyrl.envs.manager.memory import layout
from embodyrl.envs.types import EpisodeSpec, SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.placement.plan import Inventory, WorkerSpec, inventory
from embodyrl.placement.ranks import RanksError, idle_gpus
from embodyrl.placement.run_plan import Machine, Plan, describe_run_binding, plan_run
from embodyrl.placement.topology import ROOT, format_ids, parse_ids
from embodyrl.planning.planner import MIB, Simulators, ranks_of


def read_machine(folder: Path | None, cpus: str | None) -> Inventory:
    """Return the machine to plan for.

    Args:
        folder: folder with a copy of its sys/ and proc/; None: this machine.
        cpus: CPUs to use, in the kernel's list format `0-7,16`; None: those that this process may use, or all in the
            copy.

    Raises:
        UserError: they cannot be read.
    """
    if folder is not None and not (folder / "sys").is_dir():
        raise UserError(f"{folder} holds no folder sys: give a folder with a copy of the machine's sys/ and proc/")
    try:
        chosen = None if cpus is None else parse_ids(cpus)
    except ValueError as error:
        raise UserError(f"--cpus {cpus!r} is not a list like 0-7,16") from error
    if cpus is not None and not chosen:
        raise UserError("--cpus names none: give a list like 0-7,16")
    if chosen is None and folder is not None:
        online = folder / "sys/devices/system/cpu/online"
        if not online.is_file():
            raise UserError(f"{online} is missing, so the CPUs are not known: add --cpus, for instance 0-63")
        chosen = parse_ids(online.read_text())
    return inventory(ROOT if folder is None else folder, chosen)


def plan_processes(config: Config, machine: Inventory, machines: Sequence[Machine] = ()) -> dict[str, Any]:
    """Return everything that is known before the start, as plain data.

    Args:
        config: of the run.
        machine: the first one.
        machines: all of them; empty: the run is planned as if there were only the first.

    Raises:
        UserError: the envs cannot be distributed over the workers, or no machine has a label.
    """
    if not machines:
        machines = [Machine(inventory=machine)]
        rollout = replace(config.placement.rollout, nodes=None)
        config = replace(config, placement=PlacementConfig(rollout=rollout))
    too_few_gpus = None
    try:
        layout = plan_run(config, machines, ranks_of(config))
    except RanksError as error:  # the run may be meant for another machine
        too_few_gpus = str(error)
        layout = plan_run(replace(config, engine=replace(config.engine, device=Device.cpu)), machines, ranks_of(config))
    workers = layout.role("env")
    common = _common([spec.env_vars for spec in workers])
    return {
        "machine": {
            "cpus": format_ids(machine.cpus),
            "cores": machine.cores,
            "numa_nodes": [asdict(node) | {"cpus": format_ids(node.cpus)} for node in machine.nodes],
            "gpus": [asdict(gpu) for gpu in machine.gpus],
        },
        "idle_gpus": idle_gpus(config, len(machine.gpus)),
        "too_few_gpus": too_few_gpus,
        "layout": [_on_machine(each.name, layout) for each in machines],
        "numa": describe_run_binding(config.env.numa, machine, layout),
        "preload": workers[0].preload,
        "workers": [_worker(spec, common) for spec in workers],
        "env_vars": common,
        "threads": {"per_worker": 1, "main_process": config.engine.threads},
        "memory": _memory(config),
    }


def _on_machine(name: str, layout: Plan) -> dict[str, Any]:
    """Return what a machine has of a run: roles with their blocks, GPUs, envs, and number of processes."""
    specs = [spec for spec in layout.specs if spec.machine == name]
    roles = []
    acting = layout.acting[0].role
    for role, title in (("rank", "rank"), ("rollout", "rollout"), ("simulators", f"simulators of {acting}")):
        group = [spec for spec in specs if spec.role == role]
        if group:
            blocks = _numbered("block", [number for spec in group for number in spec.blocks])
            roles.append(_numbered(title, [spec.rank for spec in group]) + (f" ({blocks})" if blocks else ""))
    return {
        "machine": name,
        "roles": "; ".join(roles),
        "gpus": format_ids({gpu.index for spec in specs for gpu in spec.gpus}),
        "envs": format_ids({slot for spec in specs if spec.role == "env" for slot in spec.slots}),
        "processes": len(specs),
    }


def _numbered(name: str, numbers: Sequence[int]) -> str:
    """Return a name with numbers, as in `ranks 0-1`; empty if there are none."""
    return f"{name}{'s' * (len(numbers) > 1)} {format_ids(numbers)}" if numbers else ""


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
    """Return the variables that are the same for all workers."""
    return {name: value for name, value in variables[0].items() if all(v.get(name) == value for v in variables)}


def _memory(config: Config) -> dict[str, Any]:
    """Return sizes that follow from the settings [MiB].

    Sizes of states and actions are known only to the simulator; images are nearly all of the memory.
    """
    env = config.env
    spec = SimulatorSpec(
        tasks={},
        actions=(),
        proprio_dim=0,
        max_episode_steps=env.known_time_limit or 1,
        control_frequency=1.0,
        cameras=tuple(env.cameras),
        image_size=(env.image_size[0], env.image_size[1]) if env.cameras else (0, 0),
        frames=env.frames,
    )
    size = layout(spec, env.num_envs, config.executed_actions).num_bytes
    return {
        "shared_segment_mib": round(size / MIB, 2),
        "not_included": ["the slots' state and action vectors, known after the start"],
    }


def start_one(loaded: LoadedConfig, workers: int) -> Simulators:
    """Start one simulator process with its share of envs, and measure its memory once it has played many tasks.

    Raises:
        UserError: it cannot be started, for a reason that the user can fix.
        WorkerError: it failed.
    """
    config = loaded.config
    share = config.env.num_envs // workers
    env = replace(config.env, num_envs=share, workers=1)
    earlier = _descendants()
    with start_env_manager(
        env,
        chunk_size=config.executed_actions,
        every_step=config.rollout.observe is Observe.every_step,
        plugins=config.plugins,
        plugin_path=str(loaded.plugin_dir),
    ) as manager:
        used = 0
        # Simulators keep environments of earlier tasks, up to some number: play one task after the other, each in all
        # slots, until memory does not grow any more.
        for task in config.env.tasks:
            manager.reset(range(share), [EpisodeSpec(task=task, start_state=0, seed=0)] * share)
            before, used = used, sum(process.memory_full_info().pss for process in _descendants() - earlier)
            if used < 1.003 * before:
                break
        own = manager.offload()
        return Simulators(spec=manager.spec, bytes_per_worker=own, bytes_shared=max(used - own, 0))


def _descendants() -> set[psutil.Process]:
    """Return the processes that this one has started, and those that they have."""
    return set(psutil.Process().children(recursive=True))
