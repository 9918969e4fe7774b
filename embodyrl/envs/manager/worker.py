"""The inside of a simulator process: the simulator's slots, served from shared memory.

Slots are numbered from 0 within the process; a note on every error gives their number in the whole run.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from embodyrl.config.infos import simulator_info
from embodyrl.config.schema import EnvConfig
from embodyrl.envs.base import WrongResult, described, wrong_images, wrong_proprio
from embodyrl.envs.images import Frames, renderer_names, rendering_seconds
from embodyrl.envs.manager.memory import IMAGES, NEXT_FIELDS, RESULTS, Layout, SharedArrays, TaskDescriptions
from embodyrl.envs.perturb.kinds import unpacked
from embodyrl.envs.types import ChunkResult, EpisodeSpec, Observation, Simulator, SimulatorSpec, nothing_executed
from embodyrl.errors import UserError
from embodyrl.placement.plan import WorkerSpec
from embodyrl.placement.transport.segment import Segment
from embodyrl.registry import SIMULATORS

P = ParamSpec("P")
T = TypeVar("T")


def _serving(method: Callable[Concatenate[EnvWorker, P], T]) -> Callable[Concatenate[EnvWorker, P], T]:
    """Measure the time that `method` takes, and name the slots in its errors by their numbers in the whole run."""

    @functools.wraps(method)
    def wrapped(self: EnvWorker, /, *args: P.args, **kwargs: P.kwargs) -> T:
        start = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        except WrongResult as error:
            raise self.named(error) from None
        except Exception as error:
            if self.first_slot:
                error.add_note(f"env 0 of this worker is env {self.first_slot} of the run")
            raise
        finally:
            self._note_work(time.perf_counter() - start)

    return wrapped


class EnvWorker:
    """Serves one simulator. Built in the worker process.

    Args:
        spec: this worker's place in the plan.
        config: the simulator's options; `config.name` is looked up in the registry.

    Raises:
        UserError: the simulator is unknown here, or lacks a package or its assets.
    """

    def __init__(self, spec: WorkerSpec, config: EnvConfig) -> None:
        self._name = config.name
        self._slots = spec.slots
        self.first_slot = spec.slots.start
        self._all = range(len(spec.slots))
        if config.name in SIMULATORS and not simulator_info(config.name).says("time_limit"):
            # A simulator whose tasks have no limits of their own need not know of `auto` and null.
            config = dataclasses.replace(config, max_episode_steps=config.time_limit)
        self._simulator: Simulator = SIMULATORS.load(config.name)(config, len(spec.slots))
        self._frame_count = config.frames
        self._frames = Frames(config.frames) if config.frames > 1 else None
        self._tasks = list(self._simulator.spec.tasks)
        self._task_descriptions = TaskDescriptions(list(self._simulator.spec.tasks.values()))
        self._memory: SharedArrays | None = None
        self._arrays: dict[str, NDArray[Any]] = {}
        self._kept: list[str] = []
        self._shown: tuple[list[str], NDArray[np.int64]] = [], np.zeros(0, np.int64)
        """Task descriptions of the last observation, and their indices."""
        self._rendered = rendering_seconds()
        self._called = ""
        """Method of the simulator that was called last."""

    def simulator_spec(self) -> SimulatorSpec:
        """Return what the simulator offers, with the frames of this run."""
        return dataclasses.replace(self._simulator.spec, frames=self._frame_count)

    def renderer_names(self) -> dict[str, str]:
        """Return what its images are rendered with, after the first of them; empty without cameras."""
        return renderer_names() if self._simulator.spec.cameras else {}

    def named(self, error: WrongResult) -> WrongResult:
        """Return the error with the simulator's name, the slots' numbers in the whole run, and the method called."""
        slots = [self.first_slot + slot for slot in error.slots]
        envs = f"env {slots[0]}" if len(slots) == 1 else f"envs {', '.join(map(str, slots))}"
        return WrongResult(error.slots, error.text, where=f"simulator {self._name!r}, {envs}, {self._called}")

    def attach(self, layout: Layout, fd: int) -> None:
        """Use this segment from now on; its contents stay."""
        self._memory = SharedArrays(Segment(fd), layout)
        self._arrays = self._memory.part(self._slots)
        # A page lands on the NUMA node of the process that first writes to it: it should be this one.
        for array in self._arrays.values():
            array[...] = array.copy()
        self._kept = [name for name in ("step_images", "step_proprio") if name in self._arrays]

    @_serving
    def reset(self, *slots: int) -> None:
        """Start the episodes in `next_*` in these slots (none given: all)."""
        self._reset(slots or self._all)

    @_serving
    def step(self, *slots: int) -> None:
        """Execute the chunks in `actions` in these slots (none given: all).

        Where an episode ends and `has_next` is set, its last observation goes to `final_*` and the next episode starts.
        """
        self._step(slots or self._all, video=None)

    @_serving
    def on_notify(self) -> None:
        """Do what `step` does, in the slots of the mask `stepping`; called by the doorbell."""
        wanted = self._arrays["stepping"].tolist()
        self._step(self._all if all(wanted) else tuple(slot for slot in self._all if wanted[slot]), video=None)

    @_serving
    def step_recorded(self, *slots: int) -> list[NDArray[np.uint8]]:
        """Do what `step` does; returns for every slot the images for people after each executed action, uint8
        `[n, H, W, 3]`."""
        chosen = slots or self._all
        video: list[list[NDArray[np.uint8]]] = [[] for _ in chosen]
        self._step(chosen, video)
        return [np.stack(images) for images in video]

    @_serving
    def observe(self, *slots: int) -> None:
        """Write the current observation of these slots (none given: all)."""
        self._called = "observe"
        chosen = slots or self._all
        observation = self._simulator.observe(chosen)
        if self._frames is not None:
            observation = dataclasses.replace(observation, images=self._frames.stacked(chosen))
        self._write_observation("", chosen, observation)

    @_serving
    def get_state(self, *slots: int) -> list[bytes]:
        """Return one state per slot (none given: all)."""
        chosen = slots or self._all
        states = self._simulator.get_state(chosen)
        if self._frames is None:
            return list(states)
        return [self._frames.save(slot, state) for slot, state in zip(chosen, states, strict=True)]

    @_serving
    def set_state(self, slots: Sequence[int], states: Sequence[bytes]) -> list[int]:
        """Continue these slots from these states; returns those that were not restored bit for bit."""
        self._called = "set_state"
        if self._frames is not None:
            states = [self._frames.restore(slot, state) for slot, state in zip(slots, states, strict=True)]
        return list(self._simulator.set_state(slots, states) or ())

    @_serving
    def render(self, *slots: int) -> NDArray[np.uint8]:
        """Return images of these slots (none given: all) for people, uint8 `[B, H, W, 3]`."""
        return self._simulator.render(slots or self._all)

    def close(self) -> None:
        """Close the simulator."""
        self._arrays = {}
        if self._memory is not None:
            self._memory.close()
        self._simulator.close()

    def _note_work(self, seconds: float) -> None:
        """Add to the working time of all processes that served these slots [s]."""
        # Added, not set: a process that replaces another one continues its count.
        work, rendered = self._arrays["work"][0], rendering_seconds()
        work[0] += seconds
        if rendered != self._rendered:
            work[1] += rendered - self._rendered
            self._rendered = rendered

    def _step(self, slots: Sequence[int], video: list[list[NDArray[np.uint8]]] | None) -> None:
        # A slot whose episode ends is reset here, in the same call: the parent pays no second round trip. Its last
        # observation is kept separately, because the value at a time limit is that of this one.
        result = self._execute(slots, video)
        self._write_result(slots, result)
        # `True in list` before numpy's `any`: most chunks end no episode, and a worker has few slots.
        ended = result.terminated | result.truncated
        if True not in ended.tolist() or not (ended := ended & self._arrays["has_next"][list(slots)]).any():
            self._write_observation("", slots, self._framed(slots, result.observation))
            return
        observation = self._framed(slots, result.observation)
        for prefix, rows in (("final_", np.flatnonzero(ended)), ("", np.flatnonzero(~ended))):
            if len(rows):
                self._write_observation(prefix, _at(slots, rows), observation.take(rows))
        self._reset(_at(slots, np.flatnonzero(ended)))

    def _execute(self, slots: Sequence[int], video: list[list[NDArray[np.uint8]]] | None) -> ChunkResult:
        """Execute the chunks, one action at a time if observations or images in between are kept."""
        self._called = "step_chunk"
        # A simulator may write into its actions (clipping in place), which must not change those in shared memory.
        actions = self._arrays["actions"]
        # All slots, the usual case, are copied as one block; others by their indices.
        chunk = actions.copy() if slots is self._all else actions[list(slots)]
        if video is None and not self._kept:
            return self._simulator.step_chunk(slots, chunk)

        def look(number: int, rows: list[int], observation: Observation) -> None:
            seen = [slots[row] for row in rows]
            for name in self._kept:
                self._write(name, seen, getattr(observation, name.removeprefix("step_")), column=number)
            if video is not None:
                for row, image in zip(rows, self._simulator.render(seen), strict=True):
                    video[row].append(image)

        # Rows of actions that are not executed would otherwise show the chunk before.
        for name in self._kept:
            self._arrays[name][list(slots)] = 0
        return step_singly(self._simulator, slots, chunk, look)

    def _reset(self, slots: Sequence[int]) -> None:
        self._called = "reset"
        episodes = [self._next_episode(slot) for slot in slots]
        observation = self._simulator.reset(slots, episodes)
        self._write_observation("", slots, self._framed(slots, observation, begin=True))

    def _framed(self, slots: Sequence[int], observation: Observation, *, begin: bool = False) -> Observation:
        """Return a new observation of the simulator with the frames before it; `begin`: of an episode."""
        if self._frames is None or not isinstance(observation, Observation):
            return observation
        if wrong_images("it", observation.images, self._simulator.spec, (len(slots),)) or observation.images is None:
            raise self._wrong_observation(slots, observation)
        stack = self._frames.begin if begin else self._frames.add
        return dataclasses.replace(observation, images=stack(slots, observation.images))

    def _next_episode(self, slot: int) -> EpisodeSpec:
        numbers: dict[str, Any] = {name: int(self._arrays[f"next_{name}"][slot]) for name in NEXT_FIELDS}
        perturb = unpacked(int(self._arrays["next_perturb"][slot]))
        if perturb and not getattr(self._simulator, "perturbs_episodes", False):
            raise UserError(
                f"simulator {self._name!r} does not perturb episodes: leave out env.perturb and eval.perturb, or build "
                "it on embodyrl.envs.base.SlotSimulator"
            )
        return EpisodeSpec(task=self._tasks[self._arrays["next_task_index"][slot]], perturb=perturb, **numbers)

    def _write_result(self, slots: Sequence[int], result: ChunkResult) -> None:
        if not isinstance(result, ChunkResult):
            raise WrongResult(slots, f"it returned {type(result).__name__}, want an embodyrl.envs.ChunkResult")
        known = np.ones(len(slots), np.bool_) if result.success_known is None else result.success_known
        for name in RESULTS:
            self._write(name, slots, known if name == "success_known" else getattr(result, name))

    def _write_observation(self, prefix: str, slots: Sequence[int], observation: Observation) -> None:
        if not isinstance(observation, Observation):
            raise WrongResult(slots, f"it returned {type(observation).__name__}, want an embodyrl.envs.Observation")
        images, proprio = observation.images, observation.proprio
        if (proprio is not None) != ("proprio" in self._arrays) or (images is not None) != (IMAGES[0] in self._arrays):
            raise self._wrong_observation(slots, observation)
        self._write(prefix + "task_index", slots, self._task_indices(slots, observation.task_descriptions))
        try:
            if proprio is not None:
                self._write(prefix + "proprio", slots, proprio)
            if images is not None and prefix:
                self._write(prefix + "images", slots, images)
            elif images is not None:
                self._write_images(slots, images)
        except WrongResult:
            raise self._wrong_observation(slots, observation) from None

    def _wrong_observation(self, slots: Sequence[int], observation: Observation) -> WrongResult:
        spec, batch = self._simulator.spec, (len(slots),)
        wrong = wrong_images("it", observation.images, spec, batch)
        wrong = wrong or wrong_proprio("it", observation.proprio, spec, batch)
        assert wrong is not None, "an observation as declared was refused"
        return WrongResult(slots, wrong)

    def _write_images(self, slots: Sequence[int], images: NDArray[np.uint8]) -> None:
        """Write the images of these slots to the buffers from which the parent will read them."""
        every = self._arrays["bank"].tolist()
        banks = [every[slot] for slot in slots]
        if banks.count(banks[0]) == len(banks):  # nearly always
            self._write(IMAGES[banks[0]], slots, images)
            return
        for bank, name in enumerate(IMAGES):
            rows = np.flatnonzero(np.equal(banks, bank))
            self._write(name, _at(slots, rows), images[rows])

    def _task_indices(self, slots: Sequence[int], task_descriptions: Sequence[str]) -> NDArray[np.int64]:
        # Descriptions seldom change from one step to the next; comparing two lists is cheaper than looking all up.
        if self._shown[0] == task_descriptions:
            return self._shown[1]
        try:
            indices = np.array(self._task_descriptions.numbers(task_descriptions), np.int64)
            self._shown = list(task_descriptions), indices
            return indices
        except KeyError as error:
            raise WrongResult(
                slots, f"it returned the task description {error}, which no task of SimulatorSpec.tasks has"
            ) from None

    def _write(self, name: str, slots: Sequence[int], value: NDArray[Any], *, column: int | None = None) -> None:
        """Write one row per slot (or one entry of it), after checking its shape and type against the spec."""
        rows = self._arrays[name] if column is None else self._arrays[name][:, column]
        got = np.asarray(value)
        if slots is self._all and got.shape == rows.shape and got.dtype is rows.dtype:
            rows[...] = got  # nearly always
            return
        want = (len(slots), *rows.shape[1:])
        right_type = got.dtype == rows.dtype or np.can_cast(got.dtype, rows.dtype, "same_kind")
        if got.shape != want or not right_type:
            raise WrongResult(
                slots, f"it returned {name} {described(value)}, want {rows.dtype} {want}, a row for each env"
            )
        rows[list(slots)] = got


def _at(slots: Sequence[int], rows: NDArray[np.int64]) -> list[int]:
    """Return the slots in these rows."""
    return [slots[row] for row in rows.tolist()]


Look = Callable[[int, list[int], Observation], None]
"""Called after action `number` with the rows that executed it and their observations."""


def step_singly(simulator: Simulator, slots: Sequence[int], actions: NDArray[np.float32], look: Look) -> ChunkResult:
    """Return the result of `simulator.step_chunk(slots, actions)`, with `look` called after every action.

    Args:
        simulator: the one to step.
        slots: `B` of its slots.
        actions: `[B, C, D]`.
        look: see `Look`. Slots whose episode has ended execute nothing more and are not passed to it again.
    """
    batch, chunk = actions.shape[:2]
    result, known = nothing_executed(batch, chunk), np.ones(batch, np.bool_)
    rows = list(range(batch))
    for number in range(chunk):
        single = simulator.step_chunk([slots[row] for row in rows], actions[rows, number : number + 1])
        result.rewards[rows, number], result.success[rows, number] = single.rewards[:, 0], single.success[:, 0]
        result.terminated[rows], result.truncated[rows] = single.terminated, single.truncated
        result.steps[rows] += single.steps
        if single.success_known is not None:
            known[rows] = single.success_known
        look(number, rows, single.observation)
        rows = [row for row in rows if not (result.terminated[row] or result.truncated[row])]
        if not rows:
            break
    result.observation, result.success_known = simulator.observe(slots), known
    return result
