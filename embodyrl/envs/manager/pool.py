"""The simulator processes of an EnvManager: started, called, replaced when they die, measured, ended. Checks that they
offer what the config asks for."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from embodyrl.config.schema import EnvConfig, OnWorkerDeath
from embodyrl.envs.manager.memory import Selection, Selections, SharedArrays
from embodyrl.envs.manager.worker import EnvWorker
from embodyrl.envs.types import SimulatorSpec
from embodyrl.errors import UserError
from embodyrl.placement.launcher import Launcher, Request, Worker, WorkerDied, WorkerError, WorkerTimeout
from embodyrl.placement.plan import WorkerSpec, inventory, plan_env_workers
from embodyrl.placement.topology import Gpu
from embodyrl.registry import SIMULATORS

GONE: Final = object()
"""Stands for the reply of a process that died and was replaced."""

PAUSE_S = 1.0
"""Pause between a death during the start and the next attempt [s]; every further death doubles it."""
LONGEST_PAUSE_S = 30.0
MORE_TIME: Final = "(env.step_timeout_s gives it more time, if it is only slow.)"


class TooManyDeaths(WorkerError):
    """Raised when simulator processes die more often than `env.max_restarts` allows."""


class WorkerPool:
    """The processes that serve the slots of a run, by rank.

    Args:
        config: the simulator, the number of processes, the deadlines, and `env.on_worker_death`.
        launcher: starts the processes.
        near: the GPU to which observations go.
        on_restart: called before a process that died is replaced.
        on_replaced: called with the slots of a process that died, once another one serves them; they play no episode.
    """

    workers: list[Worker]
    selections: Selections

    def __init__(
        self,
        config: EnvConfig,
        launcher: Launcher,
        near: Gpu | None,
        on_restart: Callable[[], None],
        on_replaced: Callable[[range], None],
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._on_restart = on_restart
        self._on_replaced = on_replaced
        self._plan = plan_env_workers(config, inventory(), near)
        self._memory: SharedArrays | None = None
        self.restarts = 0
        """Number of processes that died and were replaced in the run so far, at most `env.max_restarts`."""
        self.deaths: list[WorkerError] = []
        """Their errors, until `EnvManager.take_deaths` clears the list."""
        self.workers = []

    def start(self) -> None:
        """Start all processes; if `attach` was called before, they serve that memory."""
        specs = self._plan
        self.workers = self._launcher.start(
            specs, EnvWorker, [(spec, self._config) for spec in specs], timeout=self._config.startup_timeout_s
        )
        self.selections = Selections(self.workers)
        if self._memory is not None:
            self.attach(self._memory)

    def start_again(self) -> None:
        """Start all processes after `stop`; one that dies during its start is replaced like any other."""
        self._until_started(self.start)

    def attach(self, memory: SharedArrays) -> None:
        """Have all processes use this memory, also those that are started later."""
        self._memory = memory
        self._attach(self.workers)

    def _attach(self, workers: Sequence[Worker]) -> None:
        assert self._memory is not None
        layout, fd = self._memory.layout, self._memory.segment.fd
        self._gather([worker.request("attach", layout, fds=[fd]) for worker in workers])

    def call_all(self, method: str) -> list[Any]:
        """Return the reply of every process to `method()`."""
        return self._gather([worker.request(method) for worker in self.workers])

    def ask(self, method: str, chosen: Selection, bodies: Sequence[object] | None = None) -> list[Request | None]:
        """Request `method(*slots)`, or `method(slots, bodies[i])`, from every process that serves some of the slots.

        Returns:
            One request per share of the selection; None where the process was dead and has been replaced.
        """
        requests: list[Request | None] = []
        for number, share in enumerate(chosen.shares):
            arguments = share.arguments if bodies is None else (share.local, bodies[number])
            try:
                requests.append(share.worker.request(method, *arguments, timeout=self._config.step_timeout_s))
            except (WorkerDied, WorkerTimeout) as error:
                self._replace(error)
                requests.append(None)
        return requests

    def step(self, chosen: Selection) -> list[Request | None]:
        """Do what `ask("step", chosen)` does by doorbell: the slots are named in shared memory, beside their actions.

        A process that is still busy with a chunk of other slots gets a message instead, which waits for its turn.
        """
        assert self._memory is not None
        stepping, timeout = self._memory["stepping"], self._config.step_timeout_s
        requests: list[Request | None] = []
        for share in chosen.shares:
            worker = share.worker
            try:
                # A busy process may still have to read `stepping` for its present chunk.
                if worker.is_idle:
                    stepping[share.served] = share.mask
                    requests.append(worker.notify("step", timeout=timeout))
                else:
                    requests.append(worker.request("step", *share.arguments, timeout=timeout))
            except (WorkerDied, WorkerTimeout) as error:
                self._replace(error)
                requests.append(None)
        return requests

    def replies(self, requests: Sequence[Request | None]) -> list[Any]:
        """Return the replies to these requests; `GONE` for those of processes that died and have been replaced."""
        if self._config.on_worker_death is OnWorkerDeath.fail:
            return self._gather([request for request in requests if request is not None])
        # One by one, so that one death does not take the other replies with it; the deadline is that of all together.
        deadline = time.monotonic() + self._config.step_timeout_s
        return [self._reply(request, deadline) for request in requests]

    def _reply(self, request: Request | None, deadline: float) -> object:
        if request is None:
            return GONE
        try:
            return self._launcher.gather([request], timeout=max(0.0, deadline - time.monotonic()))[0]
        except (WorkerDied, WorkerTimeout) as error:
            self._replace(error)
            return GONE

    def any_replied(self, requests: Sequence[Request]) -> list[Request]:
        """Wait until at least one of these requests has its reply, or its process has died; returns all that have."""
        try:
            return self._launcher.wait_any(requests)
        except (WorkerDied, WorkerTimeout) as error:
            if self._config.on_worker_death is OnWorkerDeath.fail:
                if isinstance(error, WorkerTimeout):
                    error.add_note(MORE_TIME)
                raise
            # Their `replies` will meet the same error and replace the process.
            return [request for request in requests if request.worker.spec.rank == error.rank]

    def _gather(self, requests: Sequence[Request]) -> list[Any]:
        try:
            return self._launcher.gather(requests, timeout=self._config.step_timeout_s)
        except WorkerTimeout as error:
            error.add_note(MORE_TIME)
            raise

    def _replace(self, error: WorkerDied | WorkerTimeout) -> None:
        """Start another process in place of the one that died, if the config wants it and still allows it."""
        self._count(error)
        spec = self._plan[error.rank]
        self._until_started(lambda: self._start_one(spec))
        self._on_replaced(spec.slots)

    def _count(self, error: WorkerDied | WorkerTimeout) -> None:
        """Count a process that died; raises if it may not be replaced."""
        if self._config.on_worker_death is OnWorkerDeath.fail:
            raise error
        self.restarts += 1
        if self.restarts > self._config.max_restarts:
            raise TooManyDeaths(
                f"simulator processes died {self.restarts} times in this run, and env.max_restarts is "
                f"{self._config.max_restarts} (once they live, `embodyrl resume` may be given a larger one). "
                f"The last one: {error}",
                role=error.role,
                rank=error.rank,
                pid=error.pid,
            ) from error
        self.deaths.append(error)
        self._on_restart()

    def _until_started(self, start: Callable[[], None]) -> None:
        """Call `start` until no process dies meanwhile. Each of these deaths counts, so `env.max_restarts` ends it."""
        for failed in itertools.count():
            try:
                return start()
            except (WorkerDied, WorkerTimeout) as error:
                self._count(error)
            # The cause, such as full memory, may pass: exponential backoff.
            time.sleep(min(PAUSE_S * 2**failed, LONGEST_PAUSE_S))

    def _start_one(self, spec: WorkerSpec) -> None:
        """Start a process in place of another one, which may still hang."""
        self._launcher.stop([self.workers[spec.rank]], timeout=0.0)
        [worker] = self._launcher.start(
            [spec], EnvWorker, [(spec, self._config)], timeout=self._config.startup_timeout_s
        )
        self.workers[spec.rank] = worker
        self.selections = Selections(self.workers)
        self._attach([worker])

    def unique_memory(self) -> int:
        """Return the bytes of memory that only these processes use (USS); one that has died uses none."""
        # Resident size would count the packages that all forked processes share once for each of them.
        import psutil

        total = 0
        for worker in self.workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += psutil.Process(worker.pid).memory_full_info().uss
        return total

    def stop(self, timeout: float) -> None:
        """End the processes: ask them to, wait `timeout` [s] for all together, then kill. May be called again."""
        self._launcher.stop(self.workers, timeout=timeout)


def with_task_descriptions(spec: SimulatorSpec, descriptions: Mapping[str, str]) -> SimulatorSpec:
    """Return a simulator's spec with other task descriptions for some of its tasks.

    Raises:
        UserError: there is no such task, or another task has the same description, so that the simulator's description
            does not identify the task that it plays.
    """
    own = list(spec.tasks.values())
    for task in descriptions:
        if task not in spec.tasks:
            raise UserError(f"env.task_descriptions: no task {task!r} is played (env.tasks: {', '.join(spec.tasks)})")
        if own.count(spec.tasks[task]) > 1:
            same = [name for name, description in spec.tasks.items() if description == spec.tasks[task]]
            raise UserError(
                f"env.task_descriptions: the simulator has the same task description for {' and '.join(same)}, so that "
                "none of them can get one of its own: play them in separate runs"
            )
    return dataclasses.replace(spec, tasks={**spec.tasks, **descriptions})


def check_images_shown(config: EnvConfig, spec: SimulatorSpec) -> None:
    """Raise `UserError` if `env.cameras` or `env.image_size` is not what the simulator shows."""
    if config.cameras and list(spec.cameras) != config.cameras:
        raise UserError(
            f"env.cameras is {config.cameras}, but simulator {config.name!r} shows "
            f"{list(spec.cameras) or 'no images'}: name what it shows, or set env.cameras to []"
        )
    if config.cameras and list(spec.image_size) != config.image_size:
        raise UserError(
            f"env.image_size is {config.image_size}, but simulator {config.name!r} declares SimulatorSpec.image_size = "
            f"{spec.image_size} (height, width): declare tuple(config.image_size), and render or resize to it"
        )


def check_importable(config: EnvConfig) -> None:
    """Raise `UserError` if the simulator or its options are defined in the main script, which no process imports."""
    target = SIMULATORS.entry(config.name).target if config.name in SIMULATORS else None
    for thing in (type(config), target):
        if getattr(thing, "__module__", None) == "__main__":
            raise UserError(
                f"{getattr(thing, '__name__', thing)} of simulator {config.name!r} is defined in the main script, "
                f"which simulator processes do not import: move it to a module of its own and name that under `plugins`"
            )
