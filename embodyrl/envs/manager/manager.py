"""EnvManager: the simulator slots of a run, in processes of their own.

Shapes: `B` slots of a call, `C` actions in a chunk, `D` action dims. The manager knows nothing about tasks or learning:
the caller says which episode each slot plays, when it steps and with which actions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodyrl.config.schema import EnvConfig
from embodyrl.envs.manager.memory import NEXT_FIELDS, Segment, layout
from embodyrl.envs.manager.worker import EnvWorker
from embodyrl.envs.types import ChunkResult, EpisodeSpec, Observation, SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.placement.errors import RemoteError, WorkerError
from embodyrl.placement.launcher import Launcher, Request, Worker
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.plan import inventory, plan_env_workers
from embodyrl.placement.topology import Gpu
from embodyrl.registry import SIMULATORS

Slots = Sequence[int] | NDArray[np.int64]
"""Numbers of slots, each once, in any order; results come in the same order."""

_CLOSE_S = 5.0
"""How long simulators may take to close before they are killed [s]."""
_CLOSE_AFTER_FAILURE_S = 1.0
_MAX_KNOWN_SHARES = 4096

_STATE_HEAD = struct.Struct("<q?")


class InvalidResult(WorkerError):
    """Raised when a simulator returned a reward or an observation that is NaN or infinite; slot and step are named."""


class _Share(NamedTuple):
    """The part of a call that one process serves."""

    worker: Worker
    slots: list[int]
    """Ascending, as the run numbers them."""
    local: tuple[int, ...]
    """The same slots as the process numbers them."""


@dataclass(kw_only=True)
class StepResult(ChunkResult):
    """What became of one chunk in `B` slots.

    `observation` is the first one of the next episode where the slot was reset at once.
    """

    final_observation: Observation
    """At the end of the chunk, before any reset: what a value estimate at the end of an episode needs.
    The same object as `observation` when no slot was reset."""

    @property
    def ended(self) -> NDArray[np.bool_]:
        """`[B]`: the episode ended inside the chunk, for whatever reason."""
        return self.terminated | self.truncated


class EnvManager:
    """Starts the simulator processes and serves their slots.

    Arrays that go in are copied, arrays that come out are copies: the caller may keep them. After a `WorkerError` (a
    process died, hung or raised, or a result was not finite) only `close` still works.

    Args:
        config: the simulator, the number of slots and of processes, and the deadlines.
        chunk_size: `C`, actions per step.
        plugins: modules that the processes import first.
        plugin_path: folder in which they may be, besides what is installed.
        log_dir: folder for the processes' output; None: kept only while they run.
        launcher: where the processes run; None: on this machine. With one given, the three above are its business.
        near: the GPU to which observations go, so that processes run close to it.

    Raises:
        UserError: the slots cannot be spread over the processes, or the simulator cannot be built for a reason that
            the user can mend.
        WorkerError: a process failed to start.
    """

    spec: SimulatorSpec
    """What the simulator offers; the same for all slots."""
    num_envs: int
    """Slots, numbered 0 .. num_envs-1."""
    workers: list[Worker]
    """The processes, by rank."""

    def __init__(
        self,
        config: EnvConfig,
        *,
        chunk_size: int,
        plugins: Sequence[str] = (),
        plugin_path: str | None = None,
        log_dir: Path | None = None,
        launcher: Launcher | None = None,
        near: Gpu | None = None,
    ) -> None:
        self.num_envs = config.num_envs
        self.chunk_size = chunk_size
        self.workers = []
        self._timeout = config.step_timeout_s
        self._failure: BaseException | None = None
        self._closed = False
        self._launcher: Launcher = launcher or LocalLauncher(plugins=plugins, plugin_path=plugin_path, log_dir=log_dir)
        self._memory: Segment | None = None
        self._requests: list[Request | None] = [None] * self.num_envs
        self._written: list[EpisodeSpec | None] = [None] * self.num_envs
        """What the shared memory says each slot plays next."""
        self._sent = np.zeros(self.num_envs, bool)
        self._needs_reset = np.ones(self.num_envs, bool)
        self._steps = np.zeros(self.num_envs, np.int64)
        self._known_shares: dict[bytes, list[_Share]] = {}
        try:
            self._start(config, near)
        except BaseException as error:
            self.close()
            if isinstance(error, RemoteError) and error.is_user_error:
                raise UserError(error.remote_message) from error
            raise

    def _start(self, config: EnvConfig, near: Gpu | None) -> None:
        _check_importable(config)
        plan = plan_env_workers(config, inventory(), near)
        self._share = len(plan[0].slots)
        self.workers = self._launcher.start(
            plan, EnvWorker, [(spec, config) for spec in plan], timeout=config.startup_timeout_s
        )
        self.spec = self._agreed_spec()
        self._tasks = list(self.spec.tasks)
        self._sentences = list(self.spec.tasks.values())
        memory = self._memory = Segment.create(layout(self.spec, self.num_envs, self.chunk_size))
        self._call([worker.request("attach", memory.layout, fds=[memory.fd]) for worker in self.workers])

    def _agreed_spec(self) -> SimulatorSpec:
        specs: list[SimulatorSpec] = self._call([worker.request("simulator_spec") for worker in self.workers])
        for worker, spec in zip(self.workers, specs, strict=True):
            if spec != specs[0]:
                raise RuntimeError(
                    f"{worker} offers another simulator than {self.workers[0]}: {spec} against {specs[0]}"
                )
        return specs[0]

    def reset(self, slots: Slots, episodes: Sequence[EpisodeSpec]) -> Observation:
        """Start `episodes[i]` in slot `slots[i]`, whatever it was doing; returns the first observations, in that order.

        Raises:
            ValueError: wrong slots or episodes.
            WorkerError: see the class.
        """
        index = self._idle(slots)
        for slot, episode in zip(slots, episodes, strict=False):
            if episode is None:
                raise ValueError(f"slot {slot}: got no episode")
        self._write_episodes(index, episodes)
        self._call(self._request("reset", index))
        self._steps[index] = 0
        self._needs_reset[index] = False
        return self._observation(index)

    def step(
        self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> StepResult:
        """`send`, then `receive`."""
        self.send(slots, actions, next_episodes)
        return self.receive(slots)

    def send(self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None) -> None:
        """Have slots execute a chunk each, and return at once.

        Args:
            slots: which; each must be playing an episode, with no chunk under way.
            actions: float32 `[B, C, D]` in the simulator's units.
            next_episodes: what slot `i` plays if its episode ends in this chunk, so that it is reset without another
                round trip; None (or no list at all): it stays as it ended and must be `reset` before it steps again.

        Raises:
            ValueError: wrong slots, actions or episodes.
            WorkerError: see the class.
        """
        index = self._idle(slots)
        over = index[self._needs_reset[index]]
        if len(over):
            raise ValueError(f"slots {over.tolist()} play no episode (none was started, or it ended): reset them first")
        chunk = self._checked_actions(index, actions)
        self._write_episodes(index, [None] * len(index) if next_episodes is None else next_episodes)
        self._arrays["actions"][index] = chunk
        for request, share in zip(self._request("step", index), self._shares(index), strict=True):
            for slot in share.slots:
                self._requests[slot] = request
        self._sent[index] = True

    def receive(self, slots: Slots) -> StepResult:
        """Wait for the chunks of these slots, which may have been sent in other groupings.

        Raises:
            ValueError: wrong slots, or one that nothing was sent to.
            WorkerError: see the class.
        """
        index = self._checked_slots(slots)
        idle = index[~self._sent[index]]
        if len(idle):
            raise ValueError(f"slots {idle.tolist()} have no chunk under way: send first")
        pending = {request for slot in index.tolist() if (request := self._requests[slot]) is not None}
        self._call(sorted(pending, key=lambda request: request.worker.spec.rank))
        self._requests = [None if request in pending else request for request in self._requests]
        self._sent[index] = False
        return self._result(index)

    def get_state(self, slots: Slots) -> list[bytes]:
        """One self-contained state per slot, for `set_state` of any manager of the same simulator.

        Raises:
            ValueError: wrong slots, or a chunk is under way.
            WorkerError: see the class.
        """
        index = self._idle(slots)
        by_slot: dict[int, bytes] = {}
        replies = self._call(self._request("get_state", index))
        for share, states in zip(self._shares(index), replies, strict=True):
            by_slot.update(zip(share.slots, states, strict=True))
        return [_STATE_HEAD.pack(self._steps[slot], self._needs_reset[slot]) + by_slot[slot] for slot in index.tolist()]

    def set_state(self, slots: Slots, states: Sequence[bytes]) -> None:
        """Continue slots from states of `get_state`, of these or other slots, in this or another run.

        Raises:
            ValueError: wrong slots or number of states, or a chunk is under way.
            WorkerError: see the class.
        """
        index = self._idle(slots)
        if len(states) != len(index):
            raise ValueError(f"got {len(states)} states for {len(index)} slots")
        by_slot = dict(zip(index.tolist(), states, strict=True))
        requests = []
        with self._noting_failure():
            for share in self._shares(index):
                bodies = [by_slot[slot][_STATE_HEAD.size :] for slot in share.slots]
                requests.append(share.worker.request("set_state", share.local, bodies, timeout=self._timeout))
        self._call(requests)
        for slot, state in by_slot.items():
            self._steps[slot], self._needs_reset[slot] = _STATE_HEAD.unpack_from(state)

    def observe(self, slots: Slots) -> Observation:
        """The current observations of slots.

        Raises:
            ValueError: wrong slots, or a chunk is under way.
            WorkerError: see the class.
        """
        index = self._idle(slots)
        self._call(self._request("observe", index))
        return self._observation(index)

    def render(self, slots: Slots) -> NDArray[np.uint8]:
        """Pictures of slots for people, uint8 `[B, H, W, 3]`. Not for the hot path.

        Raises:
            ValueError: wrong slots, or a chunk is under way.
            WorkerError: see the class.
        """
        index = self._idle(slots)
        pictures: dict[int, NDArray[np.uint8]] = {}
        replies = self._call(self._request("render", index))
        for share, frames in zip(self._shares(index), replies, strict=True):
            pictures.update(zip(share.slots, frames, strict=True))
        return np.stack([pictures[slot] for slot in index.tolist()])

    def close(self) -> None:
        """End the processes, within a few seconds whatever they are doing. Harmless when repeated."""
        self._closed = True
        self._launcher.stop(self.workers, timeout=_CLOSE_S if self._failure is None else _CLOSE_AFTER_FAILURE_S)
        if self._memory is not None:
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    # ---- talking to the processes

    def _shares(self, index: NDArray[np.int64]) -> list[_Share]:
        """The slots of a call by the process that serves them. Calls repeat themselves, so the answer is kept."""
        key = index.tobytes()
        shares = self._known_shares.get(key)
        if shares is None:
            if len(self._known_shares) >= _MAX_KNOWN_SHARES:
                self._known_shares.clear()
            by_rank: dict[int, list[int]] = {}
            for slot in sorted(index.tolist()):
                by_rank.setdefault(slot // self._share, []).append(slot)
            shares = [
                _Share(self.workers[rank], slots, tuple(slot % self._share for slot in slots))
                for rank, slots in by_rank.items()
            ]
            self._known_shares[key] = shares
        return shares

    def _request(self, method: str, index: NDArray[np.int64]) -> list[Request]:
        """Ask every process that serves some of the slots for `method(*slots)`; all of its slots are not spelt out."""
        with self._noting_failure():
            return [
                share.worker.request(
                    method, *(() if len(share.local) == self._share else share.local), timeout=self._timeout
                )
                for share in self._shares(index)
            ]

    def _call(self, requests: Sequence[Request]) -> list[Any]:
        with self._noting_failure():
            return self._launcher.gather(requests, timeout=self._timeout)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Whatever interrupts an exchange with the processes leaves it unfinished: the manager cannot be used after."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    # ---- what goes in

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("this EnvManager is closed")
        if self._failure is not None:
            what = (str(self._failure) or repr(self._failure)).splitlines()[0]
            raise RuntimeError(f"this EnvManager cannot go on after: {what}") from self._failure

    def _checked_slots(self, slots: Slots) -> NDArray[np.int64]:
        self._check_usable()
        index = np.asarray(slots, np.int64)
        numbers = index.tolist()
        if index.ndim != 1 or not numbers or len(set(numbers)) != len(numbers):
            raise ValueError(f"slots must be a list of different slots, got {list(slots)}")
        if min(numbers) < 0 or max(numbers) >= self.num_envs:
            raise ValueError(f"slots must be within 0..{self.num_envs - 1}, got {list(slots)}")
        return index

    def _idle(self, slots: Slots) -> NDArray[np.int64]:
        index = self._checked_slots(slots)
        busy = index[self._sent[index]]
        if len(busy):
            raise ValueError(f"slots {busy.tolist()} are busy with a chunk: receive it first")
        return index

    def _checked_actions(self, index: NDArray[np.int64], actions: ArrayLike) -> NDArray[np.float32]:
        chunk = np.asarray(actions, np.float32)
        want = (len(index), self.chunk_size, self.spec.action_dim)
        if chunk.shape != want:
            raise ValueError(f"actions: got shape {chunk.shape}, want [B, C, D] = {want}")
        if not np.isfinite(chunk).all():
            row, action, dim = np.argwhere(~np.isfinite(chunk))[0]
            raise ValueError(f"actions: slot {index[row]}, action {action}, dim {dim} is {chunk[row, action, dim]}")
        return chunk

    def _write_episodes(self, index: NDArray[np.int64], episodes: Sequence[EpisodeSpec | None]) -> None:
        if len(episodes) != len(index):
            raise ValueError(f"got {len(episodes)} episodes for {len(index)} slots")
        for slot, episode in zip(index.tolist(), episodes, strict=True):
            if episode is self._written[slot]:
                continue
            if episode is not None:
                self._write_episode(slot, episode)
            self._arrays["has_next"][slot] = episode is not None
            self._written[slot] = episode

    def _write_episode(self, slot: int, episode: EpisodeSpec) -> None:
        if episode.task not in self.spec.tasks:
            raise ValueError(f"slot {slot}: task {episode.task!r} is not one of {self._tasks}")
        self._arrays["next_task"][slot] = self._tasks.index(episode.task)
        for name in NEXT_FIELDS:
            self._arrays[f"next_{name}"][slot] = getattr(episode, name)

    # ---- what comes out

    @property
    def _arrays(self) -> Segment:
        assert self._memory is not None, "used before the start or after close"
        return self._memory

    def _result(self, index: NDArray[np.int64]) -> StepResult:
        arrays = {name: self._take(name, index) for name in ("rewards", "success", "terminated", "truncated", "steps")}
        self._check_finite("reward", arrays["rewards"], index, self._steps[index] + 1)
        self._steps[index] += arrays["steps"]
        ended = arrays["terminated"] | arrays["truncated"]
        was_reset = ended & self._arrays["has_next"][index]
        final = self._final_observation(index, was_reset) if was_reset.any() else None
        self._steps[index[was_reset]] = 0
        self._needs_reset[index] = ended & ~was_reset
        observation = self._observation(index)
        if final is not None:
            _copy_rows(observation, final, ~was_reset)
        return StepResult(observation=observation, final_observation=final or observation, **arrays)

    def _observation(self, index: NDArray[np.int64]) -> Observation:
        observation = self._take_observation("", index)
        if observation.proprio is not None:
            self._check_finite("observation.proprio", observation.proprio, index, self._steps[index])
        return observation

    def _final_observation(self, index: NDArray[np.int64], rows: NDArray[np.bool_]) -> Observation:
        """Last observations of the episodes after which slots were reset; the other rows are still to be filled in."""
        observation = self._take_observation("final_", index)
        if observation.proprio is not None:
            proprio = np.where(rows[:, None], observation.proprio, np.float32(0))
            self._check_finite("observation.proprio", proprio, index, self._steps[index])
        return observation

    def _take_observation(self, prefix: str, index: NDArray[np.int64]) -> Observation:
        return Observation(
            images=self._take(f"{prefix}images", index) if "images" in self._arrays else None,
            proprio=self._take(f"{prefix}proprio", index) if "proprio" in self._arrays else None,
            tasks=[self._sentences[task] for task in self._take(f"{prefix}task", index).tolist()],
        )

    def _take(self, name: str, index: NDArray[np.int64]) -> NDArray[Any]:
        """A copy of these rows."""
        return self._arrays[name].take(index, axis=0)

    def _check_finite(
        self, key: str, values: NDArray[np.float32], index: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> None:
        """Refuse NaN and infinities in `values`.

        Args:
            key: `reward`, with values `[B, C]` that are one control step apart, or another with values `[B, S]`.
            values: the numbers.
            index: the slots, `[B]`.
            steps: control step of each row's first number, `[B]`.
        """
        if np.isfinite(values).all():
            return
        row, column = (int(number) for number in np.argwhere(~np.isfinite(values))[0])
        step = int(steps[row]) + (column if key == "reward" else 0)
        self._refuse(int(index[row]), step, f"{key}{'' if key == 'reward' else f'[{column}]'}", values[row, column])

    def _refuse(self, slot: int, step: int, key: str, value: np.float32) -> NoReturn:
        worker = self.workers[slot // self._share]
        self._failure = InvalidResult(
            f"{worker}: {key} of slot {slot} is {value} at step {step} of its episode",
            role=worker.spec.role,
            rank=worker.spec.rank,
            pid=worker.pid,
        )
        raise self._failure


def _check_importable(config: EnvConfig) -> None:
    """Raise `UserError` if the simulator or its options are defined where its processes do not look."""
    target = SIMULATORS.entry(config.name).target if config.name in SIMULATORS else None
    for thing in (type(config), target):
        if getattr(thing, "__module__", None) == "__main__":
            raise UserError(
                f"{getattr(thing, '__name__', thing)} of simulator {config.name!r} is defined in the main script, "
                f"which simulator processes do not import: move it to a module of its own and name that under `plugins`"
            )


def _copy_rows(source: Observation, target: Observation, rows: NDArray[np.bool_]) -> None:
    """Copy some rows of an observation into another of the same shape."""
    if source.images is not None and target.images is not None:
        target.images[rows] = source.images[rows]
    if source.proprio is not None and target.proprio is not None:
        target.proprio[rows] = source.proprio[rows]
    target.tasks = [old if copy else new for old, new, copy in zip(source.tasks, target.tasks, rows, strict=True)]
