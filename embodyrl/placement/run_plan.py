"""The plan of a run's processes over machines: ranks, rollout workers, and the simulators beside those that roll out,
or on machines of their own.

A pure function of the settings and of the machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from embodyrl.config.schema import Config, Device, EnvConfig, Numa
from embodyrl.placement.plan import THIS_MACHINE, Inventory, WorkerSpec, describe_binding, plan_env_workers
from embodyrl.placement.ranks import (
    RankInfo,
    RanksError,
    gpu_names,
    gpus_wanted,
    own_blocks,
    own_share,
    refuse_too_few,
    share_of,
)
from embodyrl.placement.topology import Gpu


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine of a run."""

    name: str = THIS_MACHINE
    inventory: Inventory
    """What the run may use of it."""
    labels: tuple[str, ...] = ()
    """What it is for, as its owner says."""
    address: str | None = None
    """IP address at which the others reach it; None: there are no others."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The processes of a run."""

    specs: tuple[WorkerSpec, ...]
    """Ranks, then rollout workers, then hosts of simulators, then simulator processes, each role by number."""
    machines: tuple[Machine, ...]

    def role(self, role: str) -> list[WorkerSpec]:
        """Return the processes of a role: `rank`, `rollout`, `simulators` (a host of some) or `env`."""
        return [spec for spec in self.specs if spec.role == role]

    @property
    def acting(self) -> list[WorkerSpec]:
        """The processes that roll out: the rollout workers, else the ranks."""
        return self.role("rollout") or self.role("rank")

    def simulators_of(self, process: WorkerSpec) -> list[WorkerSpec]:
        """Return the simulator processes of one that rolls out."""
        return [spec for spec in self.role("env") if spec.slots[0] in process.slots]

    @property
    def is_spread(self) -> bool:
        """True if processes are on several machines."""
        return len({spec.machine for spec in self.specs}) > 1

    def machine_of(self, process: WorkerSpec) -> Machine:
        """Return the machine of a process."""
        return next(machine for machine in self.machines if machine.name == process.machine)

    def place_of(self, process: WorkerSpec) -> RankInfo:
        """Return the place of a process among those of its role."""
        role = self.role(process.role)
        here = [spec for spec in role if spec.machine == process.machine]
        return RankInfo(
            rank=process.rank,
            size=len(role),
            local_rank=here.index(process),
            local_size=len(here),
            machine=process.machine,
            address=self.machine_of(process).address if self.is_spread else None,
        )


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
        machines: at least one, this one first. Where some have GPUs, ranks and rollout workers are placed on these
            alone.
        ranks: number of processes that learn; the first is this one.

    Raises:
        RanksError: there are too few GPUs, or no machine has a label that the config names.
        UserError: the envs cannot be divided evenly.
    """
    learning, apart = _seats(config, machines, ranks)
    if learning[0].machine is not machines[0]:
        raise RanksError(
            f"the first rank is this process, on machine {machines[0].name}, but the ranks belong on machine "
            f"{learning[0].machine.name} (by placement.ranks.nodes, or because it has GPUs): start the run there"
        )
    role, rolling = ("rollout", apart) if apart else ("rank", learning)
    hosts = _host_seats(config, machines, len(rolling))
    shares = [share_of(config.env.num_envs, number, len(rolling)) for number in range(len(rolling))]
    computing = [
        WorkerSpec(
            role=name,
            rank=number,
            slots=shares[number] if name in (role, "simulators") else range(0),
            blocks=own_blocks(config, number, len(rolling)) if name == role else range(0),
            machine=seat.machine.name,
            gpus=seat.gpus,
            env_vars=seat.variables,
        )
        for name, group in (("rank", learning), ("rollout", apart), ("simulators", hosts))
        for number, seat in enumerate(group)
    ]
    return Plan(specs=(*computing, *_simulators(config.env, hosts or rolling)), machines=tuple(machines))


def describe_run_binding(numa: Numa, machine: Inventory, plan: Plan) -> str:
    """Describe the binding of a run's simulator processes to the NUMA nodes of a machine, see `describe_binding`."""
    near = {gpu.node: gpu for process in plan.acting for gpu in process.gpus}
    gpu = next(iter(near.values())) if len(near) == 1 else None  # those of several nodes are not one place
    return describe_binding(numa, machine, plan.role("env"), gpu)


def _machines_for(config: Config, kind: str, machines: Sequence[Machine]) -> list[Machine]:
    """Return the machines for `ranks`, `rollout` or `simulators`.

    Raises:
        RanksError: there are none.
    """
    placement = config.placement
    labels = {
        "ranks": placement.ranks.nodes,
        "rollout": placement.rollout.nodes,
        "simulators": placement.simulators.nodes,
    }
    wanted = labels[kind]
    others = {label for label in labels.values() if label is not None}
    found = [
        machine
        for machine in machines
        if (wanted in machine.labels if wanted is not None else others.isdisjoint(machine.labels))
    ]
    if found:
        return found
    every = "; ".join(f"{machine.name}: {', '.join(machine.labels) or 'none'}" for machine in machines)
    what = (
        f"no machine has the label {wanted!r} of placement.{kind}.nodes"
        if wanted is not None
        else f"every machine is labelled for something else, and placement.{kind}.nodes is null"
    )
    raise RanksError(
        f"{what} (labels: {every}): set it to a label that is there, or start Ray on a machine with "
        f"--labels=embodyrl={wanted or 'LABEL'}"
    )


def _seats(config: Config, machines: Sequence[Machine], ranks: int) -> tuple[list[_Seat], list[_Seat]]:
    """Return the seats of the ranks, and those of the rollout workers."""
    workers, shared = config.placement.rollout.workers, config.placement.rollout.share_gpus
    for_ranks = _machines_for(config, "ranks", machines)
    for_workers = _machines_for(config, "rollout", machines) if workers else for_ranks
    if for_workers == for_ranks:
        wanted = gpus_wanted(config, ranks)
        seats = _seats_on(config.engine.device, for_ranks, ranks + workers, wanted)
        on_gpus = bool(seats[0].variables)
        if on_gpus:
            refuse_too_few(config, ranks, len(seats))
        learning = seats[:ranks]
        apart = [seats[worker % ranks if on_gpus and shared else ranks + worker] for worker in range(workers)]
    else:
        learning = _seats_on(config.engine.device, for_ranks, ranks, ranks)[:ranks]
        apart = _seats_on(config.engine.device, for_workers, workers, workers)[:workers]
        for group, wanted, what in ((learning, ranks, "ranks"), (apart, workers, "rollout")):
            if len(group) < wanted:
                raise RanksError(
                    f"{wanted} processes need a GPU each, but the machines for them (placement.{what}.nodes) have "
                    f"{len(group)}: start fewer, or set engine.device=cpu"
                )
    # A rank that is alone sees all GPUs, and takes the first.
    return [replace(seat, variables={}) for seat in learning] if ranks == 1 else learning, apart


def _seats_on(device: Device, machines: Sequence[Machine], processes: int, gpus: int) -> list[_Seat]:
    """Return a seat for each GPU of some machines, or if they have none one for each process."""
    seats = [] if device is Device.cpu else _gpu_seats(machines, gpus)
    if seats:
        return seats
    count = len(machines)
    # Rounded up, so that the first machine, which has the first rank, has no fewer than the others.
    ends = [-(-processes * number // count) for number in range(count + 1)]
    return [
        _Seat(machine=machine)
        for machine, start, end in zip(machines, ends, ends[1:], strict=False)
        for _ in range(start, end)
    ]


def _host_seats(config: Config, machines: Sequence[Machine], rolling: int) -> list[_Seat]:
    """Return the seats of the hosts of simulators, one for each process that rolls out; none if these have them."""
    if config.placement.simulators.nodes is None:
        return []
    chosen = _machines_for(config, "simulators", machines)
    used = min(len(chosen), rolling)
    return [_Seat(machine=chosen[number * used // rolling]) for number in range(rolling)]


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
