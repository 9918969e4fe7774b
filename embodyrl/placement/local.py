"""Workers as processes of this machine: fresh interpreters, or forks of a zygote that has imported their packages.

Each has its own process group and its own log, whose end is quoted when it dies. `LocalWorker` is one of them, seen
from its parent: its requests, its replies, and how it ended. `LocalLauncher` starts them, waits for them, ends them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from embodyrl.placement.child import STACKS_SIGNAL
from embodyrl.placement.launcher import NO_REPLY, RemoteError, Request, Worker, WorkerDied, WorkerError, WorkerTimeout
from embodyrl.placement.plan import WorkerSpec
from embodyrl.placement.process import EXIT_S, STACKS_S, Process, Zygote, ZygoteFailed, ZygoteRefused, end_of, spawn
from embodyrl.placement.startup_lock import make_startup_lock
from embodyrl.placement.transport.doorbell import WorkerPoller
from embodyrl.placement.transport.pipe import Call, Failure, Pipe, decode_reply, encode_call

_MAIN = "from embodyrl.placement.child import main; main(int(sys.argv[3]), int(sys.argv[4]))"

_logger = logging.getLogger(__name__)


class LocalWorker:
    """One worker process, seen from its parent. See `launcher.Worker`."""

    def __init__(
        self, spec: WorkerSpec, process: Process, pipe: Pipe, log: IO[bytes], poller: WorkerPoller[LocalWorker]
    ) -> None:
        self._spec = spec
        self._process = process
        self._pipe = pipe
        self._log = log
        self._poller = poller
        poller.add(self, pipe.doorbell.answers, [fd for fd in (pipe.fileno(), process.exit_fd) if fd is not None])
        self._numbers = itertools.count(1)
        self._awaited: dict[int, LocalRequest] = {}
        """Messages without a reply, by number."""
        self.notified: LocalRequest | None = None
        """The notification without an answer, even if nobody waits for it any more."""
        self._last: LocalRequest | None = None
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
        slots = range(0) if self._spec.role == "rank" else self._spec.slots
        served = f", envs {slots[0]}..{slots[-1]}" if len(slots) > 1 else f", env {slots[0]}" if slots else ""
        return f"{self._spec.label} (pid {self.pid}{served})"

    def request(self, method: str, *args: object, fds: Sequence[int] = (), timeout: float = 60.0) -> Request:
        """Request a call; see `launcher.Worker.request`."""
        self.raise_if_ended()
        # The worker serves its requests in order: the clock of this one starts when the one before it must be done.
        start = time.monotonic()
        if self._last is not None and not self.is_idle:
            start = max(start, self._last.deadline)
        request = LocalRequest(self, next(self._numbers), method, timeout, start + timeout)
        try:
            message = encode_call(Call(request.id, len(fds), method, args))
            self._pipe.send(message, fds=fds, timeout=timeout)
        except TimeoutError:
            raise late([request], timeout) from None
        except OSError:
            raise self.died() from None
        self._last = self._awaited[request.id] = request
        return request

    @property
    def is_idle(self) -> bool:
        """True if it has answered every request; see `launcher.Worker`."""
        return self.notified is None and not self._awaited

    def notify(self, method: str, *, timeout: float = 60.0) -> Request:
        """Request `on_notify` by doorbell; see `launcher.Worker.notify`."""
        self.raise_if_ended()
        if not self.is_idle:
            raise RuntimeError(f"{self} is busy with {self._doing!r}: a notification would overtake it")
        request = LocalRequest(self, next(self._numbers), method, timeout, time.monotonic() + timeout)
        self.notified = self._last = request
        os.eventfd_write(self._pipe.doorbell.bell, request.id)
        return request

    @property
    def _doing(self) -> str:
        """Method of the last request."""
        return "start" if self._last is None else self._last.method

    def result(self, request: LocalRequest) -> Any:
        """Return the result of a request whose reply has arrived.

        Raises:
            RemoteError: the method raised.
        """
        if isinstance(request.reply, Failure):
            raise self._remote_error(request.method, request.reply)
        return request.reply

    def forget(self, request: LocalRequest) -> None:
        """Drop the reply to this request when it arrives."""
        self._awaited.pop(request.id, None)

    def hear_answer(self) -> None:
        """File the answer to a notification, if it has arrived.

        Raises:
            WorkerDied: it answers another notification, so the worker was killed.
        """
        try:
            number = os.eventfd_read(self._pipe.doorbell.answers)
        except BlockingIOError:
            return
        if self.notified is None or number != self.notified.id:
            notified = None if self.notified is None else self.notified.id
            raise self._babbled(ValueError(f"answer {number} to notification {notified}"))
        self.notified.reply = None
        self.notified = None

    def _file(self, number: int, value: object) -> None:
        if self.notified is not None and number == self.notified.id:
            self.notified.reply, self.notified = value, None
        elif (request := self._awaited.pop(number, None)) is not None:
            request.reply = value

    def pump(self) -> None:
        """File the replies that have arrived; those to requests that were given up are dropped.

        Raises:
            WorkerDied: the bytes that arrived are no reply, so the worker was killed.
        """
        # Native code that prints to a wrong file descriptor may write into the pipe, hence the check of every frame.
        while self._pipe.fill():
            pass
        while (frame := self._pipe.next_frame()) is not None:
            try:
                number, value = decode_reply(frame)
            except Exception as error:  # whatever pickle makes of other bytes
                raise self._babbled(error) from error
            self._file(number, value)

    def attend_to_death(self) -> None:
        """File the replies that have arrived; if the process has ended, keep the error for the next request."""
        self.pump()
        if self._pipe.at_end or self._process.has_exited(0.0):
            self.died()

    def raise_if_ended(self) -> None:
        """Raise the error with which this worker ended, if it is known to have ended."""
        if self._end is not None:
            raise self._end

    def raise_if_dead(self) -> None:
        """Check the process, and raise an error that describes its end if it has ended."""
        if self._end is not None or self._pipe.at_end or self._process.has_exited(0.0):
            raise self.died()

    def died(self) -> WorkerError:
        """Return an error that describes how the process ended. It is killed if it only closed its line."""
        if self._end is not None:
            return self._end
        # The order matters: the log is read before `kill` closes it, and the exit status must be that of the process
        # itself, not of our signal.
        doing = f"{'after' if self.is_idle else 'during'} {self._doing!r}"
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
            f"{self} sent what is no reply during {self._doing!r} ({error!r}), and was killed: something in it "
            f"writes to file descriptors that are not its own{output}",
        )

    def output(self) -> str:
        """Return the end of its output, as errors quote it."""
        return "" if self._is_gone else end_of(self._log)

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
        text = f"{self}: {method!r} raised {failure.type_name}: {failure.message}"
        if failure.traceback and not failure.is_user_error:  # whose text is enough
            text += f"\n--- traceback in the worker ---\n{failure.traceback}"
        return RemoteError(
            text,
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
        if self._end is None and not self._pipe.at_end:
            with contextlib.suppress(OSError):
                self._pipe.send(encode_call(Call(next(self._numbers), 0, "close", ())), timeout=0.0)

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
        self._poller.remove(self)
        self._process.kill()
        self._pipe.close()
        self._log.close()


@dataclass(eq=False, slots=True)
class LocalRequest(Request):
    """A call to a `LocalWorker`."""

    worker: LocalWorker


def late(requests: Sequence[LocalRequest], timeout: float) -> WorkerError:
    """Kill the workers that did not answer; returns an error about the first of them."""
    # All write their stacks at the same time, so that there is one pause.
    missing = {request.worker: request.method for request in reversed(requests)}
    for worker in missing:
        worker.ask_for_stacks()
    time.sleep(STACKS_S)
    errors = {worker: worker.timed_out(method, timeout) for worker, method in missing.items()}
    return errors[requests[0].worker]


class LocalLauncher:
    """Runs workers as processes of this machine. See `launcher.Launcher`.

    Args:
        plugins: modules that every worker imports before anything else.
        plugin_path: folder with such modules, besides what is installed.
        log_dir: folder for the workers' output, one file each (`env-0.log`); None: kept only while they live.
    """

    def __init__(
        self, *, plugins: Sequence[str] = (), plugin_path: str | None = None, log_dir: Path | None = None
    ) -> None:
        self._plugins = list(plugins)
        self._plugin_path = plugin_path
        self._log_dir = log_dir
        self._workers: list[LocalWorker] = []
        self._poller = WorkerPoller[LocalWorker]()
        self._zygotes: dict[tuple[str, ...], Zygote | None] = {}
        """Zygotes by the modules they have imported; None for one that must not be forked. They live as long as there
        are workers."""
        self._finalizer = weakref.finalize(self, _stop_in_owner, os.getpid(), self._workers, self._zygotes)

    def start(
        self,
        specs: Sequence[WorkerSpec],
        factory: Callable[..., object],
        args: Sequence[tuple[Any, ...]],
        *,
        timeout: float,
    ) -> list[Worker]:
        """Start workers; see `launcher.Launcher.start`."""
        started: list[Worker] = []
        startup_lock = make_startup_lock()
        try:
            # All processes start before any is waited for, so their imports run at the same time.
            requests = []
            for spec, arguments in zip(specs, args, strict=True):
                zygote = None if spec.preload is None else self._zygote(spec.preload, specs, timeout)
                worker = self._start_worker(spec, zygote, timeout)
                started.append(worker)
                payload = pickle.dumps((factory, arguments), pickle.HIGHEST_PROTOCOL)
                call = (spec.cpus, spec.memory_node, self._plugin_path, self._plugins, payload)
                requests.append(worker.request("start", *call, fds=[startup_lock], timeout=timeout))
            self.gather(requests, timeout=timeout)
        except BaseException:
            self.stop(started, timeout=0.0)
            raise
        finally:
            os.close(startup_lock)
        return started

    def gather(self, requests: Sequence[Request], *, timeout: float) -> list[Any]:
        """Wait for results; see `launcher.Launcher.gather`."""
        chosen = _local(requests)
        try:
            deadline = time.monotonic() + timeout
            while missing := _unanswered(chosen):
                # All replies are needed, so sleep until the last worker has answered: most others have by then. Waking
                # up for each answer would cost a CPU that the simulators could use.
                if not self._listen(missing, missing[-1:], deadline):
                    raise late(missing, timeout)
            return [request.worker.result(request) for request in chosen]
        except BaseException:
            for request in chosen:
                request.worker.forget(request)
            raise

    def wait_any(self, requests: Sequence[Request]) -> list[Request]:
        """Wait for the first reply; see `launcher.Launcher.wait_any`."""
        chosen = _local(requests)
        # Read what is there without waiting: replies that arrived before the deadline are in time, however late we are.
        self._listen(_unanswered(chosen), [], 0.0)
        while missing := _unanswered(chosen):
            first = min(missing, key=lambda request: request.deadline)
            if first.deadline <= time.monotonic():
                raise late([first], first.timeout)
            if len(missing) < len(chosen):
                break
            self._listen(missing, missing, first.deadline)
        return [request for request in chosen if request.reply is not NO_REPLY]

    def _listen(self, missing: Sequence[LocalRequest], wake_for: Sequence[LocalRequest], deadline: float) -> bool:
        """Wait until a worker sends a message, ends, or answers a notification of `wake_for`.

        All replies that have arrived by then are filed.

        Returns:
            False if nothing has happened by `deadline` (`time.monotonic()`).

        Raises:
            RemoteError: one of the methods raised.
            WorkerDied: the process of one of these workers ended.
        """
        for request in wake_for:
            if request.worker.notified is not None:
                self._poller.wake_for(request.worker)
        said, happened = self._poller.wait(deadline - time.monotonic())
        for request in missing:
            if request.worker.notified is not None:
                request.worker.hear_answer()
        # A worker of another call that dies must not fail this one: its error waits for its own next request.
        for worker in said:
            if asked := [request for request in missing if request.worker is worker]:
                _attend(worker, asked)
            else:
                worker.attend_to_death()
        return happened

    def stop(self, workers: Sequence[Worker], *, timeout: float = 5.0) -> None:
        """End workers; see `launcher.Launcher.stop`."""
        chosen = [_own(worker) for worker in workers]
        _stop(chosen, timeout)
        self._workers[:] = [worker for worker in self._workers if worker not in chosen]
        if not self._workers:
            _close(self._zygotes)

    def close(self, *, timeout: float = 5.0) -> None:
        """End every worker that was started; see `launcher.Launcher.stop`."""
        self.stop(list(self._workers), timeout=timeout)

    def _start_worker(self, spec: WorkerSpec, zygote: Zygote | None, timeout: float) -> LocalWorker:
        parent_end, child_end = socket.socketpair()
        log = self._open_log(f"{spec.role}-{spec.rank}")
        try:
            process = _start_process(spec, zygote, line=child_end, log=log, timeout=timeout)
        except BaseException:
            parent_end.close()
            log.close()
            raise
        finally:
            child_end.close()
        worker = LocalWorker(spec, process, Pipe(parent_end, blocking=False), log, self._poller)
        self._workers.append(worker)
        return worker

    def _zygote(self, modules: tuple[str, ...], specs: Sequence[WorkerSpec], timeout: float) -> Zygote | None:
        """Return the process with these modules to fork `specs` from; None if it must not be forked."""
        zygote = self._zygotes.get(modules)
        if zygote is None and modules in self._zygotes:
            return None
        if zygote is not None and zygote.how_it_ended() is None:
            return zygote
        if zygote is not None:
            zygote.close()
        env, log = {**os.environ, **_common(specs)}, self._open_log("zygote")
        try:
            zygote = Zygote(modules, env=env, log=log, timeout=timeout)
        except ZygoteRefused as reason:
            _logger.warning("%s processes start one by one, since forking is not safe: %s", specs[0].role, reason)
            zygote = None
        except ZygoteFailed as error:
            raise _not_started(specs[0], error) from None
        self._zygotes[modules] = zygote
        return zygote

    def _open_log(self, name: str) -> IO[bytes]:
        if self._log_dir is None:
            return tempfile.TemporaryFile()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return open(self._log_dir / f"{name}.log", "a+b", buffering=0)


def _common(specs: Sequence[WorkerSpec]) -> dict[str, str]:
    """Return the environment variables that are the same for all workers."""
    first, *others = specs
    return {name: value for name, value in first.env_vars.items() if all(o.env_vars.get(name) == value for o in others)}


def _start_process(
    spec: WorkerSpec, zygote: Zygote | None, *, line: socket.socket, log: IO[bytes], timeout: float
) -> Process:
    """Start a worker's process, which owns copies of its end of the control line and of its log."""
    env = {**os.environ, **spec.env_vars}
    if zygote is None:
        arguments = [spec.label, str(line.fileno()), str(os.getpid())]
        return spawn(_MAIN, arguments, env=env, output=log, fd=line.fileno())
    try:
        return zygote.fork(env, line=line, log=log, timeout=timeout)
    except ZygoteFailed as error:
        raise _not_started(spec, error) from None


def _not_started(spec: WorkerSpec, error: ZygoteFailed) -> WorkerDied:
    return WorkerDied(f"{spec.label} was not started: {error}", role=spec.role, rank=spec.rank, pid=error.pid)


def _own(worker: Worker) -> LocalWorker:
    if not isinstance(worker, LocalWorker):
        raise TypeError(f"{worker!r} was not started by a LocalLauncher")
    return worker


def _local(requests: Sequence[Request]) -> list[LocalRequest]:
    local = [request for request in requests if isinstance(request, LocalRequest)]
    if len(local) < len(requests):
        raise TypeError("some requests are not for workers of a LocalLauncher")
    return local


def _unanswered(requests: Sequence[LocalRequest]) -> list[LocalRequest]:
    """Return the requests that have no reply yet.

    Raises:
        WorkerError: one of their workers is known to have ended.
    """
    missing = [request for request in requests if request.reply is NO_REPLY]
    for request in missing:
        request.worker.raise_if_ended()
    return missing


def _attend(worker: LocalWorker, requests: Sequence[LocalRequest]) -> None:
    """Read a worker's messages. Raises if a method raised, or if it ended without answering all of these requests."""
    # Messages first: a worker that raised and then ended is reported by its exception, not by its exit code.
    worker.pump()
    for request in requests:
        if isinstance(request.reply, Failure):
            worker.result(request)
    if any(request.reply is NO_REPLY for request in requests):
        worker.raise_if_dead()


def _stop(workers: Sequence[LocalWorker], timeout: float) -> None:
    # All are asked before any is waited for: closing takes as long as the slowest worker, not as long as all of them.
    deadline = time.monotonic() + timeout
    for worker in workers:
        worker.ask_to_close()
    for worker in workers:
        worker.join(deadline)


def _close(zygotes: dict[tuple[str, ...], Zygote | None]) -> None:
    while zygotes:
        _, zygote = zygotes.popitem()
        if zygote is not None:
            zygote.close()


def _stop_in_owner(owner: int, workers: list[LocalWorker], zygotes: dict[tuple[str, ...], Zygote | None]) -> None:
    """End the workers that are left when the launcher is dropped or the program ends, but not in a forked copy of the
    program, whose workers they are not."""
    if os.getpid() == owner:
        _stop(workers, 5.0)
        _close(zygotes)
