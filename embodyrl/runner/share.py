"""The envs of one process and the policy that plays them; and runs in which the ranks themselves play."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from embodyrl.config.schema import Config
from embodyrl.data.experts import Demonstrator
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import SimulatorSpec
from embodyrl.envs.manager import Simulators
from embodyrl.methods.learner import learner_class
from embodyrl.rollout.action_queue import ActionQueue, Overlap
from embodyrl.rollout.collector import Collector, Mode, Zeros
from embodyrl.rollout.episodes import EpisodeSource, FinishedEpisode, Rollout
from embodyrl.rollout.hooks import Hook
from embodyrl.rollout.interventions import Interventions
from embodyrl.rollout.judging import Seat, judge_of
from embodyrl.rollout.late_chunks import LateChunks
from embodyrl.rollout.needs import images_are_read
from embodyrl.rollout.rollouts import PlayState, Rollouts, SimulatorEvents, join_slots, own_slots
from embodyrl.rollout.spread import gather_rollouts
from embodyrl.rollout.watching import RecordedStart, StartRecorder
from embodyrl.runner.evaluation import VideoRecorder, borrowed, evaluation_noise, held_out_episodes, play_share
from embodyrl.tracking.clock import Phase


class LocalEnvs:
    """A process's share of the envs, played by the policy of its engine.

    Args:
        config: of the run.
        manager: its simulators; processes have equal shares of the envs, in the order of their blocks.
        engine: chooses the actions; knows the blocks.
        expert: acts beside the policy in rollouts; None: nobody does.
        folder: of the run; None: this process has none.
    """

    def __init__(
        self,
        config: Config,
        manager: Simulators,
        engine: HybridEngine,
        expert: Demonstrator | None = None,
        folder: Path | None = None,
    ) -> None:
        self.config, self._folder = config, folder
        self.manager = manager
        self.engine = engine
        blocks, needs = engine.blocks, config.algorithm.needs(config)
        first = config.env.num_envs * blocks.here.start // blocks.count
        self.slots = range(first, first + manager.num_envs)
        """Its slots, as numbered in the run."""
        source = EpisodeSource(
            config.env.sources, group_size=config.rollout.group_size, seed=config.seed, first_slot=first
        )
        self._source = source
        self.collector = Collector(
            manager,
            engine,
            source=source,
            config=config.rollout,
            critic=needs.critic,
            images=not engine.policy.trace_holds_images or images_are_read(config),
            following=needs.replay is not None,
            first_slot=first,
            slots=config.env.num_envs,
            paraphrases=config.env.paraphrases,
            hooks=[*self._hooks(source, expert)],
        )
        self.seen: RecordedStart | None = None
        """What the last evaluation showed of its first episode, in the process that played it."""
        self._mode: Mode = "eval" if needs.most_likely else "train"

    def _hooks(self, source: EpisodeSource, expert: Demonstrator | None) -> Iterator[Hook]:
        """Yield what changes actions and results in rollouts; the expert has the last word."""
        config, spec, num_envs = self.config, self.manager.spec, self.manager.num_envs
        if config.rollout.delay:
            yield self._late_chunks()
        yield from learner_class(config.algorithm).hooks(config, spec)
        settings = config.algorithm.needs(config).expert
        if expert is not None and settings is not None:
            yield Interventions(
                expert,
                settings,
                spec=spec,
                episode=source.episode,
                num_envs=num_envs,
                first_slot=self.slots.start,
                seed=config.seed,
            )
        seat = Seat(
            config=config, slots=self.slots, device=self.engine.device, cameras=spec.cameras, folder=self._folder
        )
        if (judge := judge_of(seat)) is not None:
            yield judge

    def _late_chunks(self) -> LateChunks:
        """Return the hook that lets chunks be late."""
        manager, chunk_size = self.manager, self.config.rollout.chunk_size
        sizes = {"executed": manager.chunk_size, "delay": self.config.rollout.delay}
        queue = ActionQueue(manager.num_envs, chunk_size, manager.spec.action_dim, **sizes)
        return LateChunks(queue, num_envs=manager.num_envs, chunk_size=chunk_size, **sizes)

    def collect(self, zeros: Zeros = np.zeros, *, random: bool = False, iteration: int = 0) -> Rollout:
        """Run the policy in training mode, or choose random actions, in a rollout of an iteration; see
        `Collector.collect`."""
        self._source.begin(iteration)
        # One block around all chunks: sharded weights are gathered once, not for every `act`.
        with self.engine.rollout_mode():
            return self.collector.collect(zeros, "random" if random else self._mode)

    def evaluate(self, recorded: int, video: Path) -> list[FinishedEpisode]:
        """Play this process's part of the evaluation, see `Rollouts.evaluate`."""
        manager, episodes = self.manager, held_out_episodes(self.config)
        noise, overlap = evaluation_noise(self.config, self.engine), Overlap.of(self.config)
        with borrowed(manager, self.engine.clock, self.collector.in_progress):
            if self.engine.blocks.here.start > 0:
                return play_share(manager, self.engine, episodes, recorded, None, noise, overlap)
            watched = StartRecorder(manager)  # the first episode is played here
            with VideoRecorder(watched, video, episodes[:recorded]) if recorded else nullcontext() as recorder:
                finished = play_share(watched, self.engine, episodes, recorded, recorder, noise, overlap)
            self.seen = watched.seen() or self.seen
            return finished

    def state(self) -> PlayState:
        """Return the state of its slots and blocks."""
        slots = list(range(self.manager.num_envs))
        return PlayState(
            collector=self.collector.state_dict(),
            simulators=self.manager.get_state(slots) if self.collector.in_progress else [],
            noise=self.engine.noise_state(),
        )

    def restore(self, state: PlayState) -> None:
        """Continue from the state of the run's slots and blocks."""
        # Simulators before the collector, which reads their present observations.
        if state.simulators:
            own = state.simulators[self.slots.start : self.slots.stop]
            self.manager.set_state(list(range(self.manager.num_envs)), own)
        self.collector.load_state_dict(own_slots(state.collector, self.slots))
        self.engine.load_noise(state.noise)

    def take_events(self) -> SimulatorEvents:
        """Return what happened to its simulators since the last call."""
        return SimulatorEvents(
            deaths=[str(death) for death in self.manager.take_deaths()],
            mismatches=[self.slots.start + slot for slot in self.manager.take_mismatches()],
        )


class LocalRollouts(Rollouts):
    """Rollouts of ranks that play themselves, each its share of the envs.

    Args:
        share: of this rank.
    """

    def __init__(self, share: LocalEnvs) -> None:
        super().__init__(share.engine)
        self.share = share
        self._manager = share.manager

    @property
    def spec(self) -> SimulatorSpec:
        """See `Rollouts`."""
        return self._manager.spec

    @property
    def own_slots(self) -> range:
        """See `Rollouts`."""
        return self.share.slots

    def collect(self, *, random: bool = False) -> Rollout:
        """See `Rollouts`."""
        own = self.share.collect(random=random, iteration=self.iteration)
        # The batches travel between ranks here, so waiting for the slowest rank counts as communication.
        with self.clock.measure(Phase.sync):
            return gather_rollouts(own, self.exchange, self.share.config.rollout.episodes_per_slot)

    def wait_idle(self) -> None:
        """See `Rollouts`: none is ever under way."""

    def evaluate(self, recorded: int, video: Path) -> list[FinishedEpisode]:
        """See `Rollouts`."""
        own = self.share.evaluate(recorded, video)
        if self.ranks.size == 1:
            return own
        with self.clock.measure(Phase.sync):
            self.ranks.barrier()  # which can name a rank that hangs
            every = self.ranks.gather_values([dataclasses.asdict(episode) for episode in own])
        return [FinishedEpisode(**episode) for each in every for episode in each]

    @property
    def seen(self) -> RecordedStart | None:
        """What the last evaluation showed of its first episode; None before one."""
        return self.share.seen

    def offload(self) -> int:
        """See `Rollouts`."""
        return self.share.collector.offload()

    def give_up_episodes(self) -> None:
        """See `Rollouts`."""
        self.share.collector.give_up_episodes()

    def state(self) -> PlayState:
        """See `Rollouts`."""
        own = self.share.state()
        noise = self.ranks.gather(torch.stack(own.noise["actions"]))
        return PlayState(
            collector=join_slots(self.ranks.gather_values(own.collector)),
            simulators=self.ranks.gather_lists(own.simulators),
            noise=own.noise | {"actions": [stream.clone() for streams in noise for stream in streams]},
        )

    def restore(self, state: PlayState) -> None:
        """See `Rollouts`."""
        self.share.restore(state)

    def take_events(self) -> SimulatorEvents:
        """See `Rollouts`."""
        own = self.share.take_events()
        every = self.ranks.gather_values([own.deaths, own.mismatches])
        return SimulatorEvents(
            deaths=[death for deaths, _ in every for death in deaths],
            mismatches=[slot for _, slots in every for slot in slots],
        )

    def count_restarts(self, number: int) -> None:
        """See `Rollouts`."""
        self._manager.count_restarts(number)

    @property
    def warning(self) -> str | None:
        """See `Rollouts`."""
        return self.share.engine.graphs.warning

    def take_rendering(self) -> float:
        """See `Rollouts`."""
        return self._manager.take_work().rendering
