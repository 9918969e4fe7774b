"""Workers as processes of this machine: fresh interpreters, or forks of a zygote that has imported what they need.

Each has its own process group and its own log, whose end is quoted when it dies.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import select
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from embodyrl.placement.channel import Channel
from embodyrl.placement.child import STACKS_SIGNAL
from embodyrl.placement.errors import RemoteError, WorkerDied, WorkerError, WorkerTimeout
from embodyrl.placement.forking import Zygote, ZygoteFailed, ZygoteRefused
from embodyrl.placement.launcher import Request, Worker
from embodyrl.placement.messages import Call, Failure, decode_reply, encode_call
from embodyrl.placement.plan import WorkerSpec
from embodyrl.placement.process import EXIT_S, STACKS_S, Process, end_of, spawn
from embodyrl.placement.turns import make_turns

_MAIN = "from embodyrl.placement.child import main; main(int(sys.argv[3]), int(sys.argv[4]))"

_logger = logging.getLogger(__name__)


W = TypeVar("W")


class _Ears(Generic[W]):
    """All file descriptors on which workers say something, in one poll set that lasts as long as they do.

    Pipes and ends of processes are always heard. The answer to a ring wakes nobody unless `wake_for` was called for it,
    so that one can sleep until the slowest of several workers is done.
    """

    _epoll: select.epoll
    """Open while there are workers."""

    def __init__(self) -> None:
        self._owners: dict[int, W] = {}
        self._answers: dict[W, int] = {}
        self._armed: set[int] = set()

    def add(self, worker: W, answer: int, always: Sequence[int]) -> None:
        """Hear this worker from now on."""
        if not self._owners:
            self._epoll = select.epoll()
        for fd in always:
            self._epoll.register(fd, select.EPOLLIN)
        self._epoll.register(answer, select.EPOLLONESHOT)  # silent
        self._owners |= dict.fromkeys([answer, *always], worker)
        self._answers[worker] = answer

    def remove(self, worker: W) -> None:
        """Hear this worker no more; before its file descriptors are closed."""
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
            The workers that said something otherwise than by an answer to a ring, or ended; whether anything happened.
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
        self, spec: WorkerSpec, process: Process, channel: Channel, log: IO[bytes], ears: _Ears[LocalWorker]
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
        """Number of the ring that is not answered yet, whether somebody waits for it or not."""
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
        served = f", slots {slots[0]}..{slots[-1]}" if len(slots) > 1 else f", slot {slots[0]}" if slots else ""
        return f"{self._spec.label} (pid {self.pid}{served})"

    def request(self, method: str, *args: object, fds: Sequence[int] = (), timeout: float = 60.0) -> Request:
        """Ask for a call; see `launcher.Worker.request`."""
        self.raise_if_ended()
        start = time.monotonic()
        if self._awaited:
            start = max(start, self._last_deadline)
        request = Request(self, next(self._numbers), method, timeout, start + timeout)
        try:
            message = encode_call(Call(request.id, len(fds), method, args))
            self._channel.send(message, fds=fds, timeout=timeout)
        except TimeoutError:
            raise _late({self: [request]}, timeout) from None
        except OSError:
            raise self.died() from None
        return self._noted(request)

    @property
    def is_idle(self) -> bool:
        """Whether it has answered everything; see `launcher.Worker`."""
        return not self._awaited and self._rung is None

    def ring(self, method: str, *, timeout: float = 60.0) -> Request:
        """Ask for what the doorbell stands for; see `launcher.Worker.ring`."""
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
        """Whether the reply to this request has arrived."""
        return number in self._replies

    def has_failed(self, number: int) -> bool:
        """Whether the reply to this request has arrived and says that the method raised."""
        return isinstance(self._replies.get(number), Failure)

    def take_reply(self, request: Request) -> Any:
        """The result of a request whose reply has arrived.

        Raises:
            RemoteError: the method raised.
        """
        value = self._replies.pop(request.id)
        if isinstance(value, Failure):
            raise self._remote_error(request.method, value)
        return value

    def forget(self, number: int) -> None:
        """Nobody waits for this request any more: its reply is dropped, now or when it comes."""
        self._awaited.discard(number)
        self._replies.pop(number, None)

    @property
    def is_rung(self) -> bool:
        """Whether a ring is not answered yet."""
        return self._rung is not None

    def hear_answer(self) -> None:
        """File the answer to a ring, if it has come.

        Raises:
            WorkerDied: it is the answer to another one, and the worker was killed.
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
        """File the replies that have arrived; those that nobody waits for are dropped.

        Raises:
            WorkerDied: what arrived is no reply, and the worker was killed.
        """
        while self._channel.fill():
            pass
        while (frame := self._channel.next_frame()) is not None:
            try:
                number, value = decode_reply(frame)
            except Exception as error:  # whatever pickle makes of other bytes
                raise self._babbled(error) from error
            self._file(number, value)

    def attend_to_death(self) -> None:
        """File what has arrived; if the process has ended, note how: whoever asks for more is told."""
        self.pump()
        if self._channel.at_end or self._process.has_exited(0.0):
            self.died()

    def raise_if_ended(self) -> None:
        """Raise the error that this worker ended with, if it is known to have ended."""
        if self._end is not None:
            raise self._end

    def raise_if_dead(self) -> None:
        """Look at the process, and raise the error that says how it ended if it has."""
        if self._end is not None or self._channel.at_end or self._process.has_exited(0.0):
            raise self.died()

    def died(self) -> WorkerError:
        """The error that says how the process ended. It is killed if it only closed its line."""
        if self._end is not None:
            return self._end
        doing = f"during {self._last_method!r}" if self._awaited else f"after {self._last_method!r}"
        exited, output = self._process.has_exited(EXIT_S), end_of(self._log)
        self.kill()
        how = self._process.how_it_ended() if exited else "closed its line without ending, and was killed"
        return self._end_with(WorkerDied, f"{self} {how} {doing}{output}")

    def _babbled(self, error: Exception) -> WorkerError:
        """The error that says the worker's line carries something else than replies; the worker is killed."""
        output = end_of(self._log)
        self.kill()
        return self._end_with(
            WorkerDied,
            f"{self} sent what is no reply during {self._last_method!r} ({error!r}), and was killed: something in it "
            f"writes to file descriptors that are not its own{output}",
        )

    def ask_for_stacks(self) -> None:
        """Have a hung worker write the stacks of its threads to its log (it takes a moment)."""
        if self._end is None:
            os.kill(self.pid, STACKS_SIGNAL)

    def timed_out(self, method: str, timeout: float) -> WorkerError:
        """The error that says the worker hangs; it is killed."""
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
        """Tell the worker to end, if it still listens."""
        if self._end is None and not self._channel.at_end:
            with contextlib.suppress(OSError):
                self._channel.send(encode_call(Call(next(self._numbers), 0, "close", ())), timeout=0.0)

    def join(self, deadline: float) -> None:
        """Wait for the process to end until `deadline` (`time.monotonic()`), then kill it and whatever it started."""
        self._process.has_exited(max(0.0, deadline - time.monotonic()))
        self.kill()
        if self._end is None:
            self._end_with(WorkerDied, f"{self} has been closed")

    def kill(self) -> None:
        """End the process and its group at once, reap it and release what belongs to it. Harmless when repeated."""
        if self._is_gone:
            return
        self._is_gone = True
        self._ears.remove(self)
        self._process.kill()
        self._channel.close()
        self._log.close()


class LocalLauncher:
    """Runs workers as processes of this machine. See `launcher.Launcher`.

    Args:
        plugins: modules that every worker imports before anything else.
        plugin_path: folder in which they may be, besides what is installed.
        log_dir: folder for the workers' output, one file each (`env-0.log`); None: kept only while they live.
    """

    def __init__(
        self, *, plugins: Sequence[str] = (), plugin_path: str | None = None, log_dir: Path | None = None
    ) -> None:
        self._plugins = list(plugins)
        self._plugin_path = plugin_path
        self._log_dir = log_dir
        self._workers: list[LocalWorker] = []
        self._ears = _Ears[LocalWorker]()
        self._zygotes: dict[tuple[str, ...], Zygote | None] = {}
        """By what they have imported; None for one that must not be forked. They live as long as there are workers."""
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
        turns = make_turns()
        try:
            requests = []
            for spec, arguments in zip(specs, args, strict=True):
                zygote = None if spec.preload is None else self._zygote(spec.preload, specs, timeout)
                worker = self._start_worker(spec, zygote, timeout)
                started.append(worker)
                payload = pickle.dumps((factory, arguments), pickle.HIGHEST_PROTOCOL)
                call = (spec.cpus, spec.memory_node, self._plugin_path, self._plugins, payload)
                requests.append(worker.request("start", *call, fds=[turns], timeout=timeout))
            self.gather(requests, timeout=timeout)
        except BaseException:
            self.stop(started, timeout=0.0)
            raise
        finally:
            os.close(turns)
        return started

    def gather(self, requests: Sequence[Request], *, timeout: float) -> list[Any]:
        """Wait for results; see `launcher.Launcher.gather`."""
        pairs = [(_local(request.worker), request) for request in requests]
        try:
            deadline = time.monotonic() + timeout
            while missing := _unanswered(pairs):
                # All are wanted, so sleep until the last one has answered: most others have, too, by then.
                if not self._listen(missing, [next(reversed(missing))], deadline):
                    raise _late(missing, timeout)
            return [worker.take_reply(request) for worker, request in pairs]
        except BaseException:
            for worker, request in pairs:
                worker.forget(request.id)
            raise

    def wait_any(self, requests: Sequence[Request]) -> list[Request]:
        """Wait for the first reply; see `launcher.Launcher.wait_any`."""
        pairs = [(_local(request.worker), request) for request in requests]
        self._listen(_unanswered(pairs), [], 0.0)
        while missing := _unanswered(pairs):
            waiting = [request for unanswered in missing.values() for request in unanswered]
            first = min(waiting, key=lambda request: request.deadline)
            if first.deadline <= time.monotonic():
                raise _late({_local(first.worker): [first]}, first.timeout)
            if len(waiting) < len(requests):
                break
            self._listen(missing, list(missing), first.deadline)
        return [request for worker, request in pairs if worker.has_reply(request.id)]

    def _listen(
        self, missing: dict[LocalWorker, list[Request]], wake_for: Sequence[LocalWorker], deadline: float
    ) -> bool:
        """Wait until a worker says something by the pipe, ends, or, if it is one of `wake_for`, answers a ring.

        What has arrived by then is filed.

        Returns:
            False if nothing has happened by `deadline` (`time.monotonic()`).

        Raises:
            RemoteError: one of the methods raised.
            WorkerDied: the process of one of these workers ended.
        """
        for worker in wake_for:
            if worker.is_rung:
                self._ears.wake_for(worker)
        said, happened = self._ears.listen(deadline - time.monotonic())
        for worker in missing:
            if worker.is_rung:
                worker.hear_answer()
        for worker in said:
            if worker in missing:
                _attend(worker, missing[worker])
            else:
                worker.attend_to_death()
        return happened

    def stop(self, workers: Sequence[Worker], *, timeout: float = 5.0) -> None:
        """End workers; see `launcher.Launcher.stop`."""
        chosen = [_local(worker) for worker in workers]
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
        worker = LocalWorker(spec, process, Channel(parent_end, blocking=False), log, self._ears)
        self._workers.append(worker)
        return worker

    def _zygote(self, modules: tuple[str, ...], specs: Sequence[WorkerSpec], timeout: float) -> Zygote | None:
        """The process with these modules to fork `specs` from; None if it must not be forked."""
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
    """The environment variables in which all workers agree."""
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


def _local(worker: Worker) -> LocalWorker:
    if not isinstance(worker, LocalWorker):
        raise TypeError(f"{worker!r} was not started by a LocalLauncher")
    return worker


def _unanswered(pairs: Sequence[tuple[LocalWorker, Request]]) -> dict[LocalWorker, list[Request]]:
    """The requests that have no reply yet, by worker.

    Raises:
        WorkerError: one of their workers is known to have ended.
    """
    missing: dict[LocalWorker, list[Request]] = {}
    for worker, request in pairs:
        if not worker.has_reply(request.id):
            worker.raise_if_ended()
            missing.setdefault(worker, []).append(request)
    return missing


def _attend(worker: LocalWorker, requests: list[Request]) -> None:
    """Read what a worker said. Raises if a method raised, or if it ended without answering all of these requests."""
    worker.pump()
    for request in requests:
        if worker.has_failed(request.id):
            worker.take_reply(request)
    if not all(worker.has_reply(request.id) for request in requests):
        worker.raise_if_dead()


def _late(missing: dict[LocalWorker, list[Request]], timeout: float) -> WorkerError:
    """Kill the workers that did not answer; returns the error that names the first of them."""
    for worker in missing:
        worker.ask_for_stacks()
    time.sleep(STACKS_S)
    errors = [worker.timed_out(requests[0].method, timeout) for worker, requests in missing.items()]
    return errors[0]


def _stop(workers: Sequence[LocalWorker], timeout: float) -> None:
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
    """End what is left when the launcher is dropped or the program ends - but not in a forked copy of the program."""
    if os.getpid() == owner:
        _stop(workers, 5.0)
        _close(zygotes)
