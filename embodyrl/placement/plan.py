"""The plan of a run's worker processes and their CPUs: a pure function of the settings and of the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from embodyrl.config.infos import simulator_info
from embodyrl.config.schema import Device, EnvConfig, Numa, StartMethod
from embodyrl.errors import UserError
from embodyrl.placement.graphics import Graphics, graphics_variables, read_graphics
from embodyrl.placement.topology import (
    ROOT,
    Gpu,
    Node,
    allowed_cpus,
    cpu_limit,
    format_ids,
    has_unlisted_gpus,
    read_gpus,
    read_nodes,
)
from embodyrl.registry import SIMULATORS

SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}
"""Environment of a simulator process: there is one process per core already, so libraries must not start threads."""

THIS_MACHINE = "local"
"""Name of the machine of a run on one."""
_TITLES = {"rank": "rank", "simulators": "simulator host"}


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The CPUs, GPUs and graphics of a machine that the program may use."""

    cpus: tuple[int, ...]
    """Ids of the allowed CPUs, ascending; at least one."""
    cores: int
    """Number of CPUs that can be busy at once, at least 1: fewer than `cpus` where a container limits CPU time."""
    nodes: tuple[Node, ...] = ()
    """NUMA nodes by id; none where the kernel shows none."""
    gpus: tuple[Gpu, ...] = ()
    """NVIDIA GPUs in CUDA's order."""
    unlisted_gpus: bool = False
    """True if there are NVIDIA GPUs that the kernel does not list; see `topology.has_unlisted_gpus`."""
    graphics: Graphics = field(default_factory=Graphics)
    """Its renderers."""

    @property
    def usable_nodes(self) -> list[Node]:
        """The nodes on which a process may run."""
        return [node for node in self.nodes if node.cpus]


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One worker process."""

    role: str
    """Its task: `env` (simulators), `simulators` (a host of them), `rollout`, or `rank` (learning)."""
    rank: int
    """Its number among the workers of its role, from 0."""
    slots: range = range(0)
    """The simulator slots it serves, as numbered in the whole run."""
    source: str = ""
    """Name of its simulator in a mix; empty: there is one."""
    blocks: range = range(0)
    """The blocks that it decides for, see `rollout.blocks`."""
    machine: str = ""
    """Name of its machine; empty: this one."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs that it computes on."""
    cpus: tuple[int, ...] = ()
    """CPUs it may run on; empty: those of the parent."""
    numa_node: int | None = None
    """The NUMA node whose CPUs these are; None: it is not bound to one."""
    memory_node: int | None = None
    """The NUMA node from which it takes memory while there is some; None: the kernel decides."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are set before its interpreter starts. One that is not the same for all workers is set
    before the worker's own code runs, if it is forked."""
    preload: tuple[str, ...] | None = None
    """It is forked from a process that has imported these (see `child.preload`); None: it is a fresh interpreter."""

    @property
    def title(self) -> str:
        """Its name on its machine: `env worker 1`, of a mix with its simulator."""
        of_source = f" ({self.source})" if self.source else ""
        return f"{_TITLES.get(self.role, f'{self.role} worker')} {self.rank}{of_source}"

    @property
    def label(self) -> str:
        """Its name in messages: `env worker 1`, with its machine if there are several."""
        return self.title + (f" on machine {self.machine}" if self.machine not in ("", THIS_MACHINE) else "")


def inventory(root: Path = ROOT, cpus: Sequence[int] | None = None) -> Inventory:
    """Return what the program may use of this machine: the CPUs this process is allowed, not those that exist.

    Args:
        root: the root folder, or one with a copy of another machine's sys/ and proc/.
        cpus: CPUs to use instead of those this process is allowed.
    """
    usable = tuple(sorted(cpus)) if cpus else allowed_cpus()
    limit = cpu_limit(root)
    return Inventory(
        cpus=usable,
        cores=len(usable) if limit is None else min(limit, len(usable)),
        nodes=tuple(read_nodes(root, usable)),
        gpus=tuple(read_gpus(root, os.environ)),
        unlisted_gpus=has_unlisted_gpus(root),
        graphics=read_graphics(root, os.environ),
    )


def policy_gpu(device: Device, machine: Inventory) -> Gpu | None:
    """Return the GPU on which the policy of this process computes, or None."""
    return machine.gpus[0] if machine.gpus and device is not Device.cpu else None


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit` (both >= 1)."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


def plan_env_workers(config: EnvConfig, machine: Inventory, near: Gpu | None = None) -> list[WorkerSpec]:
    """Divide the simulator slots evenly among worker processes, in order: worker 0 serves the first slots. Of a mix,
    each simulator has such processes of its own.

    Args:
        config: reads `num_envs`, `workers`, `numa`, `start_method`, and the registry's entry of the simulator `name`.
        machine: its CPUs, GPUs and graphics.
        near: the GPU to which observations go.

    Raises:
        UserError: the slots cannot be divided evenly among that many workers.
    """
    if config.sources[0].name:
        return [
            replace(spec, source=source.name)
            for source in config.sources
            for spec in plan_env_workers(source.env, machine, near)
        ]
    entry = SIMULATORS.entry(config.name)
    own_gpus = machine.gpus if simulator_info(config.name).fills_gpu(config) else None
    count = _count_workers(config.num_envs, config.workers, machine.cores if own_gpus is None else len(own_gpus))
    share = config.num_envs // count
    bound = binds(config.numa, machine)
    homes = _assign_nodes(count, machine.usable_nodes, near) if bound else [None] * count
    # As many processes as CPUs, and no node to choose: each gets a CPU. The kernel would put two that wake at once on
    # the same one while this process still uses the other, and leave them there until its next tick.
    own = config.numa is Numa.auto and len(machine.nodes) < 2 and count == len(machine.cpus)
    return [
        WorkerSpec(
            role="env",
            rank=rank,
            slots=range(rank * share, (rank + 1) * share),
            cpus=(machine.cpus[rank],) if own else machine.cpus if home is None else home.cpus,
            numa_node=None if home is None else home.id,
            memory_node=home.id if home is not None and home.memory else None,
            env_vars={
                **SINGLE_THREADED,
                **graphics_variables(entry.graphics, machine.graphics, machine.gpus, rank),
                **_own_gpu(own_gpus or (), rank),
            },
            preload=_preload(config.start_method, entry.preload),
        )
        for rank, home in enumerate(homes)
    ]


def _own_gpu(gpus: Sequence[Gpu], rank: int) -> dict[str, str]:
    """Return the variables that show a process one GPU of several."""
    gpu = gpus[rank % len(gpus)] if len(gpus) > 1 else None
    return {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu.uuid or str(gpu.index)}


def _count_workers(num_envs: int, workers: int | str, capacity: int) -> int:
    """Return the number of processes; `auto`: as many as possible up to `capacity`."""
    if num_envs < 1:
        raise UserError(f"num_envs must be at least 1, got {num_envs}")
    count = largest_divisor(num_envs, max(capacity, 1)) if workers == "auto" else workers
    if isinstance(count, str) or count < 1 or num_envs % count:
        near = f"{largest_divisor(num_envs, count)}" if isinstance(count, int) and count >= 1 else "auto"
        raise UserError(f"num_envs ({num_envs}) must be a multiple of workers, got {workers!r}: use {near}")
    return count


def binds(numa: Numa, machine: Inventory) -> bool:
    """Return whether workers are bound to NUMA nodes: with one node there is nothing to choose."""
    return numa is Numa.auto and len(machine.nodes) > 1 and bool(machine.usable_nodes)


def describe_binding(numa: Numa, machine: Inventory, workers: Sequence[WorkerSpec], near: Gpu | None = None) -> str:
    """Describe the binding to NUMA nodes in one sentence. It starts with `warning:` if binding was wanted and is not
    possible."""
    if numa is Numa.off:
        return "env.numa is off: processes are bound to no node"
    if len(machine.nodes) < 2:
        nodes = "one NUMA node" if machine.nodes else "no NUMA nodes shown"
        own = len(workers) > 1 and all(len(spec.cpus) == 1 for spec in workers)
        return f"{nodes}: " + ("each process has a CPU of its own" if own else "nothing to bind processes to")
    if not machine.usable_nodes:
        return (
            f"warning: none of the allowed CPUs {format_ids(machine.cpus)} belongs to a NUMA node, so processes are "
            "bound to none"
        )
    homes = {spec.numa_node for spec in workers if spec.numa_node is not None}
    said = f"processes are bound to NUMA node{'s' if len(homes) > 1 else ''} {format_ids(homes)}"
    if near is None or near.node is None:
        return said
    if near.node not in [node.id for node in machine.usable_nodes]:
        return f"warning: the GPU's NUMA node {near.node} has no allowed CPU; {said}"
    return f"{said}, the GPU's" if homes == {near.node} else f"{said} (the GPU's, {near.node}, has not CPUs for all)"


def _preload(method: StartMethod, declared: Sequence[str] | None) -> tuple[str, ...] | None:
    if method is StartMethod.fork:
        return tuple(declared or ())
    return tuple(declared) if method is StartMethod.auto and declared else None


def _assign_nodes(count: int, nodes: Sequence[Node], near: Gpu | None) -> list[Node]:
    """Assign a node to each of `count` workers: all on the node of the GPU `near` if each has a CPU of its own there,
    else on every node in proportion to its CPUs. Neighbours in rank share a node, and so do their rows of shared
    memory."""
    home = [node for node in nodes if near is not None and node.id == near.node and count <= len(node.cpus)]
    if home:
        return home * count
    loads = dict.fromkeys(range(len(nodes)), 0)
    for _ in range(count):  # to the node where the newcomer finds most CPUs per worker (D'Hondt)
        loads[max(loads, key=lambda index: len(nodes[index].cpus) / (loads[index] + 1))] += 1
    return [nodes[index] for index, load in loads.items() for _ in range(load)]
