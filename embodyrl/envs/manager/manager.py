"""EnvManager: the simulated environments of a run, in processes of their own.

Shapes: `B` slots of a call, `C` actions in a chunk, `D` action dims. The manager knows nothing about tasks or learning:
the caller chooses the episode of each slot, when it steps and with which actions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodyrl.config.schema import EnvConfig
from embodyrl.envs.manager.memory import (
    RESULTS,
    Reader,
    Selection,
    SharedArrays,
    Slots,
    StepResult,
    Work,
    Writer,
    find_not_finite,
    layout,
)
from embodyrl.envs.manager.pool import GONE, WorkerPool, check_images_shown, check_importable, with_task_descriptions
from embodyrl.envs.types import EpisodeSpec, Observation, SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.files import Closing
from embodyrl.placement.launcher import Launcher, RemoteError, Request, Worker, WorkerError
from embodyrl.placement.local import LocalLauncher
from embodyrl.placement.topology import Gpu

T = TypeVar("T")

_CLOSE_S = 5.0
"""How long simulators may take to close before they are killed [s]."""
_CLOSE_AFTER_FAILURE_S = 1.0

_STATE_HEAD = struct.Struct("<q??")
"""Control steps of the episode, whether it is over, whether it was lost."""


class InvalidResult(WorkerError):
    """Raised when a simulator returned a reward or an observation that is NaN or infinite; names env and step."""


class EnvManager(Closing):
    """Starts the simulator processes and serves their slots.

    Arguments are copied, and arrays in results belong to the caller, except for images: those of consecutive slots are
    a view of the memory that simulators draw into. Each slot has two image buffers, which take turns, so an observation
    stays valid while the chunk chosen for it is simulated: until the second next `send`, `reset` or `observe` of one of
    its slots. Copy what is to last longer.

    A process that dies or hangs ends the run, or is replaced (`env.on_worker_death`). Then the episodes of its slots
    are lost: `StepResult.lost` is True in the next result of each, and nothing continues from an earlier state. The
    episode of a slot that is not restored bit for bit from its saved state is lost too. After any other `WorkerError`
    (a simulator raised, or a result was not finite) only `close` still works.

    Args:
        config: the simulator, the number of slots and of processes, and the deadlines.
        chunk_size: `C`, actions per step.
        every_step: keep the observation after every action (`StepResult.step_images`, `step_proprio`).
        plugins: modules that the processes import first.
        plugin_path: folder with such modules, besides what is installed.
        log_dir: folder for the processes' output; None: kept only while they run.
        launcher: starts the processes; None: on this machine. If given, the three above are not used.
        near: the GPU to which observations go, so that processes run close to it.
        on_restart: called during a call before a process that died is replaced, which may take
            `env.startup_timeout_s`.

    Raises:
        UserError: the slots cannot be divided evenly among the processes, or the simulator cannot be built for a reason
            that the user can fix.
        WorkerError: a process failed to start.
    """

    spec: SimulatorSpec
    """What the simulator offers; the same for all slots."""
    num_envs: int
    """Slots, numbered 0 .. num_envs-1."""

    def __init__(
        self,
        config: EnvConfig,
        *,
        chunk_size: int,
        every_step: bool = False,
        plugins: Sequence[str] = (),
        plugin_path: str | None = None,
        log_dir: Path | None = None,
        launcher: Launcher | None = None,
        near: Gpu | None = None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_envs = config.num_envs
        self.chunk_size = chunk_size
        self._every_step = every_step
        self._noting_failure = _NotingFailure()
        self._closed = False
        self._pool: WorkerPool | None = None
        self._memory: SharedArrays | None = None
        self._requests: list[Request | None] = [None] * self.num_envs
        self._sent = np.zeros(self.num_envs, bool)
        self._lost = np.zeros(self.num_envs, bool)
        """Mask of the slots whose episode was lost, until the next result reports it."""
        self._mismatches: list[int] = []
        self._offloaded: dict[int, bytes] | None = None
        """States of the slots that were playing when `offload` ended the processes; None while the processes run."""
        self._needs_reset = np.ones(self.num_envs, bool)
        self._steps = np.zeros(self.num_envs, np.int64)
        self._work_taken = np.zeros(2)
        try:
            check_importable(config)
            launcher = launcher or LocalLauncher(plugins=plugins, plugin_path=plugin_path, log_dir=log_dir)
            self._start(config, launcher, near, on_restart)
        except BaseException as error:
            # Also on Ctrl-C: the caller gets no object that could end the processes that have started.
            self.close()
            if isinstance(error, RemoteError) and error.is_user_error:
                raise UserError(error.remote_message) from None
            raise

    def _start(self, config: EnvConfig, launcher: Launcher, near: Gpu | None, on_restart: Callable[[], None]) -> None:
        # The memory is laid out by what the simulator offers, which only the started processes know.
        pool = self._pool = WorkerPool(config, launcher, near, on_restart, self._lose)
        pool.start()
        self.spec = with_task_descriptions(self._agreed_spec(pool), config.task_descriptions)
        check_images_shown(config, self.spec)
        memory = self._memory = SharedArrays.create(
            layout(self.spec, self.num_envs, self.chunk_size, every_step=self._every_step)
        )
        self._reader, self._writer = (
            Reader(memory, list(self.spec.tasks.values())),
            Writer(memory, list(self.spec.tasks)),
        )
        pool.attach(memory)

    @staticmethod
    def _agreed_spec(pool: WorkerPool) -> SimulatorSpec:
        specs: list[SimulatorSpec] = pool.call_all("simulator_spec")
        for worker, spec in zip(pool.workers, specs, strict=True):
            if spec != specs[0]:
                raise RuntimeError(
                    f"{worker} offers another simulator than {pool.workers[0]}: {spec} against {specs[0]}"
                )
        return specs[0]

    @property
    def workers(self) -> list[Worker]:
        """The processes, by rank."""
        return self._processes.workers

    def reset(self, slots: Slots, episodes: Sequence[EpisodeSpec]) -> Observation:
        """Start `episodes[i]` in slot `slots[i]`, whatever it was playing; returns the first observations, in that
        order.

        Raises:
            ValueError: wrong slots or episodes.
            WorkerError: see the class.
        """
        chosen = self._idle(slots)
        for slot, episode in zip(chosen.numbers, episodes, strict=False):
            if episode is None:
                raise ValueError(f"env {slot}: got no episode")
        self._writer.episodes(chosen, episodes)
        self._writer.turn_images(chosen)
        self._begin(chosen)
        return self._observation(chosen)

    def _begin(self, chosen: Selection) -> None:
        """Start the episodes that are written in `next_*`; repeated in the slots of a process that dies meanwhile."""
        self._lost[chosen.index] = False
        self._steps[chosen.index] = 0
        # Until the reset has succeeded there is no episode to lose, so a death here marks nothing as lost.
        self._needs_reset[chosen.index] = True
        left: Selection | None = chosen
        while left is not None:
            replies = self._call("reset", left)
            again = [share.slots for share, reply in zip(left.shares, replies, strict=True) if reply is GONE]
            left = self._find([slot for slots in again for slot in slots]) if again else None
        self._needs_reset[chosen.index] = False

    def step(
        self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> StepResult:
        """Execute a chunk in each slot and wait for the result: `send` and `receive` in one."""
        # Without the bookkeeping of requests by slot that `send` and `receive` need: this is the loop of lockstep.
        chosen = self._prepare(slots, actions, next_episodes)
        playing = self._still_playing(chosen)
        if playing is not None:
            with self._noting_failure:
                self._processes.replies(self._processes.step(playing))
        return self._result(chosen)

    def send(self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None) -> None:
        """Start executing a chunk in each slot, and return at once.

        Args:
            slots: each must be playing an episode, with no chunk under way.
            actions: float32 `[B, C, D]` in the simulator's units.
            next_episodes: the episode that slot `i` begins if its present one ends in this chunk, so that it is reset
                without another round trip. None (or no list at all): it must be `reset` before it steps again.

        Raises:
            ValueError: wrong slots, actions or episodes.
            WorkerError: see the class.
        """
        chosen = self._prepare(slots, actions, next_episodes)
        self._sent[chosen.index] = True
        playing = self._still_playing(chosen)
        if playing is None:
            return
        with self._noting_failure:
            requests = self._processes.step(playing)
        # One request serves all slots of a process, which may be received in other groupings. A slot whose process was
        # dead and has been replaced has none, and is lost.
        for request, share in zip(requests, playing.shares, strict=True):
            for slot in share.slots:
                self._requests[slot] = request

    def receive(self, slots: Slots) -> StepResult:
        """Wait for the chunks of these slots, which may have been sent in other groupings.

        Raises:
            ValueError: wrong slots, or one that nothing was sent to.
            WorkerError: see the class.
        """
        chosen = self._find(slots)
        if False in self._sent[chosen.index].tolist():
            idle = chosen.index[~self._sent[chosen.index]]
            raise ValueError(f"envs {idle.tolist()} have no chunk under way: send first")
        requests = dict.fromkeys([self._requests[slot] for share in chosen.shares for slot in share.slots])
        if pending := [request for request in requests if request is not None]:
            self._finish(pending)
        self._sent[chosen.index] = False
        return self._result(chosen)

    def receive_ready(self, at_least: int) -> tuple[NDArray[np.int64], StepResult]:
        """Wait until at least `at_least` slots have executed the chunks that were sent, and receive all that have.

        Chunks that were sent to several slots of a process at once are ready at the same time. The deadline of each
        chunk counts from when its process began with it, so a slot that hangs is noticed while others continue.

        Returns:
            The slots' numbers, ascending, and the result in that order.

        Raises:
            ValueError: fewer slots have a chunk under way.
            WorkerError: see the class.
        """
        self._check_usable()
        under_way = np.flatnonzero(self._sent)
        if not 1 <= at_least <= len(under_way):
            raise ValueError(f"cannot wait for {at_least} envs: {len(under_way)} have a chunk under way")
        while True:
            ready = [slot for slot in under_way.tolist() if self._requests[slot] is None]
            if len(ready) >= at_least:
                return np.array(ready), self.receive(ready)
            pending = list(dict.fromkeys(request for request in self._requests if request is not None))
            with self._noting_failure:
                answered = self._processes.any_replied(pending)
            self._finish(answered)

    def step_recorded(
        self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None = None
    ) -> tuple[StepResult, list[NDArray[np.uint8]]]:
        """Step as `step` does, and record a video: images for people after every executed action, before any reset.

        Trajectories are those of `step`. It costs an image and a copy through a pipe for every action.

        Returns:
            The result, and images uint8 `[steps[i], H, W, 3]` for slot `slots[i]`.

        Raises:
            ValueError: see `send`.
            WorkerError: see the class.
        """
        chosen = self._prepare(slots, actions, next_episodes)
        playing = self._still_playing(chosen)
        videos = {} if playing is None else self._by_slot(playing, self._call("step_recorded", playing))
        nothing = np.zeros((0, 1, 1, 3), np.uint8)
        return self._result(chosen), [videos.get(slot, nothing) for slot in chosen.numbers]

    def get_state(self, slots: Slots) -> list[bytes]:
        """Return one self-contained state per slot, for `set_state` of any manager of the same simulator.

        The state of a slot whose episode was lost holds only that fact.

        Raises:
            ValueError: wrong slots, or a chunk is under way.
            WorkerError: see the class.
        """
        chosen = self._idle(slots)
        playing = self._still_playing(chosen)
        states = {} if playing is None else self._by_slot(playing, self._call("get_state", playing))
        return [
            _STATE_HEAD.pack(self._steps[slot], self._needs_reset[slot], self._lost[slot]) + states.get(slot, b"")
            for slot in chosen.numbers
        ]

    def set_state(self, slots: Slots, states: Sequence[bytes]) -> list[int]:
        """Continue slots from states of `get_state`, of these or other slots, in this or another run.

        Returns:
            The slots that were not restored bit for bit; their episodes are lost.

        Raises:
            ValueError: wrong slots or number of states, or a chunk is under way.
            WorkerError: see the class.
        """
        chosen = self._idle(slots)
        if len(states) != len(chosen.numbers):
            raise ValueError(f"got {len(states)} states for {len(chosen.numbers)} envs")
        by_slot = dict(zip(chosen.numbers, states, strict=True))
        for slot, state in by_slot.items():
            self._steps[slot], self._needs_reset[slot], self._lost[slot] = _STATE_HEAD.unpack_from(state)
        playing = self._still_playing(chosen)
        if playing is None:
            return []
        bodies = [[by_slot[slot][_STATE_HEAD.size :] for slot in share.slots] for share in playing.shares]
        # A process answers with the slots, as it numbers them, whose restored state differs from the saved one. A slot
        # between two episodes has nothing to lose.
        replies = self._call("set_state", playing, bodies)
        different = [
            slot
            for share, reply in zip(playing.shares, replies, strict=True)
            for slot, local in zip(share.slots, share.local, strict=True)
            if reply is not GONE and local in reply and not self._needs_reset[slot]
        ]
        self._lost[different] = True
        self._mismatches += different
        return different

    def observe(self, slots: Slots) -> Observation:
        """Return the current observations of slots.

        Raises:
            ValueError: wrong slots, or a chunk is under way.
            WorkerError: see the class.
        """
        chosen = self._idle(slots)
        playing = self._still_playing(chosen)
        if playing is not None:
            self._writer.turn_images(playing)
            self._call("observe", playing)
        return self._observation(chosen)

    def render(self, slots: Slots) -> NDArray[np.uint8]:
        """Return images of slots for people, uint8 `[B, H, W, 3]`; too slow for every step.

        Raises:
            ValueError: wrong slots, or a chunk is under way.
            WorkerError: see the class.
        """
        chosen = self._idle(slots)
        images = self._by_slot(chosen, self._call("render", chosen))
        missing = [slot for slot in chosen.numbers if slot not in images]
        if missing:
            raise RuntimeError(f"envs {missing} have no image: their episodes were lost with their process")
        return np.stack([images[slot] for slot in chosen.numbers])

    def show(self, slots: Slots, states: Sequence[bytes]) -> Observation:
        """Return what the simulators show of states, even if they do not show what they did when these were saved.

        Raises:
            ValueError, WorkerError: see `set_state`.
        """
        different = self.set_state(slots, states)
        self._lost[different] = False  # nobody continues from here
        return self.observe(slots)

    def renderer_names(self) -> dict[str, str]:
        """Return what the first process renders images with, once it has: see `envs.images`.

        Raises:
            ValueError: a chunk is under way.
            WorkerError: see the class.
        """
        self._idle([0])
        with self._noting_failure:
            found: dict[str, str] = self._processes.call_all("renderer_names")[0]
        return found

    def offload(self) -> int:
        """Save the states of all slots that play, and end the processes until they are needed again.

        Returns:
            Bytes of memory that this frees: those that only these processes used. 0 if they had ended before.

        Raises:
            ValueError: a chunk is under way.
            WorkerError: see the class.
        """
        if self._offloaded is not None:
            return 0
        playing = np.flatnonzero(~self._needs_reset)
        states = self.get_state(playing) if len(playing) else []
        freed = self._processes.unique_memory()
        self._processes.stop(_CLOSE_S)
        self._offloaded = dict(zip(playing.tolist(), states, strict=True))
        return freed

    def onload(self) -> None:
        """Start the processes again and continue bit for bit where `offload` stopped; an episode that cannot be
        restored so is lost. Every other method calls it when needed; calling it only chooses the moment.

        Raises:
            WorkerError: see the class.
        """
        # Cleared first: `set_state` below looks slots up, which calls this method again.
        states, self._offloaded = self._offloaded, None
        if states is None:
            return
        with self._noting_failure:
            self._processes.start_again()
        if states:
            self.set_state(list(states), list(states.values()))

    def take_deaths(self) -> list[WorkerError]:
        """Return the errors of processes that died and were replaced since the last call."""
        deaths, self._processes.deaths = self._processes.deaths, []
        return deaths

    def take_mismatches(self) -> list[int]:
        """Return the slots that were not restored bit for bit since the last call; one entry each time."""
        mismatches, self._mismatches = self._mismatches, []
        return mismatches

    def count_restarts(self, restarts: int) -> None:
        """Set how many processes were replaced in the run so far, by all ranks; `env.max_restarts` limits them."""
        self._processes.restarts = restarts

    def take_work(self) -> Work:
        """Return the processes' working time since the last call."""
        total = self._arrays["work"][:, :2].sum(0)
        busy, rendering = (total - self._work_taken).tolist()
        self._work_taken = total
        return Work(busy_s=busy, rendering_s=rendering)

    def close(self) -> None:
        """End the processes, within a few seconds even if they hang. May be called again."""
        self._closed = True
        if self._pool is not None:
            self._pool.stop(_CLOSE_S if self._failure is None else _CLOSE_AFTER_FAILURE_S)
        if self._memory is not None:
            self._memory.close()

    # ---- talking to the processes

    @property
    def _processes(self) -> WorkerPool:
        assert self._pool is not None, "used before the start"
        return self._pool

    def _call(self, method: str, chosen: Selection, bodies: Sequence[object] | None = None) -> list[Any]:
        """Call a method in every process that serves some of the slots; returns their replies, `GONE` for a process
        that died and was replaced."""
        with self._noting_failure:
            return self._processes.replies(self._processes.ask(method, chosen, bodies))

    def _finish(self, requests: Sequence[Request]) -> None:
        """Wait for chunks that are under way."""
        with self._noting_failure:
            self._processes.replies(requests)
        self._requests = [None if request in requests else request for request in self._requests]

    def _lose(self, slots: range) -> None:
        """Mark the episodes of a process that died and was replaced as lost."""
        for slot in slots:
            self._lost[slot] = not self._needs_reset[slot]

    def _still_playing(self, chosen: Selection) -> Selection | None:
        """Return the slots whose episode was not lost; None if there are none."""
        lost = self._lost[chosen.index]
        # For a few booleans `in` on a list is cheaper than a reduction; every call comes here.
        if True not in lost.tolist():
            return chosen
        return None if lost.all() else self._find(chosen.index[~lost])

    @staticmethod
    def _by_slot(chosen: Selection, replies: Sequence[Sequence[T]]) -> dict[int, T]:
        """Return the processes' replies by slot, without those of processes that died."""
        found: dict[int, T] = {}
        for share, values in zip(chosen.shares, replies, strict=True):
            if values is not GONE:
                found.update(zip(share.slots, values, strict=True))
        return found

    # ---- what goes in

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("this EnvManager is closed")
        if self._failure is not None:
            what = (str(self._failure) or repr(self._failure)).splitlines()[0]
            raise RuntimeError(f"this EnvManager cannot continue after: {what}") from self._failure

    @property
    def _failure(self) -> BaseException | None:
        return self._noting_failure.failure

    def _find(self, slots: Slots) -> Selection:
        self._check_usable()
        self.onload()
        return self._processes.selections.find(slots)

    def _idle(self, slots: Slots) -> Selection:
        chosen = self._find(slots)
        if True in self._sent[chosen.index].tolist():
            busy = chosen.index[self._sent[chosen.index]]
            raise ValueError(f"envs {busy.tolist()} are busy with a chunk: receive it first")
        return chosen

    def _prepare(
        self, slots: Slots, actions: ArrayLike, next_episodes: Sequence[EpisodeSpec | None] | None
    ) -> Selection:
        """Check and write the arguments of `send`; returns the slots."""
        chosen = self._idle(slots)
        index = chosen.index
        if True in self._needs_reset[index].tolist():
            over = index[self._needs_reset[index]].tolist()
            raise ValueError(f"envs {over} play no episode (none was started, or it ended): reset them first")
        # Actions are checked before anything is written, so that a refused call leaves the envs ready to step.
        chunk = self._writer.checked_actions(index, actions)
        self._writer.episodes(chosen, [None] * len(index) if next_episodes is None else next_episodes)
        self._arrays["actions"][index] = chunk
        self._writer.turn_images(chosen)
        return chosen

    # ---- what comes out

    @property
    def _arrays(self) -> SharedArrays:
        assert self._memory is not None, "used before the start or after close"
        return self._memory

    def _clear_lost(self, chosen: Selection) -> NDArray[np.bool_]:
        """Clear the results of slots whose episode was lost and start their next one; returns their mask `[B]`."""
        lost: NDArray[np.bool_] = self._lost[chosen.index]
        if True in lost.tolist():
            # The shared memory still holds the chunk before, or what the process wrote before it died.
            slots = chosen.index[lost]
            for name in RESULTS:
                self._arrays[name][slots] = 0
            self._lost[slots], self._needs_reset[slots] = False, True
            following = slots[self._arrays["has_next"][slots]]
            if len(following):
                self._begin(self._find(following))
        return lost

    def _result(self, chosen: Selection) -> StepResult:
        lost = self._clear_lost(chosen)
        index, records = chosen.index, self._reader.records(chosen)
        ended = records["terminated"] | records["truncated"]
        # The worker has reset these slots itself: `observation` is the next episode's first one, and the last one of
        # the episode that ended is in `final_*`.
        was_reset = ended & self._arrays["has_next"][index]
        self._check_finite(chosen, records, was_reset)
        self._steps[index] += records["steps"]
        observation = final = self._reader.observation(chosen, records)
        if True in ended.tolist():
            self._steps[index[was_reset]] = 0
            self._needs_reset[index[ended & ~was_reset]] = True
            if was_reset.any():
                final = self._reader.final_observation(chosen, records, observation, was_reset)
        small = {name: records[name] for name in RESULTS}
        kept = self._reader.step_observations(chosen)
        return StepResult(observation=observation, final_observation=final, lost=lost, **small, **kept)

    def _observation(self, chosen: Selection) -> Observation:
        records = self._reader.records(chosen)
        self._check_finite(chosen, records, None)
        return self._reader.observation(chosen, records)

    def _check_finite(self, chosen: Selection, records: NDArray[Any], was_reset: NDArray[np.bool_] | None) -> None:
        """Raise `InvalidResult` if a reward or an observation is not finite. `was_reset` is a mask `[B]` after a step,
        None after anything else."""
        bad = find_not_finite(records)
        if bad is None:
            return
        slot = chosen.numbers[bad.row]
        key, step = f"observation.proprio[{bad.column}]", int(self._steps[slot])
        if bad.field == "rewards":
            key, step = "reward", step + bad.column + 1
        elif was_reset is not None:
            of_next_episode = was_reset[bad.row] and bad.field == "proprio"
            step = 0 if of_next_episode else step + int(records["steps"][bad.row])
        worker = self._processes.selections.worker_of(slot)
        error = self._noting_failure.failure = InvalidResult(
            f"{worker}: {key} of env {slot} is {bad.value} at step {step} of its episode",
            role=worker.spec.role,
            rank=worker.spec.rank,
            pid=worker.pid,
        )
        raise error


class _NotingFailure:
    """A `with` block around exchanges with the processes that keeps the error that interrupted one. Replies that were
    not read would be taken for those of the next request, so the manager cannot be used afterwards."""

    failure: BaseException | None = None

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            self.failure = error
