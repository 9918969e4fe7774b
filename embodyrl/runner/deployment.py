"""Where the processes of a run are, and what starts them: this machine, or those of a Ray cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.config import LoadedConfig
from embodyrl.config.schema import PlacementBackend
from embodyrl.envs.manager.host import SimulatorHost, host_simulators
from embodyrl.errors import RunError
from embodyrl.placement.launcher import Launcher, RemoteError, Worker, WorkerDied
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.plan import WorkerSpec, inventory
from embodyrl.placement.ranks import RankInfo, is_launched
from embodyrl.placement.run_plan import Machine, Plan, plan_run
from embodyrl.placement.transport.lending import MemoryServer
from embodyrl.placement.transport.line import Address, LineError, LineLost, LineTimeout
from embodyrl.placement.transport.segment import MemoryGone
from embodyrl.rollout.interventions import expert_of
from embodyrl.runner.build import simulator_config
from embodyrl.runs import WORKER_LOGS

NOTICED_S = 20.0
"""Longest time from an error that a lost machine has caused to the news of the loss [s]: Ray hears of a closed
connection after three seconds."""
LOOPBACK = "127.0.0.1"
"""Address of a process that nobody reaches from another machine."""
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ProcessAddress:
    """A process's place in a run, as it is given to it."""

    place: RankInfo
    """Among the processes of its role."""
    first: str
    """Machine of the first rank."""
    folder: str
    """Folder in which the run was started, to which paths in its config are relative."""
    log_dir: Path | None
    """Folder for the output of its simulators; None: they are kept only while it runs."""
    simulators: Address | None
    """Its simulators on another machine; None: it starts them itself."""
    run_dir: Path | None = None
    """Folder of the run; None: it is on another machine."""

    @property
    def is_beside_first(self) -> bool:
        """True on the machine of the first rank, whose files this process sees."""
        return self.place.machine == self.first

    def enter(self) -> None:
        """Make relative paths mean here what they mean at the first rank, if there is such a folder."""
        if Path(self.folder).is_dir():
            os.chdir(self.folder)


class Deployment:
    """The processes of a run other than this one, which is the first rank.

    Args:
        loaded: config of the run.
        run_dir: of the run, for the output of processes of this machine.
        plan: all processes; without any, the run is in this one.
        launcher: starts them.
    """

    def __init__(self, loaded: LoadedConfig, run_dir: Path, plan: Plan, launcher: Launcher) -> None:
        self.loaded = loaded
        self.plan = plan
        self.launcher = launcher
        self._run_dir, self._logs = run_dir, run_dir / WORKER_LOGS
        self._workers: list[Worker] = []
        self._simulators: list[Address] = []
        """Of each process that rolls out; empty: each has its own."""
        self._explained: RunError | None = None
        """The error that was looked into last."""

    @property
    def place(self) -> RankInfo | None:
        """This process, the first rank; None if there is no plan."""
        ranks = self.plan.role("rank")
        return self.plan.place_of(ranks[0]) if ranks else None

    def start(self, specs: Sequence[WorkerSpec], factory: Any, timeout_s: float) -> list[Worker]:
        """Start processes.

        Args:
            specs: of the plan.
            factory: called as `factory(loaded, address)` in each of them; makes the object whose methods are called.
            timeout_s: longest time until all of them are ready [s].
        """
        arguments = [(self.loaded, self._address_of(spec)) for spec in specs]
        workers = self.launcher.start(specs, factory, arguments, timeout=timeout_s)
        self._workers += workers
        return workers

    def start_simulators(self) -> None:
        """Start the hosts of simulators, if these are on machines of their own."""
        specs = self.plan.role("simulators")
        if not specs:
            return
        env, placement = self.loaded.config.env, self.loaded.config.placement
        workers = self.start(specs, _host, placement.start_timeout_s + env.startup_timeout_s)
        requests = [worker.request("address") for worker in workers]
        self._simulators = self.launcher.gather(requests, timeout=placement.start_timeout_s)

    def _address_of(self, spec: WorkerSpec) -> ProcessAddress:
        place, first = self.plan.place_of(spec), self.plan.role("rank")[0].machine
        return ProcessAddress(
            place=place,
            first=first,
            folder=str(Path.cwd()),
            log_dir=self._logs / f"{spec.role}-{spec.rank}" if place.machine == first else None,
            simulators=self.simulators_of(spec),
            run_dir=self._run_dir if place.machine == first else None,
        )

    @property
    def simulators_here(self) -> Address | None:
        """Where this process, the first rank, finds its simulators; None: it starts them itself, or has none."""
        ranks = self.plan.role("rank")
        return self.simulators_of(ranks[0]) if ranks else None

    def simulators_of(self, spec: WorkerSpec) -> Address | None:
        """Return where a process finds its simulators; None: it starts them itself."""
        return self._simulators[spec.rank] if self._simulators and spec.slots else None

    def raise_if_dead(self) -> None:
        """Check the processes without waiting.

        Raises:
            WorkerDied: one of them has ended.
        """
        for worker in self._workers:
            worker.raise_if_dead()

    def stop(self, workers: Sequence[Worker], *, timeout_s: float) -> None:
        """End some of the processes: ask them to, wait, then kill."""
        self._workers = [worker for worker in self._workers if worker not in workers]
        self.launcher.stop(workers, timeout=timeout_s)

    @contextmanager
    def naming_losses(self) -> Iterator[None]:
        """Turn an error that the loss of a process or a machine may have caused into that of what ended.

        Raises:
            MachineLost, WorkerDied: one has ended.
        """
        try:
            yield
        except (MemoryGone, LineError, RemoteError) as error:
            if error is not self._explained and self._may_be_a_loss(error):
                self._explained = error
                self._explain(error)
            raise

    def _may_be_a_loss(self, error: RunError) -> bool:
        """Return whether memory of another process is gone, or a broken line to another machine has caused an error."""
        if isinstance(error, RemoteError):
            broken = error.type_name in (kind.__name__ for kind in (LineError, LineLost, LineTimeout))
        else:
            broken = isinstance(error, LineError)
        return isinstance(error, MemoryGone) or (self.plan.is_spread and broken)

    def _explain(self, error: RunError) -> None:
        """Wait a while for news of the end of a machine or a process, as long as any is watched."""
        deadline = time.monotonic() + NOTICED_S
        while self._workers and time.monotonic() < deadline:
            try:
                self.raise_if_dead()
            except WorkerDied as died:
                raise died from error
            time.sleep(_POLL_S)


def _host(loaded: LoadedConfig, address: ProcessAddress) -> SimulatorHost:
    """Make a host of simulators in its process."""
    address.enter()
    simulated = simulator_config(loaded, expert_of(loaded.config))
    return host_simulators(simulated, address.place, address.place.address or LOOPBACK, address.log_dir)


@contextmanager
def deployed(loaded: LoadedConfig, place: RankInfo, run_dir: Path, lost: Collection[str]) -> Iterator[Deployment]:
    """Find the machines of a run and plan its processes; end those that were started at the end of the block.

    Args:
        loaded: config of the run.
        place: of this process.
        run_dir: of the run.
        lost: names of machines that are not to be used any more.

    Raises:
        UserError: machines are missing, or have not enough room.
    """
    config = loaded.config
    plugins, plugin_path = config.plugins, str(loaded.plugin_dir)
    with ExitStack() as stack:
        launcher: Launcher
        if config.placement.backend is PlacementBackend.ray:
            from embodyrl.placement.cluster import RayCluster, signals_through
            from embodyrl.placement.ray import RayLauncher

            stack.enter_context(signals_through())
            timeout_s = config.placement.start_timeout_s
            cluster = stack.enter_context(RayCluster(str(config.placement.address), timeout_s=timeout_s))
            plan = plan_run(config, [each for each in cluster.machines() if each.name not in lost], place.size)
            cluster.reserve(plan, timeout_s=timeout_s)
            if cluster.gpu_here is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = cluster.gpu_here
            launcher = RayLauncher(cluster, plugins=plugins, plugin_path=plugin_path)
        else:
            # torchrun has placed the ranks, perhaps on several machines: a plan is of what this process starts.
            starts_some = config.placement.rollout.workers or (place.size > 1 and not is_launched())
            here = Machine(inventory=inventory())
            plan = plan_run(config, [here], place.size) if starts_some else Plan(specs=(), machines=())
            launcher = LocalLauncher(plugins=plugins, plugin_path=plugin_path, log_dir=run_dir / WORKER_LOGS)
        stack.callback(launcher.close, timeout=1.0)
        deployment = Deployment(loaded, run_dir, plan, launcher)
        with deployment.naming_losses():
            deployment.start_simulators()
            yield deployment


@contextmanager
def lending(place: RankInfo) -> Iterator[MemoryServer | None]:
    """Lend to other machines for the length of a block; nothing, if there are none."""
    if place.address is None:
        yield None
        return
    with MemoryServer(place.address) as server:
        yield server
