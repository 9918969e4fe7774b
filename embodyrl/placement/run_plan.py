"""The plan of a run's processes over machines: ranks, rollout workers, and the simulators beside those that roll out.

A pure function of the settings and of the machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from embodyrl.config.schema import Config, Device, EnvConfig, Numa
from embodyrl.placement.plan import Inventory, WorkerSpec, describe_binding, plan_env_workers
from embodyrl.placement.ranks import RankInfo, gpu_names, gpus_wanted, own_blocks, own_share, refuse_too_few, share_of
from embodyrl.placement.topology import Gpu

THIS_MACHINE = "local"
"""Name of the machine of a run on one."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine of a run."""

    name: str = THIS_MACHINE
    inventory: Inventory
    """What the run may use of it."""
    labels: tuple[str, ...] = ()
    """What it is for, as its owner says."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The processes of a run."""

    specs: tuple[WorkerSpec, ...]
    """Ranks, then rollout workers, then simulator processes, each role by number."""

    def role(self, role: str) -> list[WorkerSpec]:
        """Return the processes of a role: `rank`, `rollout` or `env`."""
        return [spec for spec in self.specs if spec.role == role]

    @property
    def acting(self) -> list[WorkerSpec]:
        """The processes that roll out: the rollout workers, else the ranks."""
        return self.role("rollout") or self.role("rank")

    def simulators_of(self, process: WorkerSpec) -> list[WorkerSpec]:
        """Return the simulator processes of one that rolls out."""
        return [spec for spec in self.role("env") if spec.slots[0] in process.slots]


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """Place of a process that computes."""

    machine: Machine
    gpus: tuple[Gpu, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def sees(self) -> Inventory:
        """Return the machine as its process sees it."""
        return replace(self.machine.inventory, gpus=self.gpus) if self.variables else self.machine.inventory


def plan_run(config: Config, machines: Sequence[Machine], ranks: int) -> Plan:
    """Lay out all processes of a run: in order over the machines, ranks first, simulators beside who rolls out. To be
    called before `use_own_gpu`, which hides the GPUs of others from this process.

    Args:
        config: of the run.
        machines: at least one. Where some have GPUs, ranks and rollout workers are placed on these alone.
        ranks: number of processes that learn.

    Raises:
        RanksError: there are too few GPUs.
        UserError: the envs cannot be divided evenly.
    """
    seats = _seats(config, machines, ranks)
    learning, apart = seats[:ranks], seats[ranks:]
    role, rolling = ("rollout", apart) if apart else ("rank", learning)
    computing = [
        WorkerSpec(
            role=name,
            rank=number,
            slots=share_of(config.env.num_envs, number, len(rolling)) if name == role else range(0),
            blocks=own_blocks(config, number, len(rolling)) if name == role else range(0),
            machine=seat.machine.name,
            gpus=seat.gpus,
            env_vars=seat.variables,
        )
        for name, group in (("rank", learning), ("rollout", apart))
        for number, seat in enumerate(group)
    ]
    return Plan(specs=(*computing, *_simulators(config.env, rolling)))


def describe_run_binding(numa: Numa, machine: Inventory, plan: Plan) -> str:
    """Describe the binding of a run's simulator processes to the NUMA nodes of a machine, see `describe_binding`."""
    near = {gpu.node: gpu for process in plan.acting for gpu in process.gpus}
    gpu = next(iter(near.values())) if len(near) == 1 else None  # those of several nodes are not one place
    return describe_binding(numa, machine, plan.role("env"), gpu)


def _seats(config: Config, machines: Sequence[Machine], ranks: int) -> list[_Seat]:
    """Return the seats of the ranks, followed by those of the rollout workers."""
    workers, shared = config.placement.rollout.workers, config.placement.rollout.share_gpus
    seats = [] if config.engine.device is Device.cpu else _gpu_seats(machines, gpus_wanted(config, ranks))
    if not seats:
        spread = [share_of(ranks + workers, number, len(machines)) for number in range(len(machines))]
        return [_Seat(machine=machine) for machine, some in zip(machines, spread, strict=True) for _ in some]
    refuse_too_few(config, ranks, len(seats))
    # A rank that is alone sees all GPUs, and takes the first.
    learning = [replace(seat, variables={}) for seat in seats[:1]] if ranks == 1 else seats[:ranks]
    return [*learning, *(seats[worker % ranks if shared else ranks + worker] for worker in range(workers))]


def _gpu_seats(machines: Sequence[Machine], wanted: int) -> list[_Seat]:
    """Return a seat for each GPU."""
    return [
        _Seat(
            machine=machine,
            gpus=machine.inventory.gpus[number : number + 1],
            variables={"CUDA_VISIBLE_DEVICES": name},
        )
        for machine in machines
        for number, name in enumerate(gpu_names(machine.inventory, wanted))
    ]


def _simulators(env: EnvConfig, rolling: Sequence[_Seat]) -> Iterator[WorkerSpec]:
    """Yield the simulator processes of those that roll out."""
    count = 0
    for number, seat in enumerate(rolling):
        neighbours = [other for other, its in enumerate(rolling) if its.machine is seat.machine]
        place = RankInfo(
            rank=number, size=len(rolling), local_rank=neighbours.index(number), local_size=len(neighbours)
        )
        machine, first = seat.sees(), share_of(env.num_envs, number, len(rolling)).start
        near = seat.gpus[0] if seat.gpus else None
        for spec in plan_env_workers(own_share(env, place, machine), machine, near):
            slots = range(first + spec.slots.start, first + spec.slots.stop)
            yield replace(spec, rank=count, slots=slots, machine=seat.machine.name)
            count += 1
