"""ManiSkill as one batch: all slots of a process are scenes of one environment, which steps them together.

That is how PhysX works on a GPU. A slot that is not asked to step, or whose episode has ended, cannot be left out of a
step: it is put back afterwards. So a slot does not depend on what others do, except in the last digits: putting scenes
back and starting episodes makes PhysX forget what it remembers of contacts, in all scenes.

Shapes: `N` slots of the process, `B` slots of a call, `C` actions in a chunk, `D` action dims, `S` proprio dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs import drawing
from embodyrl.envs.base import (
    EpisodeOverError,
    NotFiniteError,
    RenderError,
    SimulatorError,
    StateError,
    check_actions,
    check_episodes,
    check_slots,
    check_task_list,
    check_tasks,
    not_steppable,
)
from embodyrl.envs.maniskill import loading
from embodyrl.envs.maniskill.scenes import ManiSkillScenes, Scenes
from embodyrl.envs.maniskill.slots import specification
from embodyrl.envs.options import ManiSkillConfig
from embodyrl.envs.states import pack, unpack
from embodyrl.envs.types import ChunkResult, EpisodeSpec, Observation, nothing_executed
from embodyrl.errors import UserError

Build = Callable[[str, ManiSkillConfig, int], Scenes]


class ManiSkillBatch:
    """A `Simulator` whose slots are scenes of one environment. States are snapshots of poses, velocities and controller
    targets; what goes on from one is close to what would have followed, not equal to the last digit.

    Raises:
        UserError: the task, a camera or an option does not exist, there are several tasks, or something is missing.
    """

    def __init__(self, config: ManiSkillConfig, num_slots: int, build: Build = ManiSkillScenes) -> None:
        check_task_list(config.tasks, "maniskill")
        check_tasks(config.tasks, sorted(loading.load().REGISTERED_ENVS), "maniskill")
        if len(config.tasks) > 1:
            raise UserError("env.tasks: with env.sim = 'gpu' all slots play one task; name one, or set env.sim to cpu")
        (self._task,) = config.tasks
        self._end_at_success, self._sim = config.end_at_success, config.sim
        self._scenes = build(self._task, config, num_slots)
        self._proprio = self._scenes.proprio()
        self.spec = specification(
            config,
            tasks={self._task: self._scenes.sentence},
            actions=self._scenes.fields,
            proprio_dim=self._proprio.shape[1],
            control_frequency=self._scenes.control_frequency,
        )
        self._low, self._high = self.spec.action_low, self.spec.action_high
        shape = (num_slots, len(self.spec.cameras), *self.spec.image_size, 3)
        self._images = np.zeros(shape, np.uint8) if self.spec.cameras else None
        self._held = np.tile((self._low + self._high) / 2, (num_slots, 1)).astype(np.float32)
        """Last action of each slot `[N, D]`: what it does while others step."""
        self._episodes: list[EpisodeSpec | None] = [None] * num_slots
        self._steps = np.zeros(num_slots, np.int32)
        self._over = np.ones(num_slots, np.bool_)
        self._closed = False

    def reset(self, slots: Sequence[int], episodes: Sequence[EpisodeSpec]) -> Observation:
        """Start `episodes[i]` in slot `slots[i]`; returns the first observation of these slots, in that order."""
        self._check(slots)
        check_episodes(slots, episodes)
        for slot, episode in zip(slots, episodes, strict=True):
            self._start(slot, episode)
        self._look(slots)
        return self._observation(slots)

    def step_chunk(self, slots: Sequence[int], actions: NDArray[np.float32]) -> ChunkResult:
        """Execute `actions [B, C, D]` (simulator units), stopping each slot at its own end of episode.

        Actions beyond the declared bounds are clipped to them.
        """
        self._check(slots)
        actions = check_actions(actions, len(slots), self._low, self._high)
        for slot in slots:
            if self._over[slot]:
                raise not_steppable(slot, self._episodes[slot])
        result = nothing_executed(*actions.shape[:2])
        self._run(np.asarray(slots), actions, result)
        self._look(slots)
        result.observation = self._observation(slots)
        return result

    def observe(self, slots: Sequence[int]) -> Observation:
        """The current observation of these slots (the one the last reset, step_chunk or set_state led to)."""
        self._check(slots, playing=True)
        return self._observation(slots)

    def get_state(self, slots: Sequence[int]) -> list[bytes]:
        """One self-contained state per slot: the episode, and a snapshot of its scene. Never a pickle."""
        self._check(slots, playing=True)
        snapshot = self._scenes.snapshot()
        return [self._save(slot, {name: values[slot] for name, values in snapshot.items()}) for slot in slots]

    def set_state(self, slots: Sequence[int], states: Sequence[bytes]) -> list[int]:
        """Continue from states of `get_state`, also in another slot or another process.

        Returns:
            No slot: they all show what was saved, whatever digits their continuations differ in.
        """
        self._check(slots)
        if len(slots) != len(states):
            raise SimulatorError(f"set_state got {len(slots)} slots and {len(states)} states: one state per slot")
        parsed = [self._parsed(state) for state in states]
        for slot, (header, _) in zip(slots, parsed, strict=True):
            # Starting the episode brings back what the task itself remembers of it, a goal for instance.
            self._start(slot, EpisodeSpec(**{name: header[name] for name in ("task", "start_state", "seed", "group")}))
        for slot, (header, arrays) in zip(slots, parsed, strict=True):
            self._proprio[slot] = arrays.pop("proprio")
            self._steps[slot], self._over[slot] = header["steps"], header["over"]
        names = parsed[0][1]
        self._scenes.restore(slots, {name: np.stack([arrays[name] for _, arrays in parsed]) for name in names})
        self._look(slots)
        return []

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """Pictures for people, `[B, H, W, 3]`."""
        self._check(slots, playing=True)
        if loading.drawing_device(self._sim) is None:
            raise loading.NoVulkanError(f"ManiSkill cannot draw {self._task!r}")
        with drawing.measured():
            pictures = self._scenes.render()
        if pictures is None:
            raise RenderError(f"the ManiSkill task {self._task!r} has no camera for people")
        return pictures[list(slots)]

    def close(self) -> None:
        """Release everything; calling it twice is harmless."""
        if not self._closed:
            self._closed = True
            self._scenes.close()

    def _check(self, slots: Sequence[int], *, playing: bool = False) -> None:
        """Raise unless `slots` can be used; `playing`: an episode was started in each."""
        if self._closed:
            raise SimulatorError("the simulator is closed")
        check_slots(slots, self._scenes.count)
        for slot in slots:
            if playing and self._episodes[slot] is None:
                raise EpisodeOverError(f"slot {slot} has no episode yet: reset it first")

    def _start(self, slot: int, episode: EpisodeSpec) -> None:
        check_tasks([episode.task], self.spec.tasks, "this simulator")
        self._over[slot] = True  # stays so if starting fails
        self._episodes[slot], self._steps[slot] = episode, 0
        self._held[slot] = (self._low + self._high) / 2
        self._scenes.start(slot, episode)
        self._proprio[slot] = self._scenes.proprio()[slot]
        self._over[slot] = False

    def _run(self, slots: NDArray[np.int64], actions: NDArray[np.float32], result: ChunkResult) -> None:
        """Execute a chunk and fill `result`; scenes that must not move are put back at its end."""
        running = np.zeros(self._scenes.count, np.bool_)
        running[slots] = True
        row_of = np.zeros(self._scenes.count, np.int64)
        row_of[slots] = np.arange(len(slots))
        still = _Still(self._scenes)
        still.keep(np.flatnonzero(~running))
        for index in range(actions.shape[1]):
            active = np.flatnonzero(running)
            self._held[active] = actions[row_of[active], index]
            ended = self._step(active, row_of[active], index, result)
            running[ended] = False
            if not running.any():
                break
            if index + 1 < actions.shape[1]:
                still.keep(ended)
        still.put_back()

    def _step(
        self, active: NDArray[np.int64], rows: NDArray[np.int64], index: int, result: ChunkResult
    ) -> NDArray[np.int64]:
        """Execute action `index` of the chunk in the `active` slots; returns those whose episode ended."""
        rewards, success, failed = self._scenes.step(self._held)
        self._steps[active] += 1
        self._proprio[active] = self._scenes.proprio()[active]
        result.rewards[rows, index], result.success[rows, index] = rewards[active], success[active]
        result.steps[rows] += 1
        self._check_finite(active, rewards)
        terminated = (failed | (success & self._end_at_success))[active]
        truncated = ~terminated & (self._steps[active] >= self.spec.max_episode_steps)
        result.terminated[rows], result.truncated[rows] = terminated, truncated
        self._over[active] = terminated | truncated
        return active[terminated | truncated]

    def _check_finite(self, active: NDArray[np.int64], rewards: NDArray[np.float32]) -> None:
        wrong = ~np.isfinite(rewards[active]) | ~np.isfinite(self._proprio[active]).all(axis=1)
        if wrong.any():
            slot = int(active[wrong][0])
            self._over[slot] = True
            episode = self._episodes[slot]
            raise NotFiniteError(
                f"slot {slot}, step {self._steps[slot]} ({episode}): reward {rewards[slot]} or proprio is not finite"
            )

    def _look(self, slots: Sequence[int]) -> None:
        """Draw what the cameras of `slots` see now."""
        if self._images is not None:
            with drawing.measured():
                self._images[list(slots)] = self._scenes.pictures()[list(slots)]

    def _observation(self, slots: Sequence[int]) -> Observation:
        """The last observations of `slots`, as one batch."""
        chosen = list(slots)
        return Observation(
            images=None if self._images is None else self._images[chosen],
            proprio=self._proprio[chosen],
            tasks=[self.spec.tasks[self._task]] * len(chosen),
        )

    def _save(self, slot: int, rows: dict[str, NDArray[np.float32]]) -> bytes:
        episode = self._episodes[slot]
        assert episode is not None
        header = {
            "simulator": type(self).__name__,
            "task": episode.task,
            "start_state": episode.start_state,
            "seed": episode.seed,
            "group": episode.group,
            "steps": int(self._steps[slot]),
            "over": bool(self._over[slot]),
        }
        return pack(header, {**rows, "proprio": self._proprio[slot]})

    def _parsed(self, state: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Header and arrays of a saved state, once they are known to fit this simulator."""
        header, arrays = unpack(state)
        if header.get("simulator") != type(self).__name__:
            raise StateError(f"the state is one of {header.get('simulator')}, this simulator is {type(self).__name__}")
        shapes = {name: values.shape[1:] for name, values in self._scenes.snapshot().items()}
        shapes["proprio"] = self._proprio.shape[1:]
        found = {name: values.shape for name, values in arrays.items()}
        if header["task"] != self._task or found != shapes or header["steps"] > self.spec.max_episode_steps:
            raise StateError(f"the state is one of task {header['task']!r} with other bodies or limits than here")
        return header, arrays


class _Still:
    """Scenes that must not move while others step, as they were when they were to stop."""

    def __init__(self, scenes: Scenes) -> None:
        self._scenes = scenes
        self._rows: dict[int, dict[str, NDArray[np.float32]]] = {}

    def keep(self, scenes: NDArray[np.int64]) -> None:
        """Remember how these are now."""
        if len(scenes):
            snapshot = self._scenes.snapshot()
            self._rows |= {int(i): {name: values[i] for name, values in snapshot.items()} for i in scenes}

    def put_back(self) -> None:
        """Put all of them back."""
        if self._rows:
            names = next(iter(self._rows.values()))
            stacked = {name: np.stack([rows[name] for rows in self._rows.values()]) for name in names}
            self._scenes.restore(list(self._rows), stacked)
