"""MixedManager: several simulators as one, with the methods of an EnvManager."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodyrl.config.schema import EnvConfig, EnvSource
from embodyrl.envs.manager.manager import EnvManager
from embodyrl.envs.manager.memory import RESULTS, Slots, StepResult, Work
from embodyrl.envs.types import EpisodeSpec, Observation, SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.files import Closing
from embodyrl.placement.launcher import WorkerError

T = TypeVar("T")
_STATE_HEAD = struct.Struct("<i")
"""Number of the simulator that plays, -1 for none."""
ALIKE = ("actions", "proprio_dim", "environment_state", "cameras", "image_size", "frames", "control_frequency")
"""Fields of a spec that all simulators of a mix must have in common."""


def start_env_manager(config: EnvConfig, **options: Any) -> EnvManager | MixedManager:
    """Start the simulators of a config; for the options see `EnvManager`."""
    is_mixed = any(source.name for source in config.sources)
    return MixedManager(config, **options) if is_mixed else EnvManager(config, **options)


class MixedManager(Closing):
    """Simulators of several sources, each with an EnvManager of its own that has all slots of the run.

    The task of an episode decides which of them plays it, so that every slot can play every episode, and what is played
    depends neither on the number of processes nor on the order in which episodes end. A slot whose next episode belongs
    to another source is reset there when its present one has ended. Images are copies, unless all slots of a call play
    in one source; errors and deadlines are those of `EnvManager`.

    Args:
        config: lists the sources.
        log_dir: folder with a folder for the output of each source; None: kept only while they run.
        options: see `EnvManager`.

    Raises:
        UserError: the simulators differ in what a policy sees or does; see also `EnvManager`.
        WorkerError: a process failed to start.
    """

    spec: SimulatorSpec
    num_envs: int
    chunk_size: int

    def __init__(self, config: EnvConfig, *, chunk_size: int, log_dir: Path | None = None, **options: Any) -> None:
        self.num_envs, self.chunk_size = config.num_envs, chunk_size
        self._sources = config.sources
        self._playing = np.full(self.num_envs, -1, np.int64)
        """Source in which each slot plays, -1 for none."""
        self._next: list[EpisodeSpec | None] = [None] * self.num_envs
        """Episode of another source that follows in a slot, once the chunk under way has ended the present one."""
        with ExitStack() as stack:
            self._managers = [
                stack.enter_context(
                    EnvManager(source.env, chunk_size=chunk_size, log_dir=_folder(log_dir, source), **options)
                )
                for source in self._sources
            ]
            self.spec = _common_spec(self._sources, [each.spec for each in self._managers])
            self._managers_closing = stack.pop_all()
        self._of_task = {
            source.task(task): (number, task)
            for number, source in enumerate(self._sources)
            for task in source.env.tasks
        }
        # The same object for the same episode, as managers notice a new one by its identity.
        self._as_source_knows = lru_cache(maxsize=4096)(self._translated)

    def reset(self, slots: Slots, episodes: Sequence[EpisodeSpec]) -> Observation:
        """Start an episode in each slot; see `EnvManager.reset`."""
        chosen = np.asarray(slots, np.int64)
        routed = [self._as_source_knows(episode) for episode in episodes]
        self._playing[chosen] = [number for number, _ in routed]
        return self._observed(
            chosen, lambda manager, rows: manager.reset(chosen[rows], [routed[row][1] for row in rows.tolist()])
        )

    def step(
        self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> StepResult:
        """Execute a chunk in each slot and wait for the result; see `EnvManager.step`."""
        self.send(slots, actions, next_episodes)
        return self.receive(slots)

    def send(self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None) -> None:
        """Start executing a chunk in each slot; see `EnvManager.send`."""
        chosen, chunks = np.asarray(slots, np.int64), np.asarray(actions, np.float32)
        following = self._following(chosen, next_episodes)
        for manager, rows in self._shares(chosen):
            manager.send(chosen[rows], chunks[rows], [following[row] for row in rows.tolist()])

    def receive(self, slots: Slots) -> StepResult:
        """Wait for the chunks of these slots; see `EnvManager.receive`."""
        chosen = np.asarray(slots, np.int64)
        parts = [(rows, manager.receive(chosen[rows])) for manager, rows in self._shares(chosen)]
        return self._continued(chosen, _joined_results(parts))

    def receive_ready(self, at_least: int) -> tuple[NDArray[np.int64], StepResult]:
        """Wait for the chunks of any slots, if there is one source; see `EnvManager.receive_ready`."""
        if len(self._managers) > 1:
            raise ValueError("only the envs of one simulator can be received as they are ready")
        return self._managers[0].receive_ready(at_least)

    def step_recorded(
        self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> tuple[StepResult, list[NDArray[np.uint8]]]:
        """Step, and record a video; see `EnvManager.step_recorded`."""
        chosen, chunks = np.asarray(slots, np.int64), np.asarray(actions, np.float32)
        following = self._following(chosen, next_episodes)
        parts: list[tuple[NDArray[np.int64], StepResult]] = []
        images: dict[int, NDArray[np.uint8]] = {}
        for manager, rows in self._shares(chosen):
            numbers = rows.tolist()
            result, shown = manager.step_recorded(chosen[rows], chunks[rows], [following[row] for row in numbers])
            parts.append((rows, result))
            images |= dict(zip(numbers, shown, strict=True))
        return self._continued(chosen, _joined_results(parts)), [images[row] for row in range(len(chosen))]

    def get_state(self, slots: Slots) -> list[bytes]:
        """Return one self-contained state per slot; see `EnvManager.get_state`."""
        chosen = np.asarray(slots, np.int64)
        states = self._by_row(chosen, lambda manager, rows: manager.get_state(chosen[rows]))
        return [_STATE_HEAD.pack(self._playing[slot]) + states.get(row, b"") for row, slot in enumerate(chosen)]

    def set_state(self, slots: Slots, states: Sequence[bytes]) -> list[int]:
        """Continue slots from states of a mix of the same sources; see `EnvManager.set_state`."""
        chosen = np.asarray(slots, np.int64)
        if len(states) != len(chosen):
            raise ValueError(f"got {len(states)} states for {len(chosen)} envs")
        sources = [_STATE_HEAD.unpack_from(state)[0] for state in states]
        if not all(-1 <= number < len(self._sources) for number in sources):
            raise ValueError(f"a state is of simulator {max(sources)}, and the mix has {len(self._sources)}")
        self._playing[chosen] = sources
        bodies = [state[_STATE_HEAD.size :] for state in states]
        different: list[int] = []
        for manager, rows in self._shares(chosen):
            different += manager.set_state(chosen[rows], [bodies[row] for row in rows.tolist()])
        return sorted(different)

    def observe(self, slots: Slots) -> Observation:
        """Return the current observations of slots; see `EnvManager.observe`."""
        chosen = self._begun(slots)
        return self._observed(chosen, lambda manager, rows: manager.observe(chosen[rows]))

    def render(self, slots: Slots) -> NDArray[np.uint8]:
        """Return images of slots for people; see `EnvManager.render`."""
        chosen = self._begun(slots)
        images = self._by_row(chosen, lambda manager, rows: list(manager.render(chosen[rows])))
        return np.stack([images[row] for row in range(len(chosen))])

    def show(self, slots: Slots, states: Sequence[bytes]) -> Observation:
        """Return what the simulators show of states; see `EnvManager.show`."""
        chosen = np.asarray(slots, np.int64)
        self._playing[chosen] = [_STATE_HEAD.unpack_from(state)[0] for state in states]
        bodies = [state[_STATE_HEAD.size :] for state in states]
        return self._observed(
            chosen, lambda manager, rows: manager.show(chosen[rows], [bodies[row] for row in rows.tolist()])
        )

    def renderer_names(self) -> dict[str, str]:
        """Return what processes render images with; see `EnvManager.renderer_names`."""
        found: dict[str, str] = {}
        for manager in self._managers:
            found |= manager.renderer_names()
        return found

    def offload(self) -> int:
        """End the processes until they are needed; see `EnvManager.offload`."""
        return sum(each.offload() for each in self._managers)

    def onload(self) -> None:
        """Start the processes again; see `EnvManager.onload`."""
        for each in self._managers:
            each.onload()

    def take_deaths(self) -> list[WorkerError]:
        """Return the errors of processes that were replaced since the last call."""
        return [death for each in self._managers for death in each.take_deaths()]

    def take_mismatches(self) -> list[int]:
        """Return the slots that were not restored bit for bit since the last call."""
        return [slot for each in self._managers for slot in each.take_mismatches()]

    def count_restarts(self, restarts: int) -> None:
        """Set how many processes were replaced in the run so far; `env.max_restarts` limits each source."""
        for each in self._managers:
            each.count_restarts(restarts)

    def take_work(self) -> Work:
        """Return the processes' working time since the last call."""
        busy, rendering = zip(*(each.take_work() for each in self._managers), strict=True)
        return Work(busy_s=sum(busy), rendering_s=sum(rendering))

    def close(self) -> None:
        """End the processes. May be called again."""
        self._managers_closing.close()

    # ---- which source

    def _translated(self, episode: EpisodeSpec) -> tuple[int, EpisodeSpec]:
        """Return the source that plays an episode, and the episode as it knows it."""
        if episode.task not in self._of_task:
            raise ValueError(f"unknown task {episode.task!r} (tasks: {', '.join(self._of_task)})")
        number, task = self._of_task[episode.task]
        return number, replace(episode, task=task, source="")

    def _shares(self, chosen: NDArray[np.int64]) -> Iterator[tuple[EnvManager, NDArray[np.int64]]]:
        """Yield each manager in which some of these slots play, and their rows among them."""
        sources = self._playing[chosen]
        for number, manager in enumerate(self._managers):
            rows = np.flatnonzero(sources == number)
            if len(rows):
                yield manager, rows

    def _begun(self, slots: Slots) -> NDArray[np.int64]:
        chosen = np.asarray(slots, np.int64)
        if (self._playing[chosen] < 0).any():
            raise ValueError(f"envs {chosen[self._playing[chosen] < 0].tolist()} play no episode: reset them first")
        return chosen

    def _following(
        self, chosen: NDArray[np.int64], episodes: Sequence[EpisodeSpec | None] | None
    ) -> list[EpisodeSpec | None]:
        """Return the next episodes of slots that play in the same source, which begins them itself; those of other
        sources are kept."""
        self._begun(chosen)
        own: list[EpisodeSpec | None] = []
        for slot, episode in zip(chosen.tolist(), episodes or [None] * len(chosen), strict=True):
            number, known = (-1, None) if episode is None else self._as_source_knows(episode)
            stays = number == self._playing[slot]
            own.append(known if stays else None)
            self._next[slot] = None if stays else episode
        return own

    def _continued(self, chosen: NDArray[np.int64], result: StepResult) -> StepResult:
        """Begin the next episodes that belong to another source than those that ended; returns the result with their
        first observations."""
        over = result.ended | result.lost
        rows = np.array([row for row, slot in enumerate(chosen.tolist()) if over[row] and self._next[slot] is not None])
        if not len(rows):
            return result
        slots = chosen[rows]
        episodes = [each for slot in slots.tolist() if (each := self._next[slot]) is not None]
        first, before = self.reset(slots, episodes), result.observation
        kept = np.setdiff1d(np.arange(len(chosen)), rows)
        observation = _joined([(rows, first), (kept, before.take(kept))])
        return replace(result, observation=observation)

    def _observed(
        self, chosen: NDArray[np.int64], ask: Callable[[EnvManager, NDArray[np.int64]], Observation]
    ) -> Observation:
        return _joined([(rows, ask(manager, rows)) for manager, rows in self._shares(chosen)])

    def _by_row(
        self, chosen: NDArray[np.int64], ask: Callable[[EnvManager, NDArray[np.int64]], Sequence[T]]
    ) -> dict[int, T]:
        """Return what the managers answer for each row of a call."""
        found: dict[int, T] = {}
        for manager, rows in self._shares(chosen):
            found |= dict(zip(rows.tolist(), ask(manager, rows), strict=True))
        return found


def _folder(log_dir: Path | None, source: EnvSource) -> Path | None:
    """Return the folder for the output of a source."""
    if log_dir is None:
        return None
    folder = log_dir / source.name.replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _common_spec(sources: Sequence[EnvSource], specs: Sequence[SimulatorSpec]) -> SimulatorSpec:
    """Return the spec of simulators with the same layout, with the tasks of all.

    Raises:
        UserError: they differ.
    """
    first = specs[0]
    for source, spec in zip(sources, specs, strict=True):
        for name in ALIKE:
            before, now = getattr(first, name), getattr(spec, name)
            if before != now:
                raise UserError(
                    f"{sources[0].name} and {source.name} cannot be mixed: {name} is {before} in {sources[0].name} and "
                    f"{now} in {source.name}. A policy must see and do the same in all simulators of env.mix"
                )
    tasks = {
        source.task(task): text
        for source, spec in zip(sources, specs, strict=True)
        for task, text in spec.tasks.items()
    }
    return replace(first, tasks=tasks, max_episode_steps=max(each.max_episode_steps for each in specs))


def _joined(parts: Sequence[tuple[NDArray[np.int64], Observation]]) -> Observation:
    """Return the observations of several managers in the order of their rows."""
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort(np.concatenate([rows for rows, _ in parts]))
    return Observation.concat([each for _, each in parts]).take(order)


def _joined_results(parts: Sequence[tuple[NDArray[np.int64], StepResult]]) -> StepResult:
    """Return the results of several managers in the order of their rows."""
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort(np.concatenate([rows for rows, _ in parts]))

    def column(name: str) -> Any:
        values = [getattr(each, name) for _, each in parts]
        return None if values[0] is None else np.concatenate(values)[order]

    observation = _joined([(rows, each.observation) for rows, each in parts])
    was_reset = any(each.final_observation is not each.observation for _, each in parts)
    return StepResult(
        observation=observation,
        final_observation=_joined([(rows, each.final_observation) for rows, each in parts])
        if was_reset
        else observation,
        **{name: column(name) for name in (*RESULTS, "lost", "step_images", "step_proprio")},
    )
