"""The interface of launchers and workers, and the errors of workers. `local.LocalLauncher` runs workers as processes of
this machine.

Every error's text starts with the worker: role, rank, pid and envs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from embodyrl.errors import RunError
from embodyrl.placement.plan import WorkerSpec

NO_REPLY: Final = object()
"""Stands for the reply to a request that is under way."""


class Worker(Protocol):
    """A running worker: an object in another process whose methods are called by name."""

    @property
    def spec(self) -> WorkerSpec:
        """Its place in the plan."""
        ...

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    def request(self, method: str, *args: object, fds: Sequence[int] = (), timeout: float = 60.0) -> Request:
        """Ask the worker to call `method(*args, *fds)` and return at once; it serves its requests in order.

        Args:
            method: a public method of the worker's object.
            args: small picklable arguments. Arrays go through shared memory.
            fds: file descriptors to hand over; the worker gets its own copies.
            timeout: longest time for handing over the message, and longest time for the reply once the worker has
                answered its earlier requests [s]; the latter is enforced by `Launcher.wait_any`.

        Raises:
            WorkerError: the worker is dead, or does not read its messages.
        """
        ...

    @property
    def is_idle(self) -> bool:
        """True if it has answered every request."""
        ...

    def raise_if_dead(self) -> None:
        """Check the process without waiting, also while nothing is asked of it.

        Raises:
            WorkerDied: it has ended.
        """
        ...

    def notify(self, method: str, *, timeout: float = 60.0) -> Request:
        """Ask the worker to call `on_notify()` of its object, and return at once. Costs a fraction of `request`.

        Args:
            method: its name in messages. Arguments travel through memory that both sides share.
            timeout: as in `request`.

        Raises:
            WorkerError: the worker is known to be dead.
            RuntimeError: the worker is not idle.
        """
        ...


@dataclass(eq=False, slots=True)
class Request:
    """A call that is under way."""

    worker: Worker
    id: int
    method: str
    timeout: float
    """As given to `Worker.request` [s]."""
    deadline: float
    """`time.monotonic()` at which the reply is late."""
    reply: Any = NO_REPLY
    """What came back, once it has arrived; `Launcher.gather` returns results."""


class Launcher(Protocol):
    """Starts workers, waits for them, ends them."""

    def start(
        self,
        specs: Sequence[WorkerSpec],
        factory: Callable[..., object],
        args: Sequence[tuple[Any, ...]],
        *,
        timeout: float,
    ) -> list[Worker]:
        """Start one worker per spec, all at once, and wait until all are ready.

        Args:
            specs: the workers' places in the plan.
            factory: importable callable that builds worker `i`'s object in its process from `args[i]`.
            args: picklable arguments, one tuple per worker.
            timeout: longest time until all of them are ready [s].

        Raises:
            WorkerError: one of them failed; none is left running.
        """
        ...

    def gather(self, requests: Sequence[Request], *, timeout: float) -> list[Any]:
        """Wait for the results of these requests; returns them in their order.

        Args:
            requests: each can be gathered once.
            timeout: longest time for all of them together [s].

        Raises:
            RemoteError: a method raised. The other requests are given up: their replies will be dropped.
            WorkerDied: a worker's process ended.
            WorkerTimeout: time is up; the workers that did not answer have been killed.
        """
        ...

    def wait_any(self, requests: Sequence[Request]) -> list[Request]:
        """Wait until at least one of these requests has its reply; returns all that have, in their order.

        Gathering those then takes no time. The others stay under way.

        Raises:
            RemoteError: a method raised.
            WorkerDied: a worker's process ended.
            WorkerTimeout: a reply is late (`Request.deadline`); its worker has been killed.
        """
        ...

    def stop(self, workers: Sequence[Worker], *, timeout: float = 5.0) -> None:
        """End these workers: ask them to, wait `timeout` [s] for all together, then kill. May be called again."""
        ...

    def close(self, *, timeout: float = 5.0) -> None:
        """End every worker that was started; see `stop`."""
        ...


class WorkerError(RunError):
    """Raised when a worker process failed to serve a request.

    Attributes:
        role, rank: its place in the plan.
        pid: its process id.
    """

    def __init__(self, message: str, *, role: str, rank: int, pid: int) -> None:
        super().__init__(message)
        self.role = role
        self.rank = rank
        self.pid = pid


class WorkerDied(WorkerError):
    """Raised when a worker's process ended; names signal or exit code, the last request and the end of its output."""


class MachineLost(WorkerDied):
    """Raised when a worker's machine is gone.

    Attributes:
        machine: its name.
    """

    def __init__(self, message: str, *, machine: str, role: str, rank: int, pid: int) -> None:
        super().__init__(message, role=role, rank=rank, pid=pid)
        self.machine = machine


class WorkerTimeout(WorkerError):
    """Raised when a worker did not answer in time and was killed; the text ends with the stacks of its threads."""


class RemoteError(WorkerError):
    """Raised when a method raised inside a worker, which lives on.

    Attributes:
        type_name: the class of the exception, for instance `ValueError`.
        remote_message: its text.
        remote_traceback: its traceback, as the worker would have printed it.
        is_user_error: True for an `embodyrl.errors.UserError`, whose text is enough for the user to fix the cause.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str,
        rank: int,
        pid: int,
        type_name: str,
        remote_message: str,
        remote_traceback: str,
        is_user_error: bool,
    ) -> None:
        super().__init__(message, role=role, rank=rank, pid=pid)
        self.type_name = type_name
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback
        self.is_user_error = is_user_error

    @property
    def for_people(self) -> str:
        """The text without the traceback if the user can fix the cause, else all of it."""
        return self.remote_message if self.is_user_error else str(self)
