"""Collector: moves observations to the policy and chunks of actions to the simulators, in lockstep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.config.schema import EnvConfig, Episodes, RolloutConfig
from embodyrl.engine.hybrid import HybridEngine
from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.manager import EnvManager, StepResult
from embodyrl.models.policy import ActOutput
from embodyrl.rollout.batch import TrajectoryBatch
from embodyrl.rollout.buffer import RolloutBuffer
from embodyrl.rollout.clock import Clock
from embodyrl.rollout.episodes import EpisodeSource, EpisodeTracker, FinishedEpisode


@dataclass(kw_only=True)
class Rollout:
    """What a collection gave."""

    batch: TrajectoryBatch
    finished: list[FinishedEpisode]
    """Episodes that ended, in order of time, then slot."""
    env_steps: int
    """Control steps executed."""


@dataclass(kw_only=True)
class _Cut:
    """Decisions whose following observation the rollout does not decide on, so that the critic must look at it
    apart."""

    rows: list[int]
    slots: list[int]
    observations: list[Observation]


class Collector:
    """Collects rollouts of `K` decisions in `B` slots.

    continuous: every slot resets itself and episodes span rollouts. whole: every rollout is one whole episode per slot;
    finished slots are neither stepped nor inferred.

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
        self._sentence_index = {sentence: index for index, sentence in enumerate(self.sentences)}
        self._source = EpisodeSource(
            tasks=env.tasks, start_states=env.start_states, group_size=rollout.group_size, seed=seed
        )
        self._all = np.arange(manager.num_envs)
        self._numbers = np.full(manager.num_envs, -1, np.int64)
        self._tracker = EpisodeTracker(manager.num_envs)
        self._observation: Observation | None = None

    @property
    def in_progress(self) -> bool:
        """Whether episodes go on in the simulators between rollouts."""
        return self._observation is not None

    def collect(self) -> Rollout:
        """Run the policy in training mode and return what happened."""
        whole = self.config.episodes is Episodes.whole
        slots, observation = self._begin(whole)
        buffer = RolloutBuffer(self.config.chunks, self.manager.num_envs)
        finished: list[FinishedEpisode] = []
        cut = _Cut(rows=[], slots=[], observations=[])
        env_steps = chunks = 0
        for k in range(self.config.chunks):
            decision = self._decide(observation)
            result = self._simulate(slots, decision, whole)
            buffer.write(k, slots, self._row(slots, observation, decision, result))
            finished += self._tracker.update(slots, result)
            env_steps += int(result.steps.sum())
            chunks = k + 1
            self._note_cut(cut, k, slots, result, last=chunks == self.config.chunks)
            if whole:
                slots, observation = slots[~result.ended], take(result.observation, ~result.ended)
            else:
                self._numbers[slots[result.ended]] += 1
                observation = result.observation
            if not len(slots):
                break
        self._observation = None if whole else observation
        batch = self._batch(buffer.columns(chunks), cut)
        return Rollout(batch=batch, finished=finished, env_steps=env_steps)

    def _begin(self, whole: bool) -> tuple[NDArray[np.int64], Observation]:
        """All slots, with the observations to decide on: new episodes, or those in progress."""
        if self._observation is None or whole:
            self._numbers += 1
            episodes = [self._source.episode(slot, number) for slot, number in enumerate(self._numbers.tolist())]
            with self.clock.measure("simulate"):
                self._observation = self.manager.reset(self._all, episodes)
            self._tracker.begin(self._all)
        return self._all, self._observation

    def _decide(self, observation: Observation) -> ActOutput:
        with self.clock.measure("infer"):
            return self.engine.act(observation, "train")

    def _simulate(self, slots: NDArray[np.int64], decision: ActOutput, whole: bool) -> StepResult:
        following: list[EpisodeSpec | None]
        if whole:
            following = [None] * len(slots)
        else:
            numbers = (self._numbers[slots] + 1).tolist()
            following = [
                self._source.episode(slot, number) for slot, number in zip(slots.tolist(), numbers, strict=True)
            ]
        with self.clock.measure("simulate"):
            return self.manager.step(slots, decision.actions.cpu().numpy(), following)

    def _row(
        self, slots: NDArray[np.int64], observation: Observation, decision: ActOutput, result: StepResult
    ) -> dict[str, Tensor | NDArray[Any]]:
        """One decision per slot, as columns `[len(slots), ...]`."""
        row: dict[str, Tensor | NDArray[Any]] = {
            "task": np.array([self._sentence_index[sentence] for sentence in observation.tasks]),
            "actions": decision.actions,
            "logprobs": decision.logprobs,
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
            row["values"] = decision.values
        return row | {f"trace/{name}": value for name, value in decision.trace.items()}

    def _note_cut(self, cut: _Cut, k: int, slots: NDArray[np.int64], result: StepResult, last: bool) -> None:
        """Remember the observations after truncation and after the last decision; the critic looks at them at the
        end."""
        needed = result.truncated | (last & ~result.ended)
        if needed.any():
            cut.rows += [k] * int(needed.sum())
            cut.slots += slots[needed].tolist()
            cut.observations.append(take(result.final_observation, needed))

    def _batch(self, columns: dict[str, Tensor], cut: _Cut) -> TrajectoryBatch:
        trace = {name.removeprefix("trace/"): columns.pop(name) for name in list(columns) if name.startswith("trace/")}
        if "values" in columns:
            columns["next_values"] = self._next_values(columns, cut)
        return TrajectoryBatch(columns | {"trace": trace}, self.sentences)

    def _next_values(self, columns: dict[str, Tensor], cut: _Cut) -> Tensor:
        """Critic's value of the observation that followed each decision, before any reset; 0 after a termination."""
        following = torch.zeros_like(columns["values"])
        following[:-1] = columns["values"][1:]
        following[columns["terminated"]] = 0.0
        if cut.rows:
            with self.clock.measure("infer"):
                values = self.engine.act(concatenate(cut.observations), "eval").values
            assert values is not None, "the same policy gave values in the rollout"
            following[cut.rows, cut.slots] = values.cpu()
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
        self._observation = self.manager.observe(self._all) if state["in_progress"] else None


def take(observation: Observation, chosen: NDArray[np.bool_]) -> Observation:
    """The rows of an observation where `chosen [B]` is True."""
    return Observation(
        images=None if observation.images is None else observation.images[chosen],
        proprio=None if observation.proprio is None else observation.proprio[chosen],
        tasks=[task for task, keep in zip(observation.tasks, chosen, strict=True) if keep],
    )


def concatenate(observations: list[Observation]) -> Observation:
    """Observations one after the other."""
    images = [each.images for each in observations if each.images is not None]
    proprio = [each.proprio for each in observations if each.proprio is not None]
    return Observation(
        images=np.concatenate(images) if images else None,
        proprio=np.concatenate(proprio) if proprio else None,
        tasks=[task for each in observations for task in each.tasks],
    )
