"""What can go wrong with a worker process. Every text starts with the worker: role, rank, pid and slots."""

from __future__ import annotations

from embodyrl.errors import RunError


class WorkerError(RunError):
    """Raised when a worker process failed to do what it was asked.

    Attributes:
        role, rank: which worker of the plan it is.
        pid: its process id.
    """

    def __init__(self, message: str, *, role: str, rank: int, pid: int) -> None:
        super().__init__(message)
        self.role = role
        self.rank = rank
        self.pid = pid


class WorkerDied(WorkerError):
    """Raised when a worker's process ended: signal or exit code, last request and the end of its output are named."""


class WorkerTimeout(WorkerError):
    """Raised when a worker did not answer in time. It was killed; the text ends with the stacks it was hanging in."""


class RemoteError(WorkerError):
    """Raised when a method raised inside a worker, which lives on.

    Attributes:
        type_name: the class of the exception, for instance `ValueError`.
        remote_message: its text.
        remote_traceback: its traceback, as the worker would have printed it.
        is_user_error: whether it was an `embodyrl.errors.UserError`, whose text alone tells the user what to mend.
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
        """The text that tells what to mend, without the traceback, if the user can mend it."""
        return self.remote_message if self.is_user_error else str(self)
