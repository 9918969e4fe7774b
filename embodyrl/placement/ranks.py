"""The ranks of a run, processes that play and learn together: identifying this one, and what is its own.

torchrun starts all of them and sets variables in their environment. Without it, the first starts the others.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from embodyrl.config.rules import shares_of_ranks
from embodyrl.config.schema import Config, Device, EnvConfig, ParallelBackend
from embodyrl.errors import UserError
from embodyrl.placement.plan import THIS_MACHINE, Inventory, largest_divisor
from embodyrl.placement.topology import visible_names
from embodyrl.screen import counted

TCP = "tcp://"
"""Begins the address of a meeting point of ranks."""
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
"""Environment variables that torchrun and similar launchers set."""


class RanksError(UserError):
    """Raised when a run cannot be shared by as many processes as there are."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank of a process, and number of ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Its number among the ranks of its machine."""
    local_size: int = 1
    meeting: str | None = None
    """File, or `tcp://host:port`, through which the ranks find each other; None: by torchrun's environment, or there is
    only one."""
    machine: str = ""
    """Name of its machine in the plan; empty where there is none: this is the only process, or torchrun has placed
    them."""
    address: str | None = None
    """IP address at which processes of other machines reach it; None: there are none."""

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes the run's files."""
        return self.rank == 0


SINGLE_RANK = RankInfo()
"""The rank of a run in one process."""


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun started this process."""
    return all(name in environ for name in _LAUNCHED)


def is_follower(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun started this process, and not as the first."""
    return is_launched(environ) and environ["RANK"] != "0"


def rank_info_here(config: Config, environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Return the rank of this process: torchrun's, else the first of `engine.parallel.world_size`.

    Raises:
        RanksError: torchrun started another number of processes than the config asks for, or than its slots can be
            shared by.
    """
    wanted = config.engine.parallel.world_size
    if not is_launched(environ):
        size = 1 if wanted == "auto" else int(wanted)
        return RankInfo(size=size, local_size=size)
    size = int(environ["WORLD_SIZE"])
    if wanted not in ("auto", size):
        raise RanksError(
            f"torchrun started {size} processes, but engine.parallel.world_size = {wanted}: start as many, or set "
            "engine.parallel.world_size=auto"
        )
    local_size, workers = int(environ.get("LOCAL_WORLD_SIZE", "1")), config.placement.rollout.workers
    if workers and local_size != size:
        raise RanksError(
            f"placement.rollout.workers = {workers}, and LOCAL_WORLD_SIZE says that {local_size} of {size} ranks are "
            "on this machine, but rollout workers reach only those of their own: start all ranks on one machine, or "
            "set placement.rollout.workers=0"
        )
    for finding in shares_of_ranks(config, size):  # of the config's own number a rule has said so
        raise RanksError(f"{finding.message}: {finding.hint}")
    several = local_size != size
    return RankInfo(
        rank=int(environ["RANK"]),
        size=size,
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        local_size=local_size,
        address=address_of(environ["MASTER_ADDR"]) if several and environ["RANK"] == "0" else None,
    )


def address_of(host: str) -> str:
    """Return the IP address at which other machines reach this one.

    Args:
        host: its address, or its name. Debian's installer has the name mean 127.0.1.1 on the machine itself: then it is
            the first IPv4 address of a network card, if there is one.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        found = socket.gethostbyname(host)
    if not ipaddress.ip_address(found).is_loopback:
        return found
    own = [one.address for card in psutil.net_if_addrs().values() for one in card if one.family == socket.AF_INET]
    return next((each for each in own if not ipaddress.ip_address(each).is_loopback), found)


def shards_of(backend: ParallelBackend, size: int, local_size: int) -> int:
    """Return the number of ranks over which a policy is sharded; 1: each of them has all of it.

    Args:
        backend: `engine.parallel.backend`; auto means replicas where nothing has chosen.
        size: ranks of the run.
        local_size: ranks on each machine.

    Raises:
        RanksError: machines do not have the same number of ranks, as hsdp needs.
    """
    if backend is ParallelBackend.fsdp:
        return size
    if backend is not ParallelBackend.hsdp:
        return 1
    if size % local_size:
        raise RanksError(
            f"engine.parallel.backend is hsdp, but {size} ranks are not {local_size} on each machine: start as many on "
            "each, or set engine.parallel.backend=fsdp"
        )
    return local_size


def blocks_of(config: Config, ranks: int) -> int:
    """Return the number of blocks of a run; `auto`: one for each process that rolls out."""
    blocks = config.rollout.blocks
    return blocks if isinstance(blocks, int) else config.placement.rollout.workers or ranks


def own_blocks(config: Config, process: int, processes: int) -> range:
    """Return the blocks of one of the processes that roll out, rollout workers or ranks."""
    return share_of(blocks_of(config, processes), process, processes)


def share_of(number: int, process: int, processes: int) -> range:
    """Return which of a number of things belong to one of some processes: neighbours, and equally many if possible."""
    return range(number * process // processes, number * (process + 1) // processes)


def own_share(env: EnvConfig, place: RankInfo, machine: Inventory) -> EnvConfig:
    """Return the simulator config of one rank: its share of the envs, in its share of the processes."""
    if place.size == 1:
        return env
    slots = env.num_envs // place.size
    cores = max(1, machine.cores // place.local_size)
    workers = largest_divisor(slots, cores) if env.workers == "auto" else int(env.workers) // place.size
    return dataclasses.replace(env, num_envs=slots, workers=workers)


def use_own_gpu(place: RankInfo, device: Device, machine: Inventory) -> None:
    """Show this process, and those that it starts, only its own GPU; to be called before torch is imported.

    Raises:
        RanksError: this machine has fewer GPUs than ranks.
    """
    was_launched = place.machine != "" and not (place.is_first and place.machine == THIS_MACHINE)
    if place.local_size == 1 or device is Device.cpu or was_launched:  # its launcher has shown it its own
        return
    names = gpu_names(machine, place.local_size)
    if not names:
        return
    if len(names) < place.local_size:
        raise RanksError(
            f"{place.local_size} ranks on this machine, but {counted(len(names), 'GPU')}: start as many ranks as there "
            "are GPUs, or set engine.device=cpu"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = names[place.local_rank]


def gpus_wanted(config: Config, ranks: int) -> int:
    """Return the number of GPUs that ranks and rollout workers compute on, if they do not compute on the CPU."""
    rollout = config.placement.rollout
    return ranks if rollout.share_gpus else ranks + rollout.workers


def refuse_too_few(config: Config, ranks: int, gpus: int) -> None:
    """Compare the GPUs that a run wants with those that there are.

    Raises:
        RanksError: there are too few.
    """
    workers, wanted = config.placement.rollout.workers, gpus_wanted(config, ranks)
    if wanted <= gpus:
        return
    if not workers or ranks > gpus:
        raise RanksError(
            f"{ranks} ranks need a GPU each, but there {'is' if gpus == 1 else 'are'} {gpus}: start as many ranks as "
            "there are GPUs, or set engine.device=cpu"
        )
    spare = gpus - ranks
    fewer = f"placement.rollout.workers={spare}" if spare else "placement.rollout.workers=0"
    raise RanksError(
        f"{counted(ranks, 'rank')} and {counted(workers, 'rollout worker')} need {wanted} GPUs, but "
        f"there {'is' if gpus == 1 else 'are'} {gpus}: set placement.rollout.share_gpus=true, {fewer}, or "
        "engine.device=cpu"
    )


def idle_gpus(config: Config, gpus: int, environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Return which of a machine's GPUs a run would leave idle, and the remedy; None if it uses all."""
    wanted = config.engine.parallel.world_size
    ranks = wanted if isinstance(wanted, int) else int(environ.get("LOCAL_WORLD_SIZE", "1"))
    used, workers = gpus_wanted(config, ranks), config.placement.rollout.workers
    if config.engine.device is Device.cpu or used >= gpus:
        return None
    processes = counted(ranks, "rank")
    if workers:
        processes += f" and {counted(workers, 'rollout worker')}"
    idle = f"{gpus - used} of them would stay idle, because the run has {processes}"
    if workers:
        return idle, "set engine.parallel.world_size or placement.rollout.workers to more"
    return idle, f"set engine.parallel.world_size={gpus}, or start {gpus} processes with torchrun"


def gpu_names(machine: Inventory, wanted: int) -> list[str]:
    """Return the names of a machine's GPUs for CUDA_VISIBLE_DEVICES; [] if it has none that CUDA would use.

    Args:
        machine: the machine; this one if the kernel does not list its GPUs.
        wanted: number of GPUs, assumed where only the driver knows it.
    """
    if machine.gpus:
        return [gpu.uuid or str(gpu.index) for gpu in machine.gpus]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return visible_names(os.environ)  # slices of a GPU (MIG), which the kernel's list does not name
    # Their number is known to the driver alone. A rank whose GPU is missing will find no CUDA device, and
    # `engine.parallel.connected` refuses ranks on different kinds of devices.
    return [str(number) for number in range(wanted)] if machine.unlisted_gpus else []
