"""The ranks of a run, processes that play and learn together: identifying this one, and starting the others.

torchrun starts all of them and sets variables in their environment. Without it, the first starts the others on this
machine.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from embodyrl.config.rules import shares_of_ranks
from embodyrl.config.schema import Config, Device, EnvConfig, ParallelBackend
from embodyrl.errors import UserError
from embodyrl.placement.launcher import WorkerDied
from embodyrl.placement.plan import THIS_MACHINE, Inventory, largest_divisor
from embodyrl.placement.process import EXIT_S, Process, end_of, spawn
from embodyrl.placement.signals import STOPPED_CODES
from embodyrl.placement.topology import visible_names
from embodyrl.screen import counted

MEETING_FILE = ".ranks"
"""File of the run directory through which ranks of one machine find each other."""
TCP = "tcp://"
"""Begins the address of a meeting point of ranks on several machines."""
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
"""Environment variables that torchrun and similar launchers set."""
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks that only use this network device cannot be reached from another machine."""
_ENDED_WELL = (0, *STOPPED_CODES)
_FOLLOW = "from embodyrl.runner.ranks import main; main(*sys.argv[3:])"


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
    """Name of its machine in the plan; empty where there is none, because all processes are on one machine, or torchrun
    has placed them."""
    address: str | None = None
    """IP address at which processes of other machines reach it; None: there are none."""

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes the run's files."""
        return self.rank == 0

    def to_json(self) -> str:
        """Encode for the command line of a rank."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankInfo:
        """Decode the text of `to_json`."""
        return cls(**json.loads(text))


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
    """Return the number of blocks of a run; `auto`: one for each process that rolls out.

    Args:
        config: of the run.
        ranks: of the run.
    """
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
    on_cluster = place.machine not in ("", THIS_MACHINE)  # whose launcher has shown it its own
    if place.local_size == 1 or device is Device.cpu or on_cluster:
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
    """Return which of a machine's GPUs a run would leave idle, and the remedy; None if it uses all.

    Args:
        config: of the run.
        gpus: their number on this machine.
        environ: variables of this process.
    """
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


@dataclass(kw_only=True)
class _Peer:
    """A rank that this process started."""

    rank: int
    process: Process
    log: IO[bytes]

    def ended(self) -> WorkerDied:
        """Return an error that describes how it ended, with the end of its output."""
        output = end_of(self.log)
        self.process.kill()
        how = self.process.how_it_ended()
        text = f"rank {self.rank} (pid {self.process.pid}) {how}{output}"
        return WorkerDied(text, role="rank", rank=self.rank, pid=self.process.pid)


class Peers:
    """The ranks that this process starts on its machine. They write to `rank-<n>.log`, leave Ctrl-C to this process,
    and die with it.

    Args:
        run_dir: of the run, through which they get the config and find each other.
        log_dir: for their output.
    """

    listening: int | None = None
    """Socket of the meeting point, which is a file."""

    def __init__(self, run_dir: Path, log_dir: Path) -> None:
        self._run_dir, self._log_dir = run_dir, log_dir
        self._peers: list[_Peer] = []
        self._meeting: Path | None = None

    def start(self, place: RankInfo) -> RankInfo:
        """Start all other ranks on the config of the run, unless torchrun did; returns the place of this one.

        Args:
            place: of this process, which is the first.
        """
        if place.size == 1 or is_launched():
            return place
        run_dir, log_dir = self._run_dir, self._log_dir
        self._meeting = meeting = run_dir / MEETING_FILE
        meeting.unlink(missing_ok=True)
        log_dir.mkdir(parents=True, exist_ok=True)
        for name, value in _LOOPBACK.items():
            os.environ.setdefault(name, value)
        first = dataclasses.replace(place, meeting=str(meeting.absolute()))
        for rank in range(1, place.size):
            log = (log_dir / f"rank-{rank}.log").open("a+b")
            other = dataclasses.replace(first, rank=rank, local_rank=rank)
            words = [f"rank {rank}", str(os.getpid()), str(run_dir.absolute()), other.to_json()]
            process = spawn(_FOLLOW, words, env=os.environ, output=log)
            self._peers.append(_Peer(rank=rank, process=process, log=log))
        return first

    def raise_if_ended(self, ranks: Sequence[int] | None = None) -> None:
        """Raise the error of the first that has ended, or of one of `ranks`, which are ending.

        Raises:
            WorkerDied: names rank, pid and how it ended.
        """
        for peer in self._peers:
            if (ranks is None or peer.rank in ranks) and peer.process.has_exited(0.0 if ranks is None else EXIT_S):
                raise peer.ended()

    def finish(self, timeout: float) -> None:
        """Wait until all of them have ended; after `timeout` [s] they are killed.

        Raises:
            WorkerDied: one ended with an error.
        """
        deadline = time.monotonic() + timeout
        for peer in self._peers:
            peer.process.has_exited(max(0.0, deadline - time.monotonic()))
            error = peer.ended()
            if peer.process.status not in _ENDED_WELL:
                raise error

    def close(self) -> None:
        """End those that still run. May be called again."""
        for peer in self._peers:
            peer.process.kill()
            peer.log.close()
        if self._meeting is not None:
            self._meeting.unlink(missing_ok=True)
