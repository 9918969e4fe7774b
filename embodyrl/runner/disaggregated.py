"""Runs whose episodes are played by rollout workers, apart from the ranks that learn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodyrl.config.schema import Config
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.sync import SharedSender
from embodyrl.envs import SimulatorSpec
from embodyrl.rollout.episodes import FinishedEpisode, Rollout
from embodyrl.rollout.handing import Handed, take_over
from embodyrl.rollout.rollouts import News, PlayState, Rollouts, join_states
from embodyrl.rollout.spread import join_rollouts, leave_share
from embodyrl.runner.workers import Report, RolloutWorkers
from embodyrl.tracking.clock import Phase


class WorkersRollouts(Rollouts):
    """Rollouts of workers. The first rank talks to them; all ranks map what they have collected.

    Args:
        config: of the run.
        engine: of this rank; its weights are sent before they are acted with.
        spec: of the simulators.
        workers: on the first rank, whose policies have been built; None on the others.
    """

    def __init__(
        self, config: Config, engine: HybridEngine, spec: SimulatorSpec, workers: RolloutWorkers | None
    ) -> None:
        super().__init__(engine)
        self._spec = spec
        self._engine = engine
        self._workers = workers
        self._episodes_per_slot = config.rollout.episodes_per_slot
        self._timeout_s = config.placement.rollout.timeout_s
        self._sender = SharedSender(engine.policy, whole=False, timeout_s=self._timeout_s)
        self._sent: int | None = None
        """Version of the weights that was sent last."""
        self._restarts = 0
        self._news: list[News] = []
        self._waited = dict.fromkeys((Phase.simulate, Phase.render), 0.0)
        """Seconds of workers that waited for simulators."""
        self._warning: str | None = None
        if workers is not None:
            workers.ask("listen", self._sender.address)
            engine.watch = workers.raise_if_dead

    @property
    def spec(self) -> SimulatorSpec:
        """See `Rollouts`."""
        return self._spec

    def collect(self) -> Rollout:
        """See `Rollouts`."""
        handed = [Handed(**each) for each in self._played("collect", as_json=dataclasses.asdict)]
        with self.clock.measure(Phase.sync):
            parts = [self._own_share(take_over(each)) for each in handed]
            self.ranks.barrier()  # workers free their memory when they are next asked
            return join_rollouts(parts, self._episodes_per_slot)

    def _own_share(self, part: Rollout) -> Rollout:
        """Leave each rank a share of the large columns of a worker's rollout."""
        return dataclasses.replace(part, batch=leave_share(part.batch, self.exchange))

    def evaluate(self, recorded: int, video: Path) -> list[FinishedEpisode]:
        """See `Rollouts`."""
        every = self._played("evaluate", recorded, video, as_json=_episodes_as_json)
        return [FinishedEpisode(**episode) for each in every for episode in each]

    def _played(self, method: str, *args: object, as_json: Any) -> list[Any]:
        """Send the weights to the workers and have them play; returns what each of them reports, on every rank."""
        with self.clock.measure(Phase.sync):
            version = self._engine.version
            if version != self._sent:
                self._sender.send(version)
                self._sent = version
            results: list[Any] | None = None
            if self._workers is not None:
                reports = self._workers.ask(method, version, self._restarts, *args)
                self._note(reports)
                results = [as_json(report.result) for report in reports]
            self.ranks.barrier(self._timeout_s)
            found = self.ranks.broadcast_from_rank0(results)
        return found or []

    def _note(self, reports: Sequence[Report]) -> None:
        """Note what happened in the workers; the time of waiting for them is that of the slowest."""
        slowest = max(reports, key=lambda report: sum(report.seconds[phase] for phase in Phase if phase != Phase.idle))
        self.clock.divide(Phase.sync, slowest.seconds)
        waited = slowest.seconds[Phase.simulate]
        self._waited[Phase.simulate] += waited * (1.0 - slowest.rendering)
        self._waited[Phase.render] += waited * slowest.rendering
        self._news += [report.news for report in reports]
        self._warning = self._warning or next((each.warning for each in reports if each.warning is not None), None)

    def offload(self) -> int:
        """See `Rollouts`."""
        return 0 if self._workers is None else sum(self._workers.ask("offload"))

    def give_up_episodes(self) -> None:
        """See `Rollouts`."""
        if self._workers is not None:
            self._workers.ask("give_up_episodes")

    def state(self) -> PlayState | None:
        """See `Rollouts`."""
        return None if self._workers is None else join_states(self._workers.ask("state"))

    def restore(self, state: PlayState) -> None:
        """See `Rollouts`."""
        if self._workers is not None:
            reports: list[Report] = self._workers.ask("restore", state, self._engine.version)
            self._news += [report.news for report in reports]

    def take_news(self) -> News:
        """See `Rollouts`."""
        own: list[Any] = [
            [death for news in self._news for death in news.deaths],
            [slot for news in self._news for slot in news.mismatches],
        ]
        self._news = []
        deaths, mismatches = self.ranks.broadcast_from_rank0(own)
        return News(deaths=deaths, mismatches=mismatches)

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
