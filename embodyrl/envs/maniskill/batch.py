"""ManiSkill as one batch: all slots of a process are scenes of one environment, which steps them together.

PhysX on a GPU works this way. A slot that is not to be stepped, or whose episode has ended, cannot be left out of a
step: its state is restored afterwards. So slots influence each other only in the last digits: restoring scenes and
starting episodes clears PhysX's cache of contacts in all scenes.

`Scenes` is the interface to ManiSkill, with numpy arrays; tests replace it by a stand-in.

Shapes: `N` slots of the process, which are the scenes; `B` slots of a call, `C` actions in a chunk, `D` action dims,
`S` proprio dims, `V` cameras, `H, W` pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.envs.base import (
    FOR_ALL,
    EpisodeOverError,
    NotFiniteError,
    RenderError,
    SimulatorError,
    check_actions,
    check_episodes,
    check_perturbations,
    check_slots,
    check_task_list,
    check_tasks,
    not_steppable,
)
from embodyrl.envs.images import timed_rendering
from embodyrl.envs.maniskill import loading
from embodyrl.envs.maniskill.loading import action_fields, description_of, specification, start_of
from embodyrl.envs.options import ManiSkillConfig, Proprio
from embodyrl.envs.perturb.noise import ImageNoise
from embodyrl.envs.perturb.words import described as paraphrased
from embodyrl.envs.states import StateError, pack, unpack
from embodyrl.envs.types import ActionField, ChunkResult, EpisodeSpec, Observation, nothing_executed
from embodyrl.errors import UserError

SEPARATOR = "\x1f"
"""Separator in array names; names of bodies may contain any printable character."""


class Outcome(NamedTuple):
    """Result of one action in every scene."""

    rewards: NDArray[np.float32]
    """`[N]`"""
    success: NDArray[np.bool_]
    """`[N]`: the task's success condition holds now."""
    failed: NDArray[np.bool_]
    """`[N]`: the task reports a failure that cannot be undone."""
    says_success: bool = True
    """Whether the task has a success condition."""


class Scenes(Protocol):
    """`count` scenes that are stepped together."""

    count: int
    fields: tuple[ActionField, ...]
    task_description: str
    control_frequency: float

    def start(self, scene: int, episode: EpisodeSpec) -> None:
        """Reset one scene to the start of an episode; the others stay unchanged."""
        ...

    def step(self, actions: NDArray[np.float32]) -> Outcome:
        """Execute one action per scene, `[N, D]`."""
        ...

    def proprio(self) -> NDArray[np.float32]:
        """Return the current proprio, `[N, S]`."""
        ...

    def images(self) -> NDArray[np.uint8]:
        """Render the cameras, `[N, V, H, W, 3]`."""
        ...

    def snapshot(self) -> dict[str, NDArray[np.float32]]:
        """Return poses, velocities and controller targets by name, each `[N, ...]`."""
        ...

    def restore(self, scenes: Sequence[int], rows: Mapping[str, NDArray[np.float32]]) -> None:
        """Restore these scenes from rows of a snapshot, each `[len(scenes), ...]`."""
        ...

    def render(self) -> NDArray[np.uint8] | None:
        """Render the task's camera for people, `[N, H, W, 3]`; None if it has none."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class ManiSkillScenes:
    """See `Scenes`. One scene runs on the CPU as well.

    Raises:
        UserError: see `loading.build`.
    """

    def __init__(self, task: str, config: ManiSkillConfig, count: int) -> None:
        import torch

        torch.set_num_threads(1)  # tensors on the CPU are tiny
        self._torch = torch
        self._robot_only = config.proprio is Proprio.robot
        self._env = loading.build(task, config, count)
        self.count = count
        self.fields = action_fields(self._env, task)
        self.task_description = description_of(self._env, task)
        self.control_frequency = float(self._env.control_freq)
        self._state: Any = self._env.get_obs()
        if config.cameras:
            self.images()  # the first images take seconds: shaders are compiled

    def start(self, scene: int, episode: EpisodeSpec) -> None:
        """See `Scenes`. Each scene draws its layout separately, so that the start state decides it, not the slot."""
        start = start_of(self._env, episode)
        index = self._torch.tensor([scene], device=self._env.device)
        options = {**start.get("options", {}), "env_idx": index}
        with self._torch.inference_mode():
            targets = dict(_leaves(self._targets()))
            kept = {name: target.clone() for name, target in targets.items()}
            self._env.reset(seed=[start["seed"]] * self.count, options=options)
            others = [other for other in range(self.count) if other != scene]
            if others and kept:  # ManiSkill resets the controllers of all scenes
                self._set_targets(others, {name: target[others] for name, target in kept.items()})
            self._state = self._env.get_obs()

    def step(self, actions: NDArray[np.float32]) -> Outcome:
        """See `Scenes`."""
        torch = self._torch
        with torch.inference_mode():
            self._state, reward, _, _, info = self._env.step(torch.from_numpy(actions).to(self._env.device))
            nothing = torch.zeros(self.count, device=self._env.device)
            columns = [reward, info.get("success", nothing), info.get("fail", nothing)]
            rewards, success, failed = torch.stack([column.float() for column in columns]).cpu().numpy()
        return Outcome(rewards, success > 0, failed > 0, "success" in info)

    def proprio(self) -> NDArray[np.float32]:
        """See `Scenes`."""
        with self._torch.inference_mode():
            values = self._env.robot_state() if self._robot_only else self._state
            numbers: NDArray[np.float32] = values.float().cpu().numpy().copy()
            return numbers

    def images(self) -> NDArray[np.uint8]:
        """See `Scenes`."""
        with self._torch.inference_mode():
            images: NDArray[np.uint8] = self._env.images().cpu().numpy()
            return images

    def snapshot(self) -> dict[str, NDArray[np.float32]]:
        """See `Scenes`."""
        clock = self._env.elapsed_steps[:, None]
        state = {**self._env.scene.get_sim_state(), "controller": self._targets(), "clock": clock}
        return {name: value.float().cpu().numpy().copy() for name, value in _leaves(state)}

    def restore(self, scenes: Sequence[int], rows: Mapping[str, NDArray[np.float32]]) -> None:
        """See `Scenes`."""
        torch, device = self._torch, self._env.device
        order = np.argsort(scenes)  # ManiSkill takes the rows for the scenes in ascending order
        tree = _tree({name: torch.from_numpy(row[order]).to(device) for name, row in rows.items()})
        targets = dict(_leaves(tree.pop("controller", {})))
        index = torch.from_numpy(np.asarray(scenes)[order]).to(device)
        with torch.inference_mode():
            self._env._elapsed_steps[index] = tree.pop("clock")[:, 0].to(self._env.elapsed_steps.dtype)
            self._env.set_state_dict(tree, index)
            if targets:
                self._set_targets(index, targets)
            self._state = self._env.get_obs()

    def render(self) -> NDArray[np.uint8] | None:
        """See `Scenes`."""
        with self._torch.inference_mode():
            images = self._env.render_rgb_array()
            return None if images is None else images.to(self._torch.uint8).cpu().numpy()

    def close(self) -> None:
        """Release the environment."""
        self._env.close()

    def _targets(self) -> dict[str, Any]:
        """Return the state that controllers keep between steps."""
        state: dict[str, Any] = self._env.agent.get_controller_state()
        return state

    def _set_targets(self, scenes: Any, rows: Mapping[str, Any]) -> None:
        """Set rows of targets, one for each of `scenes` (a list or tensor of indices)."""
        everything = {name: target.clone() for name, target in _leaves(self._targets())}
        for name, row in rows.items():
            everything[name][scenes] = row
        self._env.agent.set_controller_state(_tree(everything))


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors in nested dictionaries, with their joined names."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}{SEPARATOR}")
        else:
            yield f"{path}{name}", value


def _tree(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild the nested dictionaries from `_leaves`."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *outer, name = path.split(SEPARATOR)
        node = tree
        for part in outer:
            node = node.setdefault(part, {})
        node[name] = value
    return tree


Build = Callable[[str, ManiSkillConfig, int], Scenes]
"""Function that builds the scenes of a task from its name, the config and their number."""


class ManiSkillBatch:
    """A `Simulator` whose slots are scenes of one environment. States are snapshots of poses, velocities and controller
    targets; continuations from them are close to the original, not equal to the last digit.

    Raises:
        UserError: the task, a camera or an option does not exist, there are several tasks, or a requirement is missing.
    """

    perturbs_episodes = True

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
            tasks={self._task: self._scenes.task_description},
            actions=self._scenes.fields,
            proprio_dim=self._proprio.shape[1],
            control_frequency=self._scenes.control_frequency,
        )
        self._low, self._high = self.spec.action_low, self.spec.action_high
        shape = (num_slots, len(self.spec.cameras), *self.spec.image_size, 3)
        self._images = np.zeros(shape, np.uint8) if self.spec.cameras else None
        self._held = np.tile((self._low + self._high) / 2, (num_slots, 1)).astype(np.float32)
        """Last action of each slot `[N, D]`, repeated while others step."""
        self._episodes: list[EpisodeSpec | None] = [None] * num_slots
        self._noise: list[ImageNoise | None] = [None] * num_slots
        self._shown = [self.spec.tasks[self._task]] * num_slots
        """Task description of each slot."""
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
        """Return the current observation of these slots, that of the last reset, step_chunk or set_state."""
        self._check(slots, playing=True)
        return self._observation(slots)

    def get_state(self, slots: Sequence[int]) -> list[bytes]:
        """Return a self-contained state per slot: the episode, and a snapshot of its scene. Never a pickle."""
        self._check(slots, playing=True)
        snapshot = self._scenes.snapshot()
        return [self._save(slot, {name: values[slot] for name, values in snapshot.items()}) for slot in slots]

    def set_state(self, slots: Sequence[int], states: Sequence[bytes]) -> list[int]:
        """Continue from states of `get_state`, also in another slot or another process.

        Returns:
            No slot: all observations equal the saved ones, although continuations may differ in the last digits.
        """
        self._check(slots)
        if len(slots) != len(states):
            raise SimulatorError(f"set_state got {len(slots)} slots and {len(states)} states: one state per slot")
        parsed = [self._parsed(state) for state in states]
        for slot, (header, _) in zip(slots, parsed, strict=True):
            # Starting the episode restores what the task itself keeps of it, a goal for instance.
            self._start(slot, EpisodeSpec.from_plain(header))
        for slot, (header, arrays) in zip(slots, parsed, strict=True):
            self._proprio[slot] = arrays.pop("proprio")
            self._steps[slot], self._over[slot] = header["steps"], header["over"]
        names = parsed[0][1]
        self._scenes.restore(slots, {name: np.stack([arrays[name] for _, arrays in parsed]) for name in names})
        self._look(slots)
        return []

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """Render images for people, `[B, H, W, 3]`."""
        self._check(slots, playing=True)
        if loading.rendering_device_for(self._sim) is None:
            raise loading.NoVulkanError(f"ManiSkill cannot render {self._task!r}")
        with timed_rendering():
            images = self._scenes.render()
        if images is None:
            raise RenderError(f"the ManiSkill task {self._task!r} has no camera for people")
        return images[list(slots)]

    def close(self) -> None:
        """Release all resources; may be called twice."""
        if not self._closed:
            self._closed = True
            self._scenes.close()

    def _check(self, slots: Sequence[int], *, playing: bool = False) -> None:
        """Raise unless `slots` are legal; with `playing`, each must have an episode."""
        if self._closed:
            raise SimulatorError("the simulator is closed")
        check_slots(slots, self._scenes.count)
        for slot in slots:
            if playing and self._episodes[slot] is None:
                raise EpisodeOverError(f"slot {slot} has no episode yet: reset it first")

    def _start(self, slot: int, episode: EpisodeSpec) -> None:
        check_tasks([episode.task], self.spec.tasks, "this simulator")
        self._over[slot] = True  # remains if the start fails
        self._episodes[slot], self._steps[slot] = episode, 0
        self._perturb(slot, episode)
        self._held[slot] = (self._low + self._high) / 2
        self._scenes.start(slot, episode)
        self._proprio[slot] = self._scenes.proprio()[slot]
        self._over[slot] = False

    def _perturb(self, slot: int, episode: EpisodeSpec) -> None:
        """Prepare what an episode shows otherwise than it is."""
        if episode.perturb:
            check_perturbations(episode, self.spec, FOR_ALL)
        self._noise[slot] = ImageNoise.of(episode.seed, episode.perturb)
        self._shown[slot] = paraphrased(self.spec.tasks[self._task], episode.seed, episode.perturb)

    def _run(self, slots: NDArray[np.int64], actions: NDArray[np.float32], result: ChunkResult) -> None:
        """Execute a chunk and fill `result`; scenes that must not move are restored at its end."""
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
        rewards, success, failed, says_success = self._scenes.step(self._held)
        self._steps[active] += 1
        self._proprio[active] = self._scenes.proprio()[active]
        result.rewards[rows, index], result.success[rows, index] = rewards[active], success[active]
        result.steps[rows] += 1
        result.success_known = np.full(len(result.steps), says_success)
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
        """Render the cameras of `slots`."""
        if self._images is not None:
            with timed_rendering():
                self._images[list(slots)] = self._scenes.images()[list(slots)]
            for slot in slots:
                if (noise := self._noise[slot]) is not None:
                    self._images[slot] = noise.apply(self._images[slot], int(self._steps[slot]))

    def _observation(self, slots: Sequence[int]) -> Observation:
        """Return the last observations of `slots` as one batch."""
        chosen = list(slots)
        return Observation(
            images=None if self._images is None else self._images[chosen],
            proprio=self._proprio[chosen],
            task_descriptions=[self._shown[slot] for slot in chosen],
        )

    def _save(self, slot: int, rows: dict[str, NDArray[np.float32]]) -> bytes:
        episode = self._episodes[slot]
        assert episode is not None
        header = {
            "simulator": type(self).__name__,
            **episode.to_plain(),
            "steps": int(self._steps[slot]),
            "over": bool(self._over[slot]),
        }
        return pack(header, {**rows, "proprio": self._proprio[slot]})

    def _parsed(self, state: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Decode a saved state and check that it fits this simulator; returns header and arrays."""
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
    """Snapshots of the scenes that must not move while others step."""

    def __init__(self, scenes: Scenes) -> None:
        self._scenes = scenes
        self._rows: dict[int, dict[str, NDArray[np.float32]]] = {}

    def keep(self, scenes: NDArray[np.int64]) -> None:
        """Take a snapshot of these scenes."""
        if len(scenes):
            snapshot = self._scenes.snapshot()
            self._rows |= {int(i): {name: values[i] for name, values in snapshot.items()} for i in scenes}

    def put_back(self) -> None:
        """Restore all of them."""
        if self._rows:
            names = next(iter(self._rows.values()))
            stacked = {name: np.stack([rows[name] for rows in self._rows.values()]) for name in names}
            self._scenes.restore(list(self._rows), stacked)
