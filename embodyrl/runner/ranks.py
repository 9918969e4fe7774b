"""Runs of several ranks: the first starts and supervises the others, which follow it."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import psutil

from embodyrl.config import LoadedConfig
from embodyrl.config.plugins import ORIGIN_FILE
from embodyrl.config.schema import Config
from embodyrl.errors import RunError, UserError, explain
from embodyrl.placement.cuda import set_up_cuda
from embodyrl.placement.launcher import Request, Worker
from embodyrl.placement.plan import inventory
from embodyrl.placement.process import EXIT_S
from embodyrl.placement.ranks import TCP, RankInfo, is_launched, use_own_gpu
from embodyrl.placement.transport.lending import MemoryServer, RemoteFolder, copy_folder
from embodyrl.placement.transport.line import Address
from embodyrl.runner.build import PROGRAM, ProgramInfo
from embodyrl.runner.checkpoint import Found
from embodyrl.runner.deployment import LOOPBACK, Deployment, ProcessAddress
from embodyrl.runner.fitting import follow_choices
from embodyrl.runner.opening import open_runner
from embodyrl.runner.rundir import SOURCES, RunDir, read_config
from embodyrl.runs import CONFIG_FILE

if TYPE_CHECKING:
    from embodyrl.engine.parallel import Ranks

ENDING_S = 30.0
"""Longest time for the other ranks to end after the first [s]."""
COPYING_S = 3600.0
"""Longest time for them to copy a checkpoint from its machine [s]."""
_POLL_S = 0.05


class LaunchedRanks:
    """The other ranks of a run, started through its launcher; none if torchrun has started them. They log to
    `rank-<n>.log`, leave Ctrl-C to this process, and die with it.

    Args:
        deployment: of the run.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._workers: list[Worker] = []
        self._requests: list[Request] = []
        self.listening: int | None = None
        """Socket of the meeting point."""

    def start(self, place: RankInfo) -> RankInfo:
        """Start them; returns the place of this one, with the meeting point."""
        if is_launched():
            return place
        host = place.address or LOOPBACK
        use_network_of(host)
        meeting = socket.create_server((host, 0), backlog=place.size)
        place = dataclasses.replace(place, meeting=f"{TCP}{host}:{meeting.getsockname()[1]}")
        self.listening = meeting.detach()
        config = self._deployment.loaded.config
        specs = self._deployment.plan.role("rank")[1:]
        self._workers = self._deployment.start(specs, Follower, config.placement.start_timeout_s)
        self._requests = [worker.request("follow", place.meeting, timeout=math.inf) for worker in self._workers]
        return place

    def raise_if_ended(self, ranks: Sequence[int] | None = None) -> None:
        """Raise the error of the first that has ended, or of one of `ranks`, which are ending.

        Raises:
            WorkerDied: names rank, machine, pid and how it ended.
        """
        deadline = time.monotonic() + (0.0 if ranks is None else EXIT_S)
        while True:
            for worker in self._workers:
                worker.raise_if_dead()
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)

    def finish(self, timeout: float) -> None:
        """Wait until all of them have ended; after `timeout` [s] they are killed.

        Raises:
            WorkerError: one ended with an error.
        """
        self._deployment.launcher.gather(self._requests, timeout=timeout)

    def close(self) -> None:
        """End those that still run. May be called again."""
        self._deployment.stop(self._workers, timeout_s=1.0)
        self._workers = []


class Follower:
    """A rank other than the first, in the process that a launcher has started for it.

    Args:
        loaded: config of the run.
        address: of this rank.
    """

    def __init__(self, loaded: LoadedConfig, address: ProcessAddress) -> None:
        self._started = time.monotonic()
        self._config = loaded.config
        self._address = address

    def follow(self, meeting: str) -> int:
        """Take part in the run until its end; returns the exit code. An error ends the process: the first rank looks
        whether it lives, and reads the end of its output.

        Args:
            meeting: where the ranks find each other.
        """
        self._address.enter()
        place = dataclasses.replace(self._address.place, meeting=meeting)
        use_network_of(place.address or LOOPBACK)
        try:
            return follow(self._config, place, started=self._started, simulators=self._address.simulators)[1]
        except BaseException as error:
            if isinstance(error, UserError | RunError):
                code = explain(error)
            else:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code or 1)


def use_network_of(host: str) -> None:
    """Have torch.distributed of this process use the device with an address, unless the environment names one."""
    devices = (name for name, each in psutil.net_if_addrs().items() if any(host == one.address for one in each))
    device = "lo" if host.startswith("127.") else next(devices, None)
    # Torch warns on the screen of every address that has no name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if device is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, device)


@contextmanager
def leading(
    deployment: Deployment, place: RankInfo, run_dir: Path, checkpoint: Found | None, server: MemoryServer | None
) -> Iterator[Ranks | None]:
    """Be the first rank for the length of a block: start the others, hand them config and checkpoint, and wait for
    their end. Yields None if there are no others.

    Args:
        deployment: of the run.
        place: of this rank.
        run_dir: of the run.
        checkpoint: to continue from; None: from the start.
        server: lends files to other machines; None: there are none.
    """
    if place.size == 1:
        yield None
        return
    config = deployment.loaded.config
    peers = LaunchedRanks(deployment)
    try:
        place = peers.start(place)
        use_own_gpu(place, config.engine.device, inventory())

        from embodyrl.engine.compute import choose_device
        from embodyrl.engine.parallel import connected

        device, timeout_s = choose_device(config.engine.device), config.engine.parallel.timeout_s
        with connected(place, device, timeout_s, peers.raise_if_ended, peers.listening) as ranks:
            hand_over(ranks, place, run_dir, checkpoint, server)
            yield ranks
        peers.finish(ENDING_S)
    finally:
        peers.close()


def hand_over(
    ranks: Ranks, place: RankInfo, run_dir: Path, checkpoint: Found | None, server: MemoryServer | None
) -> None:
    """Give the other ranks what `handed_over` returns there. For the arguments see `leading`."""
    from embodyrl.engine.parallel import machine_here

    with nullcontext(None) if server is None or checkpoint is None else server.folder(checkpoint.place) as lent:
        ranks.broadcast_from_rank0(
            {
                "machine": place.machine or machine_here(),
                "run_dir": str(run_dir.absolute()),
                "checkpoint": None if checkpoint is None else str(checkpoint.place.absolute()),
                "with_replay": checkpoint is None or checkpoint.with_replay,
                "files": {name: (run_dir / name).read_text() for name in (CONFIG_FILE, ORIGIN_FILE)},
                "lent": None if lent is None else dataclasses.asdict(lent),
            }
        )
        if lent is not None:
            ranks.barrier(COPYING_S)


@contextmanager
def handed_over(ranks: Ranks, place: RankInfo) -> Iterator[tuple[Path, Found | None]]:
    """Give the run directory and the checkpoint to continue from for the length of a block: those of the first rank on
    its machine, elsewhere copies of the files that are needed."""
    from embodyrl.engine.parallel import machine_here

    sent: Any = ranks.broadcast_from_rank0(None)
    lent = None if sent["lent"] is None else RemoteFolder.from_plain(sent["lent"])
    with ExitStack() as stack:
        if sent["machine"] == (place.machine or machine_here()):
            run_dir, saved = Path(sent["run_dir"]), sent["checkpoint"] and Path(sent["checkpoint"])
        else:
            run_dir = Path(stack.enter_context(TemporaryDirectory(prefix="embodyrl-")))
            for name, text in sent["files"].items():
                (run_dir / name).write_text(text)
            saved = None if lent is None else run_dir / "checkpoint"
            if lent is not None:
                copy_folder(lent, run_dir / "checkpoint", timeout_s=COPYING_S)
        if lent is not None:
            ranks.barrier(COPYING_S)
        yield run_dir, None if saved is None else Found(place=saved, with_replay=sent["with_replay"])


def follow(
    config: Config, place: RankInfo, *, started: float, host: ProgramInfo = PROGRAM, simulators: Address | None = None
) -> tuple[Path, int]:
    """Take part in a run as a rank other than the first; returns the run directory and the exit code.

    Args:
        config: of the run.
        place: of this rank.
        started: `time.monotonic()` when the program began.
        host: settings of the program that the run is part of.
        simulators: those of this rank on another machine; None: it starts them itself.
    """
    set_up_cuda()
    use_own_gpu(place, config.engine.device, inventory())

    from embodyrl.engine.compute import choose_device
    from embodyrl.engine.parallel import connected

    device, timeout_s = choose_device(config.engine.device), config.engine.parallel.timeout_s
    with (
        connected(place, device, timeout_s, lambda ranks: None) as ranks,
        handed_over(ranks, place) as (run_dir, checkpoint),
    ):
        loaded = read_config(run_dir, [], SOURCES, trust=True)  # the first rank has checked it, and whose the code is
        with open_runner(
            follow_choices(loaded, ranks.broadcast_from_rank0([])),
            RunDir.shared(run_dir),
            started=started,
            checkpoint=checkpoint,
            place=place,
            ranks=ranks,
            simulators=simulators,
            host=host,
        ) as runner:
            return run_dir, runner.run()
