"""What a run asks of those who play its episodes, wherever they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import SimulatorSpec
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.episodes import FinishedEpisode, Rollout
from embodyrl.rollout.spread import bring_large, forget_all_but, leave_share
from embodyrl.rollout.watching import RecordedStart


@dataclass(frozen=True, kw_only=True)
class PlayState:
    """State of episodes and of the noise in their actions; every list in it has an entry per slot, or per block."""

    collector: dict[str, Any]
    """`Collector.state_dict`."""
    simulators: list[bytes]
    """State of every slot; empty if no episode is in progress."""
    noise: dict[str, Any]
    """`HybridEngine.noise_state`."""


@dataclass(frozen=True, kw_only=True)
class SimulatorEvents:
    """Failures of simulators since the last call of `take_events`."""

    deaths: list[str] = field(default_factory=list)
    """Simulator processes that died and were replaced."""
    mismatches: list[int] = field(default_factory=list)
    """Slots of the run that were not restored bit for bit."""


class Rollouts(ABC):
    """Episodes of all slots of a run, and surplus groups of them. All ranks must make the same calls.

    Args:
        engine: of this rank.
    """

    def __init__(self, engine: HybridEngine) -> None:
        self.exchange = engine.exchange
        self.ranks = engine.ranks
        self.clock = engine.clock
        self.surplus: TrajectoryBatch | None = None
        """Whole groups that were collected beyond what an update needed, for the next one."""
        self.waiting: list[Rollout] = []
        """Rollouts that were collected ahead of learning, the oldest first."""
        self.iteration = 0
        """Number of the present iteration, from 0."""
        self.iterations_left = 1
        """Iterations until the end of the run, the present one included: as many rollouts are needed at least."""

    @property
    @abstractmethod
    def spec(self) -> SimulatorSpec:
        """The spec of the simulators."""

    @property
    @abstractmethod
    def own_slots(self) -> range:
        """The slots of the run whose large columns this rank gets, of every batch."""

    @property
    def seen(self) -> RecordedStart | None:
        """What the last evaluation showed of its first episode, for the lock of a checkpoint; None if this process has
        no simulators, or there was no evaluation."""
        return None

    @abstractmethod
    def collect(self, *, random: bool = False) -> Rollout:
        """Run the policy in training mode, or choose random actions; returns the rollout of all slots."""

    @abstractmethod
    def wait_idle(self) -> None:
        """Let the rollouts that are under way end; they wait."""

    @abstractmethod
    def evaluate(self, recorded: int, video: Path) -> list[FinishedEpisode]:
        """Play the evaluation episodes; training episodes continue afterwards unchanged.

        Args:
            recorded: number of episodes to record, the first ones.
            video: file for them.
        """

    @abstractmethod
    def offload(self) -> int:
        """End the simulator processes until the next rollout; returns the bytes of memory that this frees."""

    @abstractmethod
    def give_up_episodes(self) -> None:
        """Begin new episodes with the next rollout, after a rollout that failed half way."""

    @abstractmethod
    def state(self) -> PlayState | None:
        """Return the state of all slots and blocks, on the first rank; on the others perhaps None. No rollout may be
        under way."""

    @abstractmethod
    def restore(self, state: PlayState) -> None:
        """Continue from the state of all slots and blocks; weights and version have been loaded before."""

    @abstractmethod
    def take_events(self) -> SimulatorEvents:
        """Return what happened to the simulators of all slots since the last call."""

    @abstractmethod
    def count_restarts(self, number: int) -> None:
        """Note how many simulator processes have been replaced in the whole run, of which there may be
        `env.max_restarts`."""

    @property
    @abstractmethod
    def warning(self) -> str | None:
        """Why decisions are no CUDA graphs, if that is unexpected."""

    @abstractmethod
    def take_rendering(self) -> float:
        """Return the share of rendering in the simulators' working time since the last call, 0 .. 1."""

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of asynchronous rollouts since the last call."""
        return {}

    def forget_batch(self, *but: TrajectoryBatch) -> None:
        """Free the memory of the large columns of several ranks, but for those of some batches, of the surplus and of
        what waits."""
        surplus = [] if self.surplus is None else [self.surplus]
        forget_all_but([*but, *surplus, *(rollout.batch for rollout in self.waiting)], self.exchange)

    def gather_surplus(self) -> TrajectoryBatch | None:
        """Return the surplus with all its columns, on the first rank."""
        return None if self.surplus is None else self._whole(self.surplus)

    def whole_waiting(self) -> list[Rollout]:
        """Return the rollouts that wait with all their columns, on the first rank."""
        return [replace(rollout, batch=self._whole(rollout.batch)) for rollout in self.waiting]

    def _whole(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        return bring_large(batch, self.exchange, [rank == 0 for rank in range(self.ranks.size)])

    def take_surplus(self, whole: TrajectoryBatch | None) -> None:
        """Continue with what `gather_surplus` returned, which every rank has read."""
        self.surplus = None if whole is None else self._spread(whole)

    def take_waiting(self, whole: Sequence[Rollout]) -> None:
        """Continue with what `whole_waiting` returned, which every rank has read."""
        self.waiting = [replace(rollout, batch=self._spread(rollout.batch)) for rollout in whole]

    def _spread(self, whole: TrajectoryBatch, share: range | None = None) -> TrajectoryBatch:
        """Leave each rank its share of the large columns of a batch that all of them have whole; see `leave_share`."""
        return leave_share(whole, self.exchange, share)


def join_states(states: Sequence[PlayState]) -> PlayState:
    """Join the states of several processes, in the order of their slots."""
    noise: list[Tensor] = [stream for state in states for stream in state.noise["actions"]]
    return PlayState(
        collector=join_slots([state.collector for state in states]),
        simulators=[slot for state in states for slot in state.simulators],
        noise=states[0].noise | {"actions": noise},
    )


def join_slots(states: Sequence[Any]) -> Any:
    """Join the processes' states of their slots into the state that one process with all slots would have: every list
    in it has an entry per slot."""
    first = states[0]
    if isinstance(first, list):
        return [entry for state in states for entry in state]
    if isinstance(first, dict):
        return {key: join_slots([state[key] for state in states]) for key in first}
    return first


def own_slots(state: Any, slots: range) -> Any:
    """Return the part of a joint state that belongs to some of the slots, the inverse of `join_slots`."""
    if isinstance(state, list):
        return state[slots.start : slots.stop]
    if isinstance(state, dict):
        return {key: own_slots(value, slots) for key, value in state.items()}
    return state
