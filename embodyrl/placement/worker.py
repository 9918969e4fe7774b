"""One worker process, seen from its parent: its requests, its replies, and how it ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import time
from collections.abc import Sequence
from typing import IO, Any, Generic, TypeVar

from embodyrl.placement.channel import Call, Channel, Failure, decode_reply, encode_call
from embodyrl.placement.child import STACKS_SIGNAL
from embodyrl.placement.launcher import RemoteError, Request, WorkerDied, WorkerError, WorkerTimeout
from embodyrl.placement.plan import WorkerSpec
from embodyrl.placement.process import EXIT_S, STACKS_S, Process, end_of

W = TypeVar("W")


class Ears(Generic[W]):
    """All file descriptors on which workers report, in one epoll set that lives as long as the workers.

    Pipes and process ends always wake the parent. The answer to a ring does so only if `wake_for` was called for it, so
    that the parent can sleep until the slowest of several workers is done.
    """

    _epoll: select.epoll
    """Open while there are workers."""

    def __init__(self) -> None:
        self._owners: dict[int, W] = {}
        self._answers: dict[W, int] = {}
        self._armed: set[int] = set()

    def add(self, worker: W, answer: int, always: Sequence[int]) -> None:
        """Listen to this worker from now on."""
        if not self._owners:
            self._epoll = select.epoll()
        for fd in always:
            self._epoll.register(fd, select.EPOLLIN)
        # Registered without an event: silent until `wake_for` arms it, which costs one call and no new registration.
        self._epoll.register(answer, select.EPOLLONESHOT)
        self._owners |= dict.fromkeys([answer, *always], worker)
        self._answers[worker] = answer

    def remove(self, worker: W) -> None:
        """Stop listening to this worker; to be called before its file descriptors are closed."""
        self._armed.discard(self._answers.pop(worker))
        for fd in [fd for fd, owner in self._owners.items() if owner is worker]:
            self._epoll.unregister(fd)
            del self._owners[fd]
        if not self._owners:
            self._epoll.close()

    def wake_for(self, worker: W) -> None:
        """Let the next `listen` end when this worker answers its ring."""
        fd = self._answers[worker]
        if fd not in self._armed:
            self._epoll.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)
            self._armed.add(fd)

    def listen(self, timeout: float) -> tuple[list[W], bool]:
        """Wait up to `timeout` [s].

        Returns:
            The workers that sent a message or ended (answers to rings are not among them), and whether anything
            happened.
        """
        said: dict[W, None] = {}
        events = self._epoll.poll(max(0.0, timeout)) if self._owners else []
        for fd, _ in events:
            if fd in self._armed:
                self._armed.discard(fd)
            else:
                said[self._owners[fd]] = None
        return list(said), bool(events)


class LocalWorker:
    """One worker process, seen from its parent. See `launcher.Worker`."""

    def __init__(
        self, spec: WorkerSpec, process: Process, channel: Channel, log: IO[bytes], ears: Ears[LocalWorker]
    ) -> None:
        self._spec = spec
        self._process = process
        self._channel = channel
        self._log = log
        self._ears = ears
        ears.add(self, channel.answer_fd, [fd for fd in (channel.fileno(), process.exit_fd) if fd is not None])
        self._numbers = itertools.count(1)
        self._replies: dict[int, Any] = {}
        self._awaited: set[int] = set()
        self._rung: int | None = None
        """Number of the ring that is not answered yet, even if no request waits for it any more."""
        self._last_method = "start"
        self._last_deadline = 0.0
        self._end: WorkerError | None = None
        self._is_gone = False

    @property
    def spec(self) -> WorkerSpec:
        """Its place in the plan."""
        return self._spec

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def __str__(self) -> str:
        slots = self._spec.slots
        served = f", envs {slots[0]}..{slots[-1]}" if len(slots) > 1 else f", env {slots[0]}" if slots else ""
        return f"{self._spec.label} (pid {self.pid}{served})"

    def request(self, method: str, *args: object, fds: Sequence[int] = (), timeout: float = 60.0) -> Request:
        """Request a call; see `launcher.Worker.request`."""
        self.raise_if_ended()
        # The worker serves its requests in order: the clock of this one starts when the one before it must be done.
        start = time.monotonic()
        if self._awaited:
            start = max(start, self._last_deadline)
        request = Request(self, next(self._numbers), method, timeout, start + timeout)
        try:
            message = encode_call(Call(request.id, len(fds), method, args))
            self._channel.send(message, fds=fds, timeout=timeout)
        except TimeoutError:
            raise late({self: [request]}, timeout) from None
        except OSError:
            raise self.died() from None
        return self._noted(request)

    @property
    def is_idle(self) -> bool:
        """True if it has answered every request; see `launcher.Worker`."""
        return not self._awaited and self._rung is None

    def ring(self, method: str, *, timeout: float = 60.0) -> Request:
        """Request `on_ring` by doorbell; see `launcher.Worker.ring`."""
        self.raise_if_ended()
        if not self.is_idle:
            raise RuntimeError(f"{self} is busy with {self._last_method!r}: a ring would overtake it")
        request = Request(self, next(self._numbers), method, timeout, time.monotonic() + timeout)
        self._channel.ring(request.id)
        self._rung = request.id
        return self._noted(request)

    def _noted(self, request: Request) -> Request:
        self._last_method, self._last_deadline = request.method, request.deadline
        self._awaited.add(request.id)
        return request

    def has_reply(self, number: int) -> bool:
        """Return whether the reply to this request has arrived."""
        return number in self._replies

    def has_failed(self, number: int) -> bool:
        """Return whether the reply to this request has arrived and reports that the method raised."""
        return isinstance(self._replies.get(number), Failure)

    def take_reply(self, request: Request) -> Any:
        """Return the result of a request whose reply has arrived.

        Raises:
            RemoteError: the method raised.
        """
        value = self._replies.pop(request.id)
        if isinstance(value, Failure):
            raise self._remote_error(request.method, value)
        return value

    def forget(self, number: int) -> None:
        """Drop the reply to this request, now or when it arrives."""
        self._awaited.discard(number)
        self._replies.pop(number, None)

    @property
    def is_rung(self) -> bool:
        """True while a ring is not answered."""
        return self._rung is not None

    def hear_answer(self) -> None:
        """File the answer to a ring, if it has arrived.

        Raises:
            WorkerDied: it answers another ring, so the worker was killed.
        """
        number = self._channel.take_answer()
        if number is None:
            return
        if number != self._rung:
            raise self._babbled(ValueError(f"answer {number} to ring {self._rung}"))
        self._file(number, None)

    def _file(self, number: int, value: object) -> None:
        if number == self._rung:
            self._rung = None
        if number in self._awaited:
            self._awaited.discard(number)
            self._replies[number] = value

    def pump(self) -> None:
        """File the replies that have arrived; those to requests that were given up are dropped.

        Raises:
            WorkerDied: the bytes that arrived are no reply, so the worker was killed.
        """
        # Native code that prints to a wrong file descriptor may write into the pipe, hence the check of every frame.
        while self._channel.fill():
            pass
        while (frame := self._channel.next_frame()) is not None:
            try:
                number, value = decode_reply(frame)
            except Exception as error:  # whatever pickle makes of other bytes
                raise self._babbled(error) from error
            self._file(number, value)

    def attend_to_death(self) -> None:
        """File the replies that have arrived; if the process has ended, keep the error for the next request."""
        self.pump()
        if self._channel.at_end or self._process.has_exited(0.0):
            self.died()

    def raise_if_ended(self) -> None:
        """Raise the error with which this worker ended, if it is known to have ended."""
        if self._end is not None:
            raise self._end

    def raise_if_dead(self) -> None:
        """Check the process, and raise an error that describes its end if it has ended."""
        if self._end is not None or self._channel.at_end or self._process.has_exited(0.0):
            raise self.died()

    def died(self) -> WorkerError:
        """Return an error that describes how the process ended. It is killed if it only closed its line."""
        if self._end is not None:
            return self._end
        # The order matters: the log is read before `kill` closes it, and the exit status must be that of the process
        # itself, not of our signal.
        doing = f"during {self._last_method!r}" if self._awaited else f"after {self._last_method!r}"
        exited, output = self._process.has_exited(EXIT_S), end_of(self._log)
        self.kill()
        how = self._process.how_it_ended() if exited else "closed its line without ending, and was killed"
        return self._end_with(WorkerDied, f"{self} {how} {doing}{output}")

    def _babbled(self, error: Exception) -> WorkerError:
        """Kill the worker, whose line carries something else than replies; returns the error."""
        output = end_of(self._log)
        self.kill()
        return self._end_with(
            WorkerDied,
            f"{self} sent what is no reply during {self._last_method!r} ({error!r}), and was killed: something in it "
            f"writes to file descriptors that are not its own{output}",
        )

    def ask_for_stacks(self) -> None:
        """Make a hung worker write the stacks of its threads to its log, which takes a moment."""
        if self._end is None:
            os.kill(self.pid, STACKS_SIGNAL)

    def timed_out(self, method: str, timeout: float) -> WorkerError:
        """Kill a worker that hangs; returns the error."""
        if self._end is not None:
            return self._end
        output = end_of(self._log)
        self.kill()
        return self._end_with(
            WorkerTimeout, f"{self} did not answer {method!r} within {timeout:g} s and was killed{output}"
        )

    def _end_with(self, kind: type[WorkerError], text: str) -> WorkerError:
        self._end = kind(text, role=self._spec.role, rank=self._spec.rank, pid=self.pid)
        return self._end

    def _remote_error(self, method: str, failure: Failure) -> RemoteError:
        return RemoteError(
            f"{self}: {method!r} raised {failure.type_name}: {failure.message}\n"
            f"--- traceback in the worker ---\n{failure.traceback}",
            role=self._spec.role,
            rank=self._spec.rank,
            pid=self.pid,
            type_name=failure.type_name,
            remote_message=failure.message,
            remote_traceback=failure.traceback,
            is_user_error=failure.is_user_error,
        )

    def ask_to_close(self) -> None:
        """Ask the worker to end, if it still listens."""
        if self._end is None and not self._channel.at_end:
            with contextlib.suppress(OSError):
                self._channel.send(encode_call(Call(next(self._numbers), 0, "close", ())), timeout=0.0)

    def join(self, deadline: float) -> None:
        """Wait for the process to end until `deadline` (`time.monotonic()`), then kill it and its children."""
        self._process.has_exited(max(0.0, deadline - time.monotonic()))
        self.kill()
        if self._end is None:
            self._end_with(WorkerDied, f"{self} has been closed")

    def kill(self) -> None:
        """End the process and its group at once, reap it and release its resources. May be called again."""
        if self._is_gone:
            return
        self._is_gone = True
        self._ears.remove(self)
        self._process.kill()
        self._channel.close()
        self._log.close()


def late(missing: dict[LocalWorker, list[Request]], timeout: float) -> WorkerError:
    """Kill the workers that did not answer; returns an error about the first of them."""
    # All write their stacks at the same time, so that the pause is paid once.
    for worker in missing:
        worker.ask_for_stacks()
    time.sleep(STACKS_S)
    errors = [worker.timed_out(requests[0].method, timeout) for worker, requests in missing.items()]
    return errors[0]
