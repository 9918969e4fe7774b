"""Collector: moves observations to the policy and chunks of actions to the simulators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.config.schema import EnvConfig, Episodes, RolloutConfig, Schedule
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.manager import EnvManager, StepResult
from embodyrl.models.policy import ActOutput
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.buffer import RolloutBuffer
from embodyrl.rollout.clock import Clock
from embodyrl.rollout.episodes import EpisodeSource, EpisodeTracker, FinishedEpisode

STAGES = {Schedule.lockstep: 1, Schedule.pipeline: 2}


@dataclass(kw_only=True)
class Rollout:
    """What a collection gave."""

    batch: TrajectoryBatch
    finished: list[FinishedEpisode]
    """Episodes that ended, in order of time, then slot."""
    env_steps: int
    """Control steps executed."""


@dataclass(kw_only=True)
class Stage:
    """Slots that are decided on and simulated together, while other stages are at the other of the two."""

    slots: NDArray[np.int64]
    observation: Observation
    """What these slots show now; to be decided on, or decided on already while a chunk is under way."""
    decision: ActOutput | None = None
    """What is being executed."""


@dataclass(kw_only=True)
class _Harvest:
    """What a rollout has gathered so far."""

    buffer: RolloutBuffer
    finished: list[FinishedEpisode] = field(default_factory=list)
    env_steps: int = 0
    chunks: int = 0
    cut_rows: list[int] = field(default_factory=list)
    """Decisions whose following observation the rollout does not decide on, so that the critic looks at it apart."""
    cut_slots: list[int] = field(default_factory=list)
    cut_observations: list[Observation] = field(default_factory=list)


class Collector:
    """Collects rollouts of `K` decisions in `B` slots.

    Schedules: lockstep decides for all slots, then simulates all. pipeline has two halves of the slots take turns: one
    is simulated while the policy decides for the other. Both play the same episodes.

    Episodes: continuous slots reset themselves and episodes span rollouts. With whole episodes every rollout is one
    episode per slot; finished slots are neither stepped nor inferred.

    Args:
        manager: the simulators.
        engine: decides.
        env, rollout: their config.
        critic: keep the critic's values in the batch.
        seed: the run's seed.
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
    ) -> None:
        self.manager = manager
        self.engine = engine
        self.config = rollout
        self.critic = critic
        self.clock = Clock()
        self.sentences = list(dict.fromkeys(manager.spec.tasks.values()))
        self._whole = rollout.episodes is Episodes.whole
        self._sentence_index = {sentence: index for index, sentence in enumerate(self.sentences)}
        self._source = EpisodeSource(
            tasks=env.tasks, start_states=env.start_states, group_size=rollout.group_size, seed=seed
        )
        self._all = np.arange(manager.num_envs)
        self._halves = np.array_split(self._all, min(STAGES[rollout.schedule], manager.num_envs))
        self._numbers = np.full(manager.num_envs, -1, np.int64)
        self._tracker = EpisodeTracker(manager.num_envs)
        self._stages: list[Stage] = []
        self.surplus: TrajectoryBatch | None = None
        """Whole groups of slots that were collected and wait to be learned from."""

    @property
    def in_progress(self) -> bool:
        """Whether episodes go on in the simulators between rollouts."""
        return bool(self._stages)

    def collect(self) -> Rollout:
        """Run the policy in training mode and return what happened."""
        harvest = _Harvest(buffer=RolloutBuffer(self.config.chunks, self.manager.num_envs))
        running = self._begin()
        for stage in running:
            self._decide_and_send(stage)
        for k in range(self.config.chunks):
            last = k + 1 == self.config.chunks
            for stage in running:
                self._receive(stage, harvest, k, last)
                if len(stage.slots) and not last:
                    self._decide_and_send(stage)
            harvest.chunks = k + 1
            running = [stage for stage in running if len(stage.slots)]
            if not running:
                break
        if self._whole:
            self._stages = []
        for stage in self._stages:
            # The simulators may be lent before the next rollout, and their pictures do not outlive that.
            stage.observation = copied(stage.observation)
        return Rollout(batch=self._batch(harvest), finished=harvest.finished, env_steps=harvest.env_steps)

    def _begin(self) -> list[Stage]:
        """The stages, with the observations to decide on: of new episodes, or of those in progress."""
        if self._whole or not self._stages:
            self._numbers += 1
            episodes = [self._source.episode(slot, number) for slot, number in enumerate(self._numbers.tolist())]
            with self.clock.measure("simulate"):
                observation = self.manager.reset(self._all, episodes)
            self._tracker.begin(self._all)
            self._stages = self._split(observation)
        return list(self._stages)

    def _split(self, observation: Observation) -> list[Stage]:
        """An observation of all slots, by stage."""
        return [Stage(slots=half, observation=take(observation, half)) for half in self._halves]

    def _decide_and_send(self, stage: Stage) -> None:
        """Decide for the slots of a stage and have them simulate."""
        with self.clock.measure("infer"):
            stage.decision = self.engine.act(stage.observation, "train")
            actions = stage.decision.actions.cpu().numpy()
        with self.clock.measure("simulate"):
            self.manager.send(stage.slots, actions, None if self._whole else self._following(stage.slots))

    def _following(self, slots: NDArray[np.int64]) -> list[EpisodeSpec]:
        """What each slot plays next if its episode ends."""
        numbers = (self._numbers[slots] + 1).tolist()
        return [self._source.episode(slot, number) for slot, number in zip(slots.tolist(), numbers, strict=True)]

    def _receive(self, stage: Stage, harvest: _Harvest, k: int, last: bool) -> None:
        """Wait for a stage's chunks, note decision `k` and what came of it, and move on to the next observation."""
        with self.clock.measure("simulate"):
            result = self.manager.receive(stage.slots)
        harvest.buffer.write(k, stage.slots, self._row(stage, result))
        harvest.finished += self._tracker.update(stage.slots, result)
        harvest.env_steps += int(result.steps.sum())
        cut = result.truncated | (last & ~result.ended)
        if cut.any():
            harvest.cut_rows += [k] * int(cut.sum())
            harvest.cut_slots += stage.slots[cut].tolist()
            harvest.cut_observations.append(take(result.final_observation, cut))
        stage.observation = result.observation
        if not result.ended.any():
            return
        if self._whole:
            stage.slots, stage.observation = stage.slots[~result.ended], take(result.observation, ~result.ended)
        else:
            self._numbers[stage.slots[result.ended]] += 1

    def _row(self, stage: Stage, result: StepResult) -> dict[str, NDArray[Any]]:
        """One decision per slot of a stage, as columns `[len(slots), ...]`."""
        slots, observation, decision = stage.slots, stage.observation, stage.decision
        assert decision is not None, "received without a decision"
        row: dict[str, NDArray[Any]] = {
            "task": np.array([self._sentence_index[sentence] for sentence in observation.tasks]),
            "actions": decision.actions.cpu().numpy(),
            "logprobs": decision.logprobs.cpu().numpy(),
            "rewards": result.rewards,
            "success": result.success,
            "terminated": result.terminated,
            "truncated": result.truncated,
            "steps": result.steps.astype(np.int64),
            "valid": np.ones(len(slots), np.bool_),
            "episode": self._numbers[slots],
            "group": slots // self.config.group_size,
            "version": np.full(len(slots), self.engine.version),
        }
        if observation.proprio is not None:
            row["proprio"] = observation.proprio
        if observation.images is not None:
            row["images"] = observation.images
        if self.critic and decision.values is not None:
            row["values"] = decision.values.cpu().numpy()
        return row | {f"trace/{name}": value.cpu().numpy() for name, value in decision.trace.items()}

    def _batch(self, harvest: _Harvest) -> TrajectoryBatch:
        columns = harvest.buffer.columns(harvest.chunks)
        trace = {name.removeprefix("trace/"): columns.pop(name) for name in list(columns) if name.startswith("trace/")}
        if "values" in columns:
            columns["next_values"] = self._next_values(columns, harvest)
        return TrajectoryBatch(columns | {"trace": trace}, self.sentences)

    def _next_values(self, columns: dict[str, Tensor], harvest: _Harvest) -> Tensor:
        """Critic's value of the observation that followed each decision, before any reset; 0 after a termination."""
        following = torch.zeros_like(columns["values"])
        following[:-1] = columns["values"][1:]
        following[columns["terminated"]] = 0.0
        if harvest.cut_rows:
            with self.clock.measure("infer"):
                values = self.engine.act(concatenate(harvest.cut_observations), "eval").values
            assert values is not None, "the same policy gave values in the rollout"
            following[harvest.cut_rows, harvest.cut_slots] = values.cpu()
        return following

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
        self._stages = self._split(self.manager.observe(self._all)) if state["in_progress"] else []


def take(observation: Observation, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Observation:
    """Some rows of an observation: where `chosen [B]` is True, or those with these numbers."""
    numbers = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
    return Observation(
        images=None if observation.images is None else observation.images[numbers],
        proprio=None if observation.proprio is None else observation.proprio[numbers],
        tasks=[observation.tasks[number] for number in numbers],
    )


def copied(observation: Observation) -> Observation:
    """The same in memory of its own."""
    return take(observation, np.arange(len(observation.tasks)))


def concatenate(observations: list[Observation]) -> Observation:
    """Observations one after the other."""
    images = [each.images for each in observations if each.images is not None]
    proprio = [each.proprio for each in observations if each.proprio is not None]
    return Observation(
        images=np.concatenate(images) if images else None,
        proprio=np.concatenate(proprio) if proprio else None,
        tasks=[task for each in observations for task in each.tasks],
    )
