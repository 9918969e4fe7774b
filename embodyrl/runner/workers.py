"""Rollout workers: processes that play for the ranks, which only learn.

The first rank starts them and asks them by small messages, see `placement.launcher`. Weights and rollouts travel
through memory that both sides map, or that the other machine reads, see `engine.sync.shared` and `rollout.handing`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from embodyrl.config import LoadedConfig
from embodyrl.envs import SimulatorSpec
from embodyrl.placement.launcher import Request
from embodyrl.placement.transport.lending import MemoryServer, RemoteFolder, RemoteMemory, copy_folder
from embodyrl.rollout.interventions import expert_of, shown_to_policy
from embodyrl.runner.build import SpecOnly, build_acting, open_simulators, simulator_config
from embodyrl.runner.deployment import Deployment, ProcessAddress, lending
from embodyrl.tracking.clock import Phase

if TYPE_CHECKING:  # the processes of simulators start while torch is imported
    from embodyrl.engine.parallel import Ranks
    from embodyrl.engine.sync import SharedReceiver
    from embodyrl.rollout.handing import SharedColumns
    from embodyrl.rollout.rollouts import PlayState, SimulatorEvents
    from embodyrl.rollout.watching import RecordedStart
    from embodyrl.runner.share import LocalEnvs

CLOSE_S = 10.0
"""Longest time for the workers to close [s]; their simulators close meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A worker's answer to a request."""

    result: Any = None
    seconds: dict[str, float] = field(default_factory=dict)
    """What it spent on the request, by phase, and details; see `tracking.clock.Clock.take` [s]."""
    rendering: float = 0.0
    """Share of rendering in its simulators' working time, 0 .. 1."""
    news: SimulatorEvents
    idle_s: float = 0.0
    """How long it waited for the request [s]."""
    warning: str | None = None
    """About CUDA graphs."""
    video: RemoteMemory | None = None
    """One that was recorded on another machine than the first rank's."""
    seen: RecordedStart | None = None
    """See `Rollouts.seen`."""


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """What every request to play carries."""

    version: int
    """Of the weights to act with."""
    edition: int
    """`HybridEngine.edition` of these."""
    place: int
    """Which memory has them."""
    restarts: int
    """Simulator processes that have been replaced in the whole run."""
    iteration: int = 0
    """Of the rollout, from 0: the one that learns from it, unless iterations need several."""
    random: bool = False
    """Whether the rollout consists of random actions."""


class RolloutWorker:
    """The inside of a rollout worker; the first rank calls its methods.

    Args:
        loaded: config of the run.
        address: of this worker.
    """

    def __init__(self, loaded: LoadedConfig, address: ProcessAddress) -> None:
        address.enter()
        self.config = loaded.config
        self.address = address
        self._stack = ExitStack()
        self._server = self._stack.enter_context(lending(address.place))
        self._expert = expert = expert_of(loaded.config)
        simulated = simulator_config(loaded, expert)
        started = self._stack.enter_context(
            open_simulators(simulated, address.log_dir, address.place, address.simulators)
        )
        self.manager = started if expert is None else shown_to_policy(started, expert)
        self._share: LocalEnvs | None = None
        self._receivers: Sequence[SharedReceiver] = ()
        self._shared: deque[SharedColumns] = deque()
        """Memory of rollouts that may not have been mapped yet."""
        self._video: RemoteMemory | None = None
        """That of the last evaluation: the first rank has copied it when it asks for the next."""
        self._edition: int | None = None
        """Of the weights; None: none have come."""

    def spec(self) -> SimulatorSpec:
        """Return the spec of the simulators."""
        return self.manager.spec

    def load(self, weights: Path | None, lent: RemoteFolder | None) -> None:
        """Build the policy as the ranks do, from the weights of a saved one or those that the config names. What
        learning has changed since comes later.

        Args:
            weights: folder of the saved one at the first rank.
            lent: the same for other machines.
        """
        from embodyrl.methods.learner import learner_class
        from embodyrl.runner.share import LocalEnvs

        is_apart = lent is not None and not self.address.is_beside_first
        with TemporaryDirectory(prefix="embodyrl-") if is_apart else nullcontext() as own:
            if lent is not None and own is not None:
                weights = Path(own)
                copy_folder(lent, weights, timeout_s=self.config.placement.rollout.timeout_s)
            engine = build_acting(self.config, self.manager, weights, place=self.address.place)
        learner_class(self.config.algorithm).equip(engine.policy, self.config.algorithm)
        self._share = LocalEnvs(self.config, self.manager, engine, self._expert, folder=self.address.run_dir)

    @property
    def share(self) -> LocalEnvs:
        """Its envs and its policy."""
        assert self._share is not None, "load comes first"
        return self._share

    def listen(self, addresses: Sequence[str], lent: Sequence[RemoteMemory]) -> None:
        """Take weights from memory of the first rank from now on.

        Args:
            addresses: of the memory on its machine.
            lent: the same for other machines.
        """
        from embodyrl.engine.sync import SharedReceiver

        policy, timeout_s = self.share.engine.policy, self.config.placement.rollout.timeout_s
        places: Sequence[str | RemoteMemory] = addresses if self.address.is_beside_first else lent
        self._receivers = [SharedReceiver(policy, place, timeout_s=timeout_s) for place in places]

    def collect(self, request: RolloutRequest) -> Report:
        """Collect a rollout; the result is a `SharedRollout`."""
        from embodyrl.rollout.handing import SharedColumns

        def work() -> Any:
            # Whoever asks for a rollout has mapped all but as many of the earlier ones as are collected ahead.
            if len(self._shared) == len(self._receivers):
                self._shared.popleft().close()
            self._shared.append(SharedColumns(self.address.place.machine, self._server))
            room = self._shared[-1]
            return room.share(self.share.collect(room.zeros, random=request.random, iteration=request.iteration))

        return self._reported(work, request)

    def evaluate(self, request: RolloutRequest, recorded: int, video: Path) -> Report:
        """Play its part of an evaluation; the result is a list of episodes. See `Rollouts.evaluate`; on another machine
        than the first rank's the video is lent."""
        if self.address.is_beside_first or self._server is None:
            report = self._reported(lambda: self.share.evaluate(recorded, video), request)
            return dataclasses.replace(report, seen=self.share.seen)
        if self._video is not None:
            self._server.withdraw(self._video)
        with TemporaryDirectory(prefix="embodyrl-") as folder:
            own = Path(folder) / video.name
            report = self._reported(lambda: self.share.evaluate(recorded, own), request)
            self._video = self._server.lend_file(own) if own.exists() else None
        return dataclasses.replace(report, video=self._video, seen=self.share.seen)

    def _reported(self, work: Callable[[], Any], request: RolloutRequest) -> Report:
        """Work as ordered; returns the result with what happened meanwhile."""
        engine = self.share.engine
        before = engine.clock.take()
        self.manager.take_work()
        self.manager.count_restarts(request.restarts)
        self._take_weights(request)
        result = work()
        return Report(
            result=result,
            seconds=engine.clock.take(),
            rendering=self.manager.take_work().rendering,
            news=self.share.take_events(),
            idle_s=before["idle"],
            warning=engine.graphs.warning,
        )

    def _take_weights(self, request: RolloutRequest) -> None:
        if self._edition == request.edition:
            return
        engine = self.share.engine
        with engine.clock.measure(Phase.sync):
            self._receivers[request.place].receive(request.edition)
        engine.policy.weights_replaced()
        engine.set_version(request.version)
        self._edition = request.edition

    def state(self) -> PlayState:
        """Return the state of its slots and blocks."""
        return self.share.state()

    def restore(self, state: PlayState, version: int) -> Report:
        """Continue from the state of the run's slots and blocks."""
        self.share.engine.set_version(version)
        self.share.restore(state)
        return Report(news=self.share.take_events())

    def offload(self) -> int:
        """End the simulators until the next rollout; returns the bytes that this frees."""
        return self.share.collector.offload()

    def give_up_episodes(self) -> None:
        """See `Rollouts`."""
        self.share.collector.give_up_episodes()

    def close(self) -> None:
        """End the simulators."""
        self._stack.close()


class RolloutWorkers:
    """The rollout workers of a run, seen from the first rank.

    Args:
        deployment: of the run; has their places.
        server: lends weights and files to those on other machines; None: there are none.
    """

    def __init__(self, deployment: Deployment, server: MemoryServer | None) -> None:
        self.timeout_s = deployment.loaded.config.placement.rollout.timeout_s
        self.server = server
        self._deployment = deployment
        specs = deployment.plan.role("rollout")
        self._workers = deployment.start(specs, RolloutWorker, self.timeout_s)

    def begin(self, method: str, *args: object) -> list[Request]:
        """Ask all of them to call a method of `RolloutWorker`, and return at once."""
        return [worker.request(method, *args, timeout=self.timeout_s) for worker in self._workers]

    def finish(self, requests: Sequence[Request], after: int = 0) -> list[Any]:
        """Wait for their results.

        Args:
            requests: of `begin`.
            after: number of earlier requests that have not been waited for.

        Raises:
            WorkerError: one of them died, hangs, or raised an exception.
        """
        return self._deployment.launcher.gather(requests, timeout=(after + 1) * self.timeout_s)

    def ask(self, method: str, *args: object, after: int = 0) -> list[Any]:
        """Call a method of all of them; returns the results in their order."""
        return self.finish(self.begin(method, *args), after)

    @contextmanager
    def lent(self, folder: Path | None) -> Iterator[RemoteFolder | None]:
        """Lend a folder to workers on other machines for the length of a block, if there are any."""
        if self.server is None or folder is None:
            yield None
            return
        with self.server.folder(folder) as lent:
            yield lent

    def raise_if_dead(self) -> None:
        """Check all processes of the run without waiting.

        Raises:
            WorkerDied: one of them has ended.
        """
        self._deployment.raise_if_dead()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._deployment.stop(self._workers, timeout_s=CLOSE_S if error is None else 1.0)


def share_spec(workers: RolloutWorkers | None, ranks: Ranks, patience_s: float) -> SpecOnly:
    """Return the spec of the workers' simulators, on every rank.

    Args:
        workers: on the first rank.
        ranks: those of the run.
        patience_s: longest time for the workers to start, for which the other ranks wait [s].
    """
    own: Mapping[str, Any] = {} if workers is None else dataclasses.asdict(workers.ask("spec")[0])
    ranks.barrier(patience_s)
    return SpecOnly(SimulatorSpec.from_plain(ranks.broadcast_from_rank0(own)))
