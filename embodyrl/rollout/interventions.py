"""An expert beside the policy: what it would do, and the decisions that it takes over.

Simulators then show what the expert needs to see, and policies see the part of it that the config names.

Shapes: `B` slots, `C` actions in a chunk, `D` action dims, `S` proprio dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodyrl.config.replay import InterveneConfig, Labelled
from embodyrl.config.schema import Config
from embodyrl.data.experts import Demonstrator, Remembering, actions_by, scripted_expert
from embodyrl.envs import EpisodeSpec, Observation, SimulatorSpec
from embodyrl.errors import RunError
from embodyrl.rollout.hooks import Decision, Hook
from embodyrl.seeding import derive_seed

if TYPE_CHECKING:  # simulators start while torch is imported
    from embodyrl.envs.manager import Simulators, StepResult
    from embodyrl.rollout.episodes import EpisodeTracker


class Source(IntEnum):
    """Who has made a decision: the column `source`."""

    policy = 0
    expert = 1
    random = 2


class ExpertError(RunError):
    """Raised when an expert chooses an action that cannot be executed."""


def expert_of(config: Config) -> Demonstrator | None:
    """Return the expert who acts beside the policy of a run; None without one.

    Raises:
        UnknownNameError, MissingPackageError: see `scripted_expert`.
    """
    settings = config.algorithm.needs(config).expert
    return None if settings is None else scripted_expert(config.env, settings.expert)


class Interventions(Hook):
    """Asks an expert about the decisions of a process's slots.

    Which decisions the expert takes over depends on the episode and on the seed alone, not on schedules or on the
    number of processes.

    Args:
        expert: acts one control step at a time, so that chunks have a single action.
        settings: when it takes over, and which decisions are labelled.
        spec: of the simulators.
        episode: returns the episode of a slot with a number.
        num_envs: slots of this process.
        first_slot: number in the run of this process's slot 0.
        seed: the run's seed.
    """

    state_name = "experts"

    def __init__(
        self,
        expert: Demonstrator,
        settings: InterveneConfig,
        *,
        spec: SimulatorSpec,
        episode: Callable[[int, int], EpisodeSpec],
        num_envs: int,
        first_slot: int,
        seed: int,
    ) -> None:
        self._expert, self._settings, self._spec = expert, settings, spec
        self._episode, self._first_slot, self._seed = episode, first_slot, seed
        self._begun = np.full(num_envs, -1, np.int64)
        """Number of the episode that the expert follows in each slot."""
        self._draws = np.zeros((num_envs, spec.max_episode_steps))
        """A number in 0 .. 1 for each control step of these episodes."""

    def decide(self, decision: Decision) -> dict[str, NDArray[Any]]:
        """Return what is executed in place of the policy's actions, as columns `[B, ...]`: `actions`, and `source`,
        `labels` and `labelled`.

        Raises:
            ExpertError: the expert chooses an action that is not finite.
        """
        slots, observation, actions = decision.slots, decision.observation, decision.actions
        self._follow(slots, decision.numbers)
        takes = self._takes(slots, decision.tracker)
        asked = takes | (self._settings.labels is Labelled.every)
        labels = np.zeros_like(actions)
        if asked.any():
            seen = observation.take(asked)
            labels[asked, 0] = self._wanted(slots[asked], replace(seen, proprio=seen.privileged))
        source = np.where(takes, Source.expert, Source.random if decision.random else Source.policy)
        return {
            "actions": np.where(takes[:, None, None], labels, actions),
            "source": source.astype(np.uint8),
            "labels": labels,
            "labelled": asked,
        }

    def _wanted(self, slots: NDArray[np.int64], observation: Observation) -> NDArray[np.float32]:
        """Return the expert's actions `[B, D]`, within the simulator's range."""
        wanted = actions_by(self._expert, slots, observation, self._spec.action_dim)
        if not np.isfinite(wanted).all():
            slot = int(slots[np.flatnonzero(~np.isfinite(wanted).all(1))[0]])
            raise ExpertError(
                f"the expert of simulator {self._expert.env.name!r} chose an action that is not finite in env "
                f"{self._first_slot + slot}: it cannot play this task from there; fix it, or set "
                "algorithm.off_policy.intervene to null"
            )
        return np.asarray(wanted.clip(self._spec.action_low, self._spec.action_high), np.float32)

    def _follow(self, slots: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Tell the expert of the episodes that have begun."""
        for slot, number in zip(slots.tolist(), numbers.tolist(), strict=True):
            if self._begun[slot] != number:
                self._expert.begin(slot, self._episode(slot, number))
                drawn = derive_seed(self._seed, "intervene", self._first_slot + slot, number)
                self._draws[slot] = np.random.default_rng(drawn).random(self._spec.max_episode_steps)
                self._begun[slot] = number

    def _takes(self, slots: NDArray[np.int64], tracker: EpisodeTracker) -> NDArray[np.bool_]:
        """Return the slots `[B]` in which the expert executes the present decision."""
        steps, solved = tracker.progress(slots)
        takes: NDArray[np.bool_] = self._draws[slots, steps] < self._settings.share
        if self._settings.after is not None:
            takes |= (steps >= self._settings.after) & ~solved
        return takes

    # ---- checkpoints

    def state(self, numbers: NDArray[np.int64]) -> list[str]:
        """Return what the expert remembers of the episodes with these numbers `[B]`, one in each slot; "" where it
        remembers nothing, or does not know of the episode yet."""
        return [
            self._expert.memory(slot) if known and isinstance(self._expert, Remembering) else ""
            for slot, known in enumerate(((self._begun == numbers) & (numbers >= 0)).tolist())
        ]

    def restore(self, numbers: NDArray[np.int64], state: Sequence[str]) -> None:
        """Continue the episodes with these numbers `[B]`, one in each slot, from `state`."""
        self._follow(np.arange(len(self._begun)), numbers)
        for slot, memory in enumerate(state):
            if memory and isinstance(self._expert, Remembering):
                self._expert.remember(slot, memory)


def shown_to_policy(simulators: Simulators, expert: Demonstrator) -> Simulators:
    """Return simulators of `expert.env` that show what the user's config names; their observations keep the state that
    the expert sees as `privileged`."""
    return cast("Simulators", _Shown(simulators, expert))


class _Shown:
    """See `shown_to_policy`; whatever is not here is that of the simulators."""

    def __init__(self, simulators: Simulators, expert: Demonstrator) -> None:
        self._simulators, self._expert = simulators, expert
        state = self._state(np.zeros((1, simulators.spec.proprio_dim), np.float32))
        self.spec = replace(simulators.spec, proprio_dim=state.shape[1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._simulators, name)

    def reset(self, slots: Any, episodes: Sequence[EpisodeSpec]) -> Observation:
        return self._observation(self._simulators.reset(slots, episodes))

    def observe(self, slots: Any) -> Observation:
        return self._observation(self._simulators.observe(slots))

    def step(
        self, slots: Any, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> StepResult:
        return self._result(self._simulators.step(slots, actions, next_episodes))

    def receive(self, slots: Any) -> StepResult:
        return self._result(self._simulators.receive(slots))

    def receive_ready(self, at_least: int) -> tuple[NDArray[np.int64], StepResult]:
        slots, result = self._simulators.receive_ready(at_least)
        return slots, self._result(result)

    def step_recorded(
        self, slots: Any, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> tuple[StepResult, list[NDArray[np.uint8]]]:
        result, images = self._simulators.step_recorded(slots, actions, next_episodes)
        return self._result(result), images

    def _result(self, result: StepResult) -> StepResult:
        observation, kept = self._observation(result.observation), result.step_proprio
        is_same = result.final_observation is result.observation
        return replace(
            result,
            observation=observation,
            final_observation=observation if is_same else self._observation(result.final_observation),
            step_proprio=None if kept is None else np.stack([self._state(states) for states in kept]),
        )

    def _observation(self, observation: Observation) -> Observation:
        return replace(self._expert.recorded(observation), privileged=observation.proprio)

    def _state(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the part `[M, S]` of states that the policy sees."""
        if not states.shape[1]:
            return states
        shown = self._expert.recorded(Observation(proprio=states, task_descriptions=[""] * len(states))).proprio
        return states[:, :0] if shown is None else shown
