"""Record episodes of a demonstrator.

The numbers of episodes do not depend on the slots, and episodes are returned in the order of their numbers. So the
demonstrations do not depend on `env.num_envs` and `env.workers`, for demonstrators that choose the actions of each
slot independently.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.schema import EnvConfig
from embodyrl.data.experts import Demonstrator, actions_by
from embodyrl.data.layout import DatasetSpec, Episode, Images
from embodyrl.envs import EpisodeSpec, Observation
from embodyrl.envs.manager import Simulators
from embodyrl.envs.perturb.kinds import drawn_perturbation
from embodyrl.seeding import derive_seed

LONGEST_PUSH = 3
"""Maximum steps of a push."""


def demonstration_episodes(env: EnvConfig, seed: int) -> list[EpisodeSpec]:
    """Return all episodes that may be recorded: tasks in turn, each from the training start states 0, 1, ...;
    perturbed as `env.perturb` says, with the levels at the end of its `ramp`."""
    return [
        EpisodeSpec(
            task=task,
            start_state=state,
            seed=derive_seed(seed, "demonstrations", number),
            group=number,
            perturb=drawn_perturbation(env.perturb, derive_seed(seed, "demonstrations/perturb", number)),
        )
        for number, (state, task) in enumerate((state, task) for state in range(env.start_states) for task in env.tasks)
    ]


def dataset_spec(
    env: EnvConfig, manager: Simulators, demonstrator: Demonstrator, *, images: Images, perturbed: bool
) -> DatasetSpec:
    """Return the features of a recording's frames."""
    spec = manager.spec
    shown = Observation(proprio=np.zeros((1, spec.proprio_dim), np.float32), task_descriptions=[""])
    state = demonstrator.recorded(shown).proprio if spec.proprio_dim else None
    names = [
        each.name if len(each.low) == 1 else f"{each.name}_{index}"
        for each in spec.actions
        for index in range(len(each.low))
    ]
    return DatasetSpec(
        action_names=tuple(names),
        state_dim=0 if state is None else state.shape[1],
        cameras=spec.cameras,
        image_size=spec.image_size,
        fps=max(1, round(spec.control_frequency)),
        robot=env.name,
        images=images,
        outcome=True,
        perturbed=perturbed,
        executed=perturbed,
        ends=True,
    )


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A recorded episode."""

    number: int
    episode: Episode
    success: bool
    """Whether the task was solved at least once."""


class Recorder:
    """Records episodes.

    Args:
        manager: simulators of `demonstrator.env`, with chunks of one action.
        demonstrator: chooses the actions.
        pushes: mean number per episode of random actions that interfere: the first at its start, others at random
            steps in the first half of the time limit. Each is executed for up to `LONGEST_PUSH` steps; the action of
            the demonstrator is recorded instead.
        after_success: actions that are recorded after the first that solved the task.
        seed: seed of the pushes.
    """

    def __init__(
        self, manager: Simulators, demonstrator: Demonstrator, *, pushes: float, after_success: int, seed: int
    ) -> None:
        self._manager = manager
        self._demonstrator = demonstrator
        self._pushes = pushes
        self._after_success = after_success
        self._seed = seed

    def record(self, episodes: Sequence[EpisodeSpec]) -> Generator[Attempt, None, None]:
        """Play episodes, as many at once as there are slots, and yield them in their order; closing the generator
        stops."""
        slots = np.arange(min(self._manager.num_envs, len(episodes)))
        takes = {slot: self._begin(slot, slot, episodes[slot]) for slot in slots.tolist()}
        observation = self._manager.reset(slots, list(episodes[: len(slots)]))
        following, coming = len(slots), 0
        finished: dict[int, Attempt] = {}
        while len(slots):
            observation, over = self._step(slots, observation, [takes[slot] for slot in slots.tolist()])
            again = []
            for slot in slots[over].tolist():
                number = takes[slot].number
                if not takes[slot].lost:
                    finished[number] = takes[slot].attempt(marked=self._pushes > 0)
                    number, following = following, following + 1
                if number < len(episodes):
                    takes[slot] = self._begin(slot, number, episodes[number])
                    again.append(slot)
                else:
                    del takes[slot]
            while coming in finished:
                yield finished.pop(coming)
                coming += 1
            if again:
                self._manager.reset(again, [episodes[takes[slot].number] for slot in again])
            slots = np.array(sorted(takes), np.int64)
            if over.any() and len(slots):
                observation = self._manager.observe(slots)

    def _begin(self, slot: int, number: int, episode: EpisodeSpec) -> _Take:
        self._demonstrator.begin(slot, episode)
        rng = np.random.default_rng(derive_seed(self._seed, "pushes", number))
        return _Take(number=number, pushed=self._plan_pushes(rng))

    def _plan_pushes(self, rng: np.random.Generator) -> dict[int, NDArray[np.float32]]:
        """Return the random actions of an episode by step."""
        spec = self._manager.spec
        times = int(self._pushes) + int(rng.random() < self._pushes % 1.0)
        action = rng.uniform(spec.action_low, spec.action_high).astype(np.float32)
        moments = [0, *rng.integers(1, max(2, spec.max_episode_steps // 2), max(times - 1, 0)).tolist()][:times]
        lengths = rng.integers(0, LONGEST_PUSH + 1, times).tolist()
        return {
            moment + step: action for moment, length in zip(moments, lengths, strict=True) for step in range(length)
        }

    def _step(
        self, slots: NDArray[np.int64], observation: Observation, takes: list[_Take]
    ) -> tuple[Observation, NDArray[np.bool_]]:
        """Execute one action in these slots; return the next observation, and a mask of episodes that are over."""
        spec = self._manager.spec
        wanted = actions_by(self._demonstrator, slots, observation, spec.action_dim).clip(
            spec.action_low, spec.action_high
        )
        pushes = [take.pushed.get(len(take.actions)) for take in takes]
        executed = np.stack([mine if push is None else push for mine, push in zip(wanted, pushes, strict=True)])
        shown = self._demonstrator.recorded(observation)
        for row, take in enumerate(takes):
            take.see(shown, row)
        result = self._manager.step(slots, executed[:, None])
        for row, take in enumerate(takes):
            take.actions.append(wanted[row])
            take.executed.append(executed[row])
            take.perturbed.append(pushes[row] is not None)
            take.rewards.append(float(result.rewards[row, 0]))
            take.success.append(bool(result.success[row, 0]))
            take.lost = bool(result.lost[row])
        enough = np.array([take.steps_since_success > self._after_success for take in takes])
        over = result.ended | result.lost | enough
        last = self._demonstrator.recorded(result.final_observation)
        for row in np.flatnonzero(over).tolist():
            takes[row].see_last(last, row)
            takes[row].terminated = bool(result.terminated[row])
        return result.observation, over


@dataclass(kw_only=True)
class _Take:
    """An episode that is being recorded."""

    number: int
    pushed: dict[int, NDArray[np.float32]]
    """Random actions by step."""
    task_description: str = ""
    images: list[NDArray[np.uint8]] = field(default_factory=list)
    proprio: list[NDArray[np.float32]] = field(default_factory=list)
    actions: list[NDArray[np.float32]] = field(default_factory=list)
    executed: list[NDArray[np.float32]] = field(default_factory=list)
    perturbed: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    success: list[bool] = field(default_factory=list)
    last_images: NDArray[np.uint8] | None = None
    last_proprio: NDArray[np.float32] | None = None
    terminated: bool = False
    lost: bool = False
    """The simulator process died; the episode is played again."""

    def see(self, observation: Observation, row: int) -> None:
        """Copy the observation, because the simulator reuses its memory for later images."""
        self.task_description = observation.task_descriptions[row]
        if observation.images is not None:
            self.images.append(observation.images[row].copy())
        if observation.proprio is not None:
            self.proprio.append(observation.proprio[row].copy())

    def see_last(self, observation: Observation, row: int) -> None:
        """Copy the observation after the last action."""
        if observation.images is not None:
            self.last_images = observation.images[row].copy()
        if observation.proprio is not None:
            self.last_proprio = observation.proprio[row].copy()

    @property
    def steps_since_success(self) -> int:
        """Actions since the task was first solved, including that one; 0 before."""
        return len(self.success) - self.success.index(True) if True in self.success else 0

    def attempt(self, *, marked: bool) -> Attempt:
        """Return the recorded episode; if `marked`, with the steps of pushes."""
        return Attempt(
            number=self.number,
            success=any(self.success),
            episode=Episode(
                task=self.task_description,
                actions=np.stack(self.actions),
                proprio=np.stack(self.proprio) if self.proprio else None,
                images=np.stack(self.images) if self.images else None,
                rewards=np.array(self.rewards, np.float32),
                success=np.array(self.success, np.bool_),
                perturbed=np.array(self.perturbed, np.bool_) if marked else None,
                executed=np.stack(self.executed) if marked else None,
                last_proprio=self.last_proprio,
                last_images=self.last_images,
                terminated=self.terminated,
            ),
        )
