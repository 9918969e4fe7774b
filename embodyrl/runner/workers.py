"""Rollout workers: processes that play for the ranks, which only learn.

The first rank starts them and asks them by small messages, see `placement.launcher`. Weights and rollouts travel
through memory that both sides map, see `engine.sync.shared` and `rollout.handing`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from embodyrl.config import LoadedConfig
from embodyrl.envs import ActionField, SimulatorSpec
from embodyrl.placement.launcher import Request, Worker
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.plan import WorkerSpec
from embodyrl.placement.ranks import RankInfo
from embodyrl.runner.build import Elsewhere, build_acting, open_simulators
from embodyrl.runner.rundir import WORKER_LOGS
from embodyrl.tracking.clock import Phase

if TYPE_CHECKING:  # the processes of simulators start while torch is imported
    from embodyrl.engine.parallel import Ranks
    from embodyrl.engine.sync import SharedReceiver
    from embodyrl.rollout.handing import SharedColumns
    from embodyrl.rollout.rollouts import News, PlayState
    from embodyrl.runner.share import EnvShare

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
    news: News
    idle_s: float = 0.0
    """How long it waited for the request [s]."""
    warning: str | None = None
    """About CUDA graphs."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What every request to play carries."""

    version: int
    """Of the weights to act with."""
    place: int
    """Which memory has them."""
    restarts: int
    """Simulator processes that have been replaced in the whole run."""


class RolloutWorker:
    """The inside of a rollout worker; the first rank calls its methods.

    Args:
        loaded: config of the run.
        place: of this worker among all of them.
        log_dir: folder for the output of its simulator processes.
    """

    def __init__(self, loaded: LoadedConfig, place: RankInfo, log_dir: Path) -> None:
        self.config = loaded.config
        self.place = place
        self._stack = ExitStack()
        self.manager = self._stack.enter_context(open_simulators(loaded, log_dir, place))
        self._share: EnvShare | None = None
        self._receivers: Sequence[SharedReceiver] = ()
        self._handed: deque[SharedColumns] = deque()
        """Memory of rollouts that may not have been mapped yet."""
        self._version: int | None = None
        """Of the weights; None: none have come."""

    def spec(self) -> SimulatorSpec:
        """Return the spec of the simulators."""
        return self.manager.spec

    def load(self, weights: Path | None) -> None:
        """Build the policy as the ranks do, from the weights of a saved one or those that the config names. What
        learning has changed since comes later."""
        from embodyrl.runner.share import EnvShare

        engine = build_acting(self.config, self.manager, weights, place=self.place)
        self._share = EnvShare(self.config, self.manager, engine)

    @property
    def share(self) -> EnvShare:
        """Its envs and its policy."""
        assert self._share is not None, "load comes first"
        return self._share

    def listen(self, addresses: Sequence[str]) -> None:
        """Take weights from the memory at these addresses from now on."""
        from embodyrl.engine.sync import SharedReceiver

        policy, timeout_s = self.share.engine.policy, self.config.placement.rollout.timeout_s
        self._receivers = [SharedReceiver(policy, address, timeout_s=timeout_s) for address in addresses]

    def collect(self, orders: Orders) -> Report:
        """Collect a rollout; the result is a `Handed`."""
        from embodyrl.rollout.handing import SharedColumns

        def work() -> Any:
            # Whoever asks for a rollout has mapped all but as many of the earlier ones as are collected ahead.
            if len(self._handed) == len(self._receivers):
                self._handed.popleft().close()
            self._handed.append(SharedColumns())
            return self._handed[-1].hand_over(self.share.collect(self._handed[-1].zeros))

        return self._reported(work, orders)

    def evaluate(self, orders: Orders, recorded: int, video: Path) -> Report:
        """Play its part of an evaluation; the result is a list of episodes. See `Rollouts.evaluate`."""
        return self._reported(lambda: self.share.evaluate(recorded, video), orders)

    def _reported(self, work: Callable[[], Any], orders: Orders) -> Report:
        """Work as ordered; returns the result with what happened meanwhile."""
        engine = self.share.engine
        before = engine.clock.take()
        self.manager.take_work()
        self.manager.count_restarts(orders.restarts)
        self._take_weights(orders)
        result = work()
        return Report(
            result=result,
            seconds=engine.clock.take(),
            rendering=self.manager.take_work().rendering,
            news=self.share.take_news(),
            idle_s=before["idle"],
            warning=engine.graphs.warning,
        )

    def _take_weights(self, orders: Orders) -> None:
        if self._version == orders.version:
            return
        engine = self.share.engine
        with engine.clock.measure(Phase.sync):
            self._receivers[orders.place].receive(orders.version)
        engine.set_version(orders.version)
        self._version = orders.version

    def state(self) -> PlayState:
        """Return the state of its slots and blocks."""
        return self.share.state()

    def restore(self, state: PlayState, version: int) -> Report:
        """Continue from the state of the run's slots and blocks."""
        self.share.engine.set_version(version)
        self.share.restore(state)
        return Report(news=self.share.take_news())

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
        loaded: config of the run.
        run_dir: of the run, for their output.
        specs: their places, see `run_plan`.
    """

    def __init__(self, loaded: LoadedConfig, run_dir: Path, specs: Sequence[WorkerSpec]) -> None:
        settings = loaded.config.placement.rollout
        self.timeout_s = settings.timeout_s
        logs = run_dir / WORKER_LOGS
        self._launcher = LocalLauncher(plugins=loaded.config.plugins, plugin_path=str(loaded.plugin_dir), log_dir=logs)
        count = len(specs)
        arguments = [
            (loaded, RankInfo(rank=rank, size=count, local_rank=rank, local_size=count), logs / f"rollout-{rank}")
            for rank in range(count)
        ]
        self._workers: Sequence[Worker] = self._launcher.start(specs, RolloutWorker, arguments, timeout=self.timeout_s)

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
        return self._launcher.gather(requests, timeout=(after + 1) * self.timeout_s)

    def ask(self, method: str, *args: object, after: int = 0) -> list[Any]:
        """Call a method of all of them; returns the results in their order."""
        return self.finish(self.begin(method, *args), after)

    def raise_if_dead(self) -> None:
        """Check the processes without waiting.

        Raises:
            WorkerDied: one of them has ended.
        """
        for worker in self._workers:
            worker.raise_if_dead()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._launcher.close(timeout=CLOSE_S if error is None else 1.0)


def share_spec(workers: RolloutWorkers | None, ranks: Ranks, patience_s: float) -> Elsewhere:
    """Return the spec of the workers' simulators, on every rank.

    Args:
        workers: on the first rank.
        ranks: those of the run.
        patience_s: longest time for the workers to start, for which the other ranks wait [s].
    """
    own: Mapping[str, Any] = {} if workers is None else dataclasses.asdict(workers.ask("spec")[0])
    ranks.barrier(patience_s)
    return Elsewhere(_spec_of(ranks.broadcast_from_rank0(own)))


def _spec_of(plain: Mapping[str, Any]) -> SimulatorSpec:
    """Return a spec from its fields, as JSON has them."""
    actions = [ActionField(**each | {name: tuple(each[name]) for name in ("low", "high")}) for each in plain["actions"]]
    sizes = {name: tuple(plain[name]) for name in ("cameras", "image_size")}
    return SimulatorSpec(**{**plain, **sizes, "actions": tuple(actions)})
