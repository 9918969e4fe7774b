"""Collector: moves observations to the policy and chunks of actions to the simulators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.config.schema import EnvConfig, Episodes, RolloutConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.engine.parallel import SINGLE_PROCESS, Ranks
from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.manager import EnvManager, StepResult
from embodyrl.models.policy import ActOutput
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.episodes import EpisodeSource, EpisodeTracker, FinishedEpisode, Rollout, gather_rollouts
from embodyrl.rollout.schedule import make_scheduler
from embodyrl.tracking.clock import Phase


class RolloutBuffer:
    """Columns `[K, B, ...]`, allocated when they are first written; what is never written stays zero.

    They are numpy arrays while they fill up, because writing a few numbers costs numpy a tenth of what it costs torch.

    Args:
        num_chunks: `K`. columns: `B`.
    """

    def __init__(self, chunks: int, columns: int) -> None:
        self._size = (chunks, columns)
        self._columns: dict[str, NDArray[Any]] = {}

    def write(self, rows: NDArray[np.int64], slots: NDArray[np.int64], values: Mapping[str, NDArray[Any]]) -> None:
        """Write several columns: row `rows[i]` of slot `slots[i]`; every value is `[len(slots), ...]`."""
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = np.zeros((*self._size, *value.shape[1:]), value.dtype)
            column[rows, slots] = value

    def columns(self, chunks: int) -> dict[str, Tensor]:
        """All columns as tensors, cut to the first `chunks` rows."""
        return {name: torch.from_numpy(column[:chunks]) for name, column in self._columns.items()}


@dataclass(kw_only=True)
class _Collected:
    """What a rollout has gathered so far."""

    buffer: RolloutBuffer
    decided: NDArray[np.int64]
    """Decisions taken in each column of the batch."""
    finished: list[tuple[int, FinishedEpisode]] = field(default_factory=list)
    """Episodes that ended, and in which decision."""
    env_steps: int = 0
    invalid: list[tuple[int, int]] = field(default_factory=list)
    """Column and number of the episodes that died with their simulator; nothing is learned from them."""
    cut_rows: list[int] = field(default_factory=list)
    """Decisions whose following observation the rollout does not decide on, so that the critic looks at it apart."""
    cut_columns: list[int] = field(default_factory=list)
    cut_observations: list[Observation] = field(default_factory=list)


class Collector:
    """Collects rollouts of `K` decisions in `B` slots: this rank's share of them, which `ranks` put together.

    Schedules: lockstep decides for all slots, then simulates all. pipeline has two halves of the slots take turns: one
    is simulated while the policy decides for the other. ready_batch decides for the slots that are ready. All of them
    take `K` decisions in every slot and play the same episodes.

    Episodes: continuous slots reset themselves and episodes span rollouts. With whole episodes every rollout is
    `episodes_per_slot` of them in every slot, each a column of the batch; a slot that finishes one begins the next at
    once, and when it has played all it is neither stepped nor inferred.

    Args:
        manager: the simulators.
        engine: decides.
        env, rollout: their config.
        critic: keep the critic's values in the batch.
        seed: the run's seed.
        ranks: those of the run, each with a collector for as many slots.
    """

    def __init__(
        self,
        manager: EnvManager,
        engine: HybridEngine,
        *,
        env: EnvConfig,
        rollout: RolloutConfig,
        critic: bool,
        seed: int,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        self.manager = manager
        self.engine = engine
        self.config = rollout
        self.critic = critic
        self.ranks = ranks
        self.clock = engine.clock
        self.task_descriptions = list(dict.fromkeys(manager.spec.tasks.values()))
        self._whole = rollout.episodes is Episodes.whole
        self._columns = manager.num_envs * rollout.episodes_per_slot
        """Columns of a batch: the first episodes of all slots, then their second ones, and so on."""
        self._index_of_description = {
            task_description: index for index, task_description in enumerate(self.task_descriptions)
        }
        self._source = EpisodeSource(
            tasks=env.tasks,
            start_states=env.start_states,
            group_size=rollout.group_size,
            seed=seed,
            first_slot=ranks.rank * manager.num_envs,
        )
        self._all = np.arange(manager.num_envs)
        self._scheduler = make_scheduler(manager, rollout)
        self._column = self._all.copy()
        """Which column each slot is filling."""
        self._numbers = np.full(manager.num_envs, -1, np.int64)
        self._tracker = EpisodeTracker(manager.num_envs)
        self._held: list[tuple[NDArray[np.int64], Observation]] = []
        """What the next rollout begins with: slots that are in an episode, and what they show, in memory of its own
        because the simulators may be lent in between."""
        self.surplus: TrajectoryBatch | None = None
        """Whole groups of slots that were collected and wait to be learned from."""

    @property
    def in_progress(self) -> bool:
        """Whether episodes go on in the simulators between rollouts."""
        return bool(self._held)

    def collect(self) -> Rollout:
        """Run the policy in training mode and return what happened, in the slots of all ranks."""
        with self.clock.measure(Phase.record):
            own = self._collect()
            with self.clock.measure(Phase.sync):
                return gather_rollouts(own, self.ranks, self.config.episodes_per_slot)

    def _collect(self) -> Rollout:
        collected = _Collected(
            buffer=RolloutBuffer(self.config.num_chunks, self._columns), decided=np.zeros(self._columns, np.int64)
        )
        self._column[:] = self._all
        with self.clock.measure(Phase.simulate, detail="onload"):
            self.manager.onload()
        observation = self._begin()
        for slots in self._scheduler.groups:
            self._decide_and_send(slots, observation.take(slots), collected)
        while (received := self._receive(collected)) is not None:
            if len(received[0]):
                self._decide_and_send(*received, collected)
        finished = sorted(collected.finished, key=lambda pair: (pair[0], pair[1].slot))
        return Rollout(
            batch=self._batch(collected), finished=[episode for _, episode in finished], env_steps=collected.env_steps
        )

    def give_up_episodes(self) -> None:
        """Begin new episodes with the next rollout; for a rollout that failed half way."""
        self._held = []

    def offload(self) -> int:
        """End the simulators' processes until the next rollout; returns the bytes of memory that this frees."""
        with self.clock.measure(Phase.simulate, detail="offload"):
            return self.manager.offload()

    def _begin(self) -> Observation:
        """Return what all slots show: the start of new episodes, or those in progress."""
        if self._held:
            order = np.argsort(np.concatenate([slots for slots, _ in self._held]))
            observation = Observation.concat([observation for _, observation in self._held]).take(order)
            self._held = []
            return observation
        self._numbers += 1
        episodes = [self._source.episode(slot, number) for slot, number in enumerate(self._numbers.tolist())]
        with self.clock.measure(Phase.simulate):
            observation = self.manager.reset(self._all, episodes)
        self._tracker.begin(self._all)
        return observation

    def _decide_and_send(self, slots: NDArray[np.int64], observation: Observation, collected: _Collected) -> None:
        """Decide for some slots, have them simulate, and note the decision meanwhile."""
        decision = self.engine.act(observation, "train")
        actions = decision.actions.cpu().numpy()
        with self.clock.measure(Phase.simulate):
            self.manager.send(slots, actions, self._following(slots))
        self._scheduler.sent(slots)
        columns = self._column[slots]
        collected.buffer.write(collected.decided[columns], columns, self._decided(slots, observation, decision))
        collected.decided[columns] += 1

    def _has_more(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each slot plays another episode in this rollout when its present one is over."""
        return np.full(len(slots), not self._whole) | (self._column[slots] + len(self._all) < self._columns)

    def _following(self, slots: NDArray[np.int64]) -> list[EpisodeSpec | None]:
        """Return what each slot plays next if its episode ends."""
        numbers = (self._numbers[slots] + 1).tolist()
        more = self._has_more(slots).tolist()
        return [
            self._source.episode(slot, number) if plays else None
            for slot, number, plays in zip(slots.tolist(), numbers, more, strict=True)
        ]

    def _receive(self, collected: _Collected) -> tuple[NDArray[np.int64], Observation] | None:
        """Wait for chunks and note what came of them; returns the slots that go on and what they show, or None if no
        chunk was under way."""
        with self.clock.measure(Phase.simulate):
            received = self._scheduler.receive()
        if received is None:
            return None
        slots, result = received
        columns = self._column[slots]
        rows, ended = collected.decided[columns] - 1, result.ended
        last = rows + 1 == self.config.num_chunks
        collected.buffer.write(rows, columns, _outcome(result))
        collected.finished += zip(rows[ended].tolist(), self._tracker.update(slots, result), strict=True)
        collected.env_steps += int(result.steps.sum())
        collected.invalid += zip(columns[result.lost].tolist(), self._numbers[slots[result.lost]].tolist(), strict=True)
        over = ended | result.lost
        cut = result.truncated | (last & ~over)
        if cut.any():
            collected.cut_rows += rows[cut].tolist()
            collected.cut_columns += columns[cut].tolist()
            collected.cut_observations.append(result.final_observation.take(cut))
        if self._whole:
            begins = over & self._has_more(slots)
            self._column[slots[begins]] += len(self._all)
            goes_on = begins | ~(last | over)
        else:
            begins, goes_on = over, ~last
            if last.any():
                self._held.append((slots[last], result.observation.take(last)))
        self._numbers[slots[begins]] += 1
        return slots[goes_on], result.observation if goes_on.all() else result.observation.take(goes_on)

    def _decided(
        self, slots: NDArray[np.int64], observation: Observation, decision: ActOutput
    ) -> dict[str, NDArray[Any]]:
        """Return what is known when a decision is taken, as columns `[len(slots), ...]`."""
        numbers = self._numbers[slots]
        episodes = [
            self._source.episode(slot, number) for slot, number in zip(slots.tolist(), numbers.tolist(), strict=True)
        ]
        columns: dict[str, NDArray[Any]] = {
            "task_index": np.array(
                [self._index_of_description[task_description] for task_description in observation.task_descriptions]
            ),
            "actions": decision.actions.cpu().numpy(),
            "logprobs": decision.logprobs.cpu().numpy(),
            "valid": np.ones(len(slots), np.bool_),
            "episode": numbers,
            "group": self._columns_of_the_run(slots) // self.config.group_size,
            "start_state": np.array([episode.start_state for episode in episodes]),
            "seed": np.array([episode.seed for episode in episodes]),
            "version": np.full(len(slots), self.engine.version),
        }
        if observation.proprio is not None:
            columns["proprio"] = observation.proprio
        if observation.images is not None:
            columns["images"] = observation.images
        if self.critic and decision.values is not None:
            columns["values"] = decision.values.cpu().numpy()
        return columns | {f"trace/{name}": value.cpu().numpy() for name, value in decision.trace.items()}

    def _columns_of_the_run(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which column of the batch of all ranks each slot is filling."""
        count = len(self._all)
        round_, slot = np.divmod(self._column[slots], count)
        return (round_ * self.ranks.size + self.ranks.rank) * count + slot

    def _batch(self, collected: _Collected) -> TrajectoryBatch:
        columns = collected.buffer.columns(int(collected.decided.max()))
        for column, number in collected.invalid:
            columns["valid"][:, column] &= columns["episode"][:, column] != number
        trace = {name.removeprefix("trace/"): columns.pop(name) for name in list(columns) if name.startswith("trace/")}
        if "values" in columns:
            columns["next_values"] = self._next_values(columns, collected)
        return TrajectoryBatch(columns | {"trace": trace}, self.task_descriptions)

    def _next_values(self, columns: dict[str, Tensor], collected: _Collected) -> Tensor:
        """Critic's value of the observation that followed each decision, before any reset; 0 after a termination."""
        following = torch.zeros_like(columns["values"])
        following[:-1] = columns["values"][1:]
        following[columns["terminated"]] = 0.0
        if collected.cut_rows:
            following[collected.cut_rows, collected.cut_columns] = self._values(
                Observation.concat(collected.cut_observations)
            )
        return following

    def _values(self, observation: Observation) -> Tensor:
        """Critic's values `[M]`; it looks at as many observations at once as there are slots, so that this takes no
        more memory than deciding."""
        count, most = len(observation.task_descriptions), self.manager.num_envs
        pieces = []
        for start in range(0, count, most):
            values = self.engine.act(observation.take(np.arange(start, min(start + most, count))), "eval").values
            assert values is not None, "the same policy gave values in the rollout"
            pieces.append(values.cpu())
        return torch.cat(pieces)

    def state_dict(self) -> dict[str, Any]:
        """Episode numbers and totals of the episodes in progress (the simulators' own states are the manager's)."""
        return {
            "numbers": self._numbers.tolist(),
            "in_progress": self.in_progress,
            "tracker": self._tracker.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the manager's slots must have been restored before."""
        self._numbers[:] = state["numbers"]
        self._tracker.load_state_dict(state["tracker"])
        self._held = [(self._all, self.manager.observe(self._all).take(self._all))] if state["in_progress"] else []


def _outcome(result: StepResult) -> dict[str, NDArray[Any]]:
    """Return what became of decisions, as columns `[len(slots), ...]`."""
    columns = {
        "rewards": result.rewards,
        "success": result.success,
        "terminated": result.terminated,
        "truncated": result.truncated,
        "steps": result.steps.astype(np.int64),
    }
    kept = {"step_images": result.step_images, "step_proprio": result.step_proprio}
    return columns | {name: array for name, array in kept.items() if array is not None}
