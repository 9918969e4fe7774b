"""Runs whose episodes are played by rollout workers, separate from the ranks that learn."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embodyrl.config.schema import Config, RolloutMode
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.sync import SharedSender
from embodyrl.envs import SimulatorSpec
from embodyrl.placement.launcher import Request
from embodyrl.placement.transport.lending import copy_file
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.episodes import FinishedEpisode, Rollout
from embodyrl.rollout.handing import SharedRollout, map_rollout
from embodyrl.rollout.rollouts import PlayState, Rollouts, SimulatorEvents, join_states
from embodyrl.rollout.spread import join_rollouts, leave_large, share_here, shares_here
from embodyrl.rollout.watching import RecordedStart
from embodyrl.runner.workers import Report, RolloutRequest, RolloutWorkers
from embodyrl.tracking.clock import Phase


class WorkersRollouts(Rollouts):
    """Rollouts of workers. The first rank talks to them; all ranks map or read what they have collected.

    Args:
        config: of the run.
        engine: of this rank; its weights are sent before they are acted with.
        spec: of the simulators.
        workers: on the first rank, whose policies have been built; None on the others.
        machine: name of this rank's.
    """

    def __init__(
        self,
        config: Config,
        engine: HybridEngine,
        spec: SimulatorSpec,
        workers: RolloutWorkers | None,
        machine: str = "",
    ) -> None:
        super().__init__(engine)
        self._spec = spec
        self._machine = machine
        self._slots = config.env.num_envs
        self._engine = engine
        self._workers = workers
        self._several = config.placement.rollout.workers > 1
        self._episodes_per_slot = config.rollout.episodes_per_slot
        self._timeout_s = config.placement.rollout.timeout_s
        asynchronous = config.rollout.mode is RolloutMode.async_
        self._ahead = config.rollout.max_staleness if asynchronous else 0
        # An edition is overwritten when the rollout that acts with it has been learned from: by then it has been taken.
        self._senders = [
            SharedSender(engine.policy, whole=False, timeout_s=self._timeout_s) for _ in range(self._ahead + 1)
        ]
        self._sent: int | None = None
        """`HybridEngine.edition` of the weights that were sent last."""
        self._place = -1
        """Number of the sender that has it."""
        self._under_way = 0
        """Rollouts that workers were asked for and that nobody has waited for."""
        self._requests: deque[list[Request]] = deque()
        """Those of the rollouts under way, on the first rank."""
        self._restarts = 0
        self._news: list[SimulatorEvents] = []
        self._waited = dict.fromkeys((Phase.simulate, Phase.render), 0.0)
        """Seconds of workers that waited for simulators."""
        self._warning: str | None = None
        self._seen: RecordedStart | None = None
        self._lags: list[int] = []
        """Updates between acting and learning, of the rollouts since the last `take_metrics`."""
        self._idle = {"async/learning_waited_s": 0.0, "async/rollout_waited_s": 0.0}
        self._asynchronous = asynchronous
        if workers is not None:
            server = workers.server
            lent = [] if server is None else [sender.lend(server) for sender in self._senders]
            workers.ask("listen", [sender.address for sender in self._senders], lent)
            engine.watch = workers.raise_if_dead

    @property
    def spec(self) -> SimulatorSpec:
        """See `Rollouts`."""
        return self._spec

    @property
    def own_slots(self) -> range:
        """See `Rollouts`."""
        return share_here(self._slots, self.ranks)

    @property
    def seen(self) -> RecordedStart | None:
        """See `Rollouts`."""
        return self._seen

    def collect(self, *, random: bool = False) -> Rollout:
        """See `Rollouts`. Asks for the next rollouts, then returns the oldest: one that was asked for `max_staleness`
        iterations ago, and acted with the weights of that moment, or at random if `random` was said then."""
        wanted = max(1, min(self._ahead + 1, self.iterations_left))
        while len(self.waiting) + self._under_way < wanted:
            self._begin(random=random)
        if not self.waiting:
            self._finish()
        rollout = self.waiting.pop(0)
        self._lags.append(self._engine.version - int(rollout.batch["version"].max()))
        return rollout

    def wait_idle(self) -> None:
        """See `Rollouts`."""
        while self._under_way:
            self._finish()

    def _begin(self, *, random: bool) -> None:
        """Ask the workers for another rollout, with the weights of this moment."""
        request = dataclasses.replace(self._request(), random=random)
        if self._workers is not None:
            self._requests.append(self._workers.begin("collect", request))
        self._under_way += 1

    def _finish(self) -> None:
        """Wait for the oldest rollout under way."""
        start = time.perf_counter()
        reports = None if self._workers is None else self._reports(self._requests.popleft())
        self._idle["async/learning_waited_s"] += time.perf_counter() - start
        self._under_way -= 1
        shared = [SharedRollout(**each) for each in self._shared(reports, dataclasses.asdict)]
        with self.clock.measure(Phase.sync):
            shares = shares_here([each.size[1] for each in shared], self.ranks)
            parts = [self._map(each, share) for each, share in zip(shared, shares, strict=True)]
            self.ranks.barrier()  # workers free the memory of rollouts when they are asked for later ones
            self.waiting.append(join_rollouts(parts, self._episodes_per_slot))
        if reports is not None:
            self._idle["async/rollout_waited_s"] += max(report.idle_s for report in reports)

    def _map(self, shared: SharedRollout, share: range) -> Rollout:
        """Map a rollout, or read from another machine what this rank needs of it, and leave the ranks their shares."""
        rollout = map_rollout(shared, self._machine, share=share, timeout_s=self._timeout_s)
        return dataclasses.replace(rollout, batch=self._spread(rollout.batch, share))

    def _spread(self, whole: TrajectoryBatch, share: range | None = None) -> TrajectoryBatch:
        """See `Rollouts`. A single rank, too, leaves large columns apart if they come from several workers, because
        joining them would copy them."""
        if self.ranks.size == 1 and self._several:
            return leave_large(whole, self.exchange)
        return super()._spread(whole, share)

    def evaluate(self, recorded: int, video: Path) -> list[FinishedEpisode]:
        """See `Rollouts`. The workers first finish what is under way."""
        request = self._request()
        reports = None
        if self._workers is not None:
            reports = self._reports(self._workers.begin("evaluate", request, recorded, video), after=self._under_way)
            self._seen = next((report.seen for report in reports if report.seen is not None), self._seen)
            for lent in (report.video for report in reports if report.video is not None):
                video.parent.mkdir(parents=True, exist_ok=True)
                copy_file(lent, video, timeout_s=self._timeout_s)
        every = self._shared(reports, _episodes_as_json)
        return [FinishedEpisode(**episode) for each in every for episode in each]

    def _request(self) -> RolloutRequest:
        """Send the weights of this moment if they are new; returns what asks to act with them."""
        edition = self._engine.edition
        if edition != self._sent:
            self._place = (self._place + 1) % len(self._senders)
            with self.clock.measure(Phase.sync):
                self._senders[self._place].send(edition)
            self._sent = edition
        ahead = len(self.waiting) + self._under_way
        return RolloutRequest(
            version=self._engine.version,
            edition=edition,
            place=self._place,
            restarts=self._restarts,
            iteration=self.iteration + ahead,
        )

    def _reports(self, requests: Sequence[Request], after: int = 0) -> list[Report]:
        """Wait for the workers' reports, and note what they say; the time of waiting is divided as by the slowest.

        Args:
            requests: to play.
            after: number of rollouts that the workers were asked for before.
        """
        assert self._workers is not None
        start = time.perf_counter()
        with self.clock.measure(Phase.sync):
            reports: list[Report] = self._workers.finish(requests, after)
        waited_s = time.perf_counter() - start
        slowest = max(reports, key=_seconds)
        self.clock.divide(Phase.sync, slowest.seconds, most=waited_s)
        simulated = slowest.seconds[Phase.simulate]
        self._waited[Phase.simulate] += simulated * (1.0 - slowest.rendering)
        self._waited[Phase.render] += simulated * slowest.rendering
        self._news += [report.news for report in reports]
        self._warning = self._warning or next((each.warning for each in reports if each.warning is not None), None)
        return reports

    def _shared(self, reports: Sequence[Report] | None, as_json: Callable[[Any], Any]) -> list[Any]:
        """Return on every rank what the workers have reported to the first."""
        with self.clock.measure(Phase.sync):
            self.ranks.barrier((self._under_way + 1) * self._timeout_s)
            own = None if reports is None else [as_json(report.result) for report in reports]
            return self.ranks.broadcast_from_rank0(own) or []

    def take_metrics(self) -> dict[str, float]:
        """See `Rollouts`."""
        lags, self._lags = self._lags, []
        idle, self._idle = self._idle, dict.fromkeys(self._idle, 0.0)
        if not self._asynchronous or not lags:
            return {}
        return {"async/lag_mean": sum(lags) / len(lags), "async/lag_max": float(max(lags)), **idle}

    def offload(self) -> int:
        """See `Rollouts`."""
        return 0 if self._workers is None else sum(self._workers.ask("offload"))

    def give_up_episodes(self) -> None:
        """See `Rollouts`. What is under way is given up as well."""
        self._under_way, self._requests = 0, deque()
        if self._workers is not None:
            self._workers.ask("give_up_episodes", after=self._ahead)

    def state(self) -> PlayState | None:
        """See `Rollouts`."""
        return None if self._workers is None else join_states(self._workers.ask("state"))

    def restore(self, state: PlayState) -> None:
        """See `Rollouts`."""
        if self._workers is not None:
            reports: list[Report] = self._workers.ask("restore", state, self._engine.version)
            self._news += [report.news for report in reports]

    def take_events(self) -> SimulatorEvents:
        """See `Rollouts`."""
        own: list[Any] = [
            [death for news in self._news for death in news.deaths],
            [slot for news in self._news for slot in news.mismatches],
        ]
        self._news = []
        deaths, mismatches = self.ranks.broadcast_from_rank0(own)
        return SimulatorEvents(deaths=deaths, mismatches=mismatches)

    def count_restarts(self, number: int) -> None:
        """See `Rollouts`."""
        self._restarts = number

    @property
    def warning(self) -> str | None:
        """See `Rollouts`."""
        return self._warning

    def take_rendering(self) -> float:
        """See `Rollouts`."""
        waited, self._waited = self._waited, dict.fromkeys(self._waited, 0.0)
        return waited[Phase.render] / max(sum(waited.values()), 1e-9)


def _episodes_as_json(episodes: Sequence[FinishedEpisode]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(episode) for episode in episodes]


def _seconds(report: Report) -> float:
    """Return what a worker spent on a request [s]."""
    return sum(report.seconds[phase] for phase in Phase if phase != Phase.idle)
