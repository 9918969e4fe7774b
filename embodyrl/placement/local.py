"""Workers as processes of this machine.

A worker is a fresh interpreter (no fork: simulators keep threads and GL contexts; no second import of the user's main
script), in a process group of its own, so that Ctrl-C reaches the parent alone. Not in a session of its own: Linux
shares CPU time out by session, and handing the CPU back and forth between sessions doubles the wall time of a short
step. Its output goes to a log whose end is quoted when it dies.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, Any

from embodyrl.placement.channel import Channel
from embodyrl.placement.child import STACKS_SIGNAL
from embodyrl.placement.errors import RemoteError, WorkerDied, WorkerError, WorkerTimeout
from embodyrl.placement.launcher import Request, Worker
from embodyrl.placement.messages import Call, Failure, decode_reply, encode_call
from embodyrl.placement.plan import WorkerSpec

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from embodyrl.placement.child import main; main(int(sys.argv[3]), int(sys.argv[4]))"
)
_TAIL_BYTES = 4096
_STACKS_S = 0.3
"""How long a hung worker may take to write its stacks before it is killed [s]."""
_EXIT_S = 2.0
"""How long a worker that has closed its line may take to exit before it is killed [s]."""


class LocalWorker:
    """One worker process, seen from its parent. See `launcher.Worker`."""

    def __init__(self, spec: WorkerSpec, process: subprocess.Popen[bytes], channel: Channel, log: IO[bytes]) -> None:
        self._spec = spec
        self._process = process
        self._channel = channel
        self._log = log
        self._exit_fd = _open_pidfd(process.pid)
        self._poll_fds = [channel.fileno()] if self._exit_fd is None else [channel.fileno(), self._exit_fd]
        self._numbers = itertools.count()
        self._replies: dict[int, Any] = {}
        self._awaited: set[int] = set()
        self._last_method = "start"
        self._last_deadline = 0.0
        self._end: WorkerError | None = None
        self._reaped = False

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
        number = next(self._numbers)
        message = encode_call(Call(number, len(fds), method, args))
        start = time.monotonic()
        if self._awaited:
            start = max(start, self._last_deadline)
        else:
            self._last_method = method
        request = Request(self, number, method, timeout, start + timeout)
        try:
            self._channel.send(message, fds=fds, timeout=timeout)
        except TimeoutError:
            raise _late({self: [request]}, timeout) from None
        except OSError:
            raise self.died() from None
        self._last_method, self._last_deadline = method, request.deadline
        self._awaited.add(number)
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

    def poll_fds(self) -> list[int]:
        """File descriptors that become readable when the worker says something or ends."""
        return self._poll_fds if self._end is None else []

    def pump(self) -> None:
        """File the replies that have arrived; those that nobody waits for are dropped."""
        while self._channel.fill():
            pass
        while (frame := self._channel.next_frame()) is not None:
            number, value = decode_reply(frame)
            if number in self._awaited:
                self._awaited.discard(number)
                self._replies[number] = value

    def raise_if_ended(self) -> None:
        """Raise the error that this worker ended with, if it is known to have ended."""
        if self._end is not None:
            raise self._end

    def raise_if_dead(self) -> None:
        """Look at the process, and raise the error that says how it ended if it has."""
        if self._end is not None or self._channel.at_end or self._has_exited(0.0):
            raise self.died()

    def died(self) -> WorkerError:
        """The error that says how the process ended. It is killed if it only closed its line."""
        if self._end is not None:
            return self._end
        doing = f"during {self._last_method!r}" if self._awaited else f"after {self._last_method!r}"
        exited, output = self._has_exited(_EXIT_S), self._log_end()
        self.kill()
        how = _describe_exit(self._process.returncode) if exited else "closed its line without ending, and was killed"
        return self._end_with(WorkerDied, f"{self} {how} {doing}{output}")

    def ask_for_stacks(self) -> None:
        """Have a hung worker write the stacks of its threads to its log (it takes a moment)."""
        if self._end is None:
            os.kill(self.pid, STACKS_SIGNAL)

    def timed_out(self, method: str, timeout: float) -> WorkerError:
        """The error that says the worker hangs; it is killed."""
        if self._end is not None:
            return self._end
        output = self._log_end()
        self.kill()
        return self._end_with(
            WorkerTimeout, f"{self} did not answer {method!r} within {timeout:g} s and was killed{output}"
        )

    def _end_with(self, kind: type[WorkerError], text: str) -> WorkerError:
        self._end = kind(text, role=self._spec.role, rank=self._spec.rank, pid=self.pid)
        return self._end

    def _has_exited(self, timeout: float) -> bool:
        """Whether the process has ended, waiting up to `timeout` [s]. It is not reaped, so its id stays its own."""
        if self._reaped:
            return True
        deadline = time.monotonic() + timeout
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            rest = deadline - time.monotonic()
            if rest <= 0.0:
                return False
            self._sleep_until_exit(rest)
        return True

    def _sleep_until_exit(self, timeout: float) -> None:
        if self._exit_fd is None:
            time.sleep(min(timeout, 0.01))
        else:
            poll = select.poll()
            poll.register(self._exit_fd, select.POLLIN)
            poll.poll(timeout * 1e3)

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

    def _log_end(self) -> str:
        """The end of the worker's log as a paragraph, or nothing."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
        name = f" ({self._log.name})" if isinstance(self._log.name, str) else ""
        return f"\n--- end of its output{name} ---\n{tail}" if tail else ""

    def ask_to_close(self) -> None:
        """Tell the worker to end, if it still listens."""
        if self._end is None and not self._channel.at_end:
            with contextlib.suppress(OSError):
                self._channel.send(encode_call(Call(next(self._numbers), 0, "close", ())), timeout=0.0)

    def join(self, deadline: float) -> None:
        """Wait for the process to end until `deadline` (`time.monotonic()`), then kill it and whatever it started."""
        self._has_exited(max(0.0, deadline - time.monotonic()))
        self.kill()
        if self._end is None:
            self._end_with(WorkerDied, f"{self} has been closed")

    def kill(self) -> None:
        """End the process and its group at once, reap it and release what belongs to it. Harmless when repeated."""
        if self._reaped:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self._reaped = True
        if self._exit_fd is not None:
            os.close(self._exit_fd)
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
        self._finalizer = weakref.finalize(self, _stop_in_owner, os.getpid(), self._workers)

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
        try:
            requests = []
            for spec, arguments in zip(specs, args, strict=True):
                worker = self._spawn(spec)
                started.append(worker)
                payload = pickle.dumps((factory, arguments), pickle.HIGHEST_PROTOCOL)
                call = (spec.cpus, spec.memory_node, self._plugin_path, self._plugins, payload)
                requests.append(worker.request("start", *call, timeout=timeout))
            self.gather(requests, timeout=timeout)
        except BaseException:
            self.stop(started, timeout=0.0)
            raise
        return started

    def gather(self, requests: Sequence[Request], *, timeout: float) -> list[Any]:
        """Wait for results; see `launcher.Launcher.gather`."""
        pairs = [(_local(request.worker), request) for request in requests]
        try:
            waiting = _Waiting(pairs)
            deadline = time.monotonic() + timeout
            while waiting.missing:
                if not waiting.listen(deadline):
                    raise _late(waiting.missing, timeout)
            return [worker.take_reply(request) for worker, request in pairs]
        finally:
            for worker, request in pairs:
                worker.forget(request.id)

    def wait_any(self, requests: Sequence[Request]) -> list[Request]:
        """Wait for the first reply; see `launcher.Launcher.wait_any`."""
        pairs = [(_local(request.worker), request) for request in requests]
        waiting = _Waiting(pairs)
        waiting.listen(0.0)
        while waiting.missing:
            first = min(waiting.requests(), key=lambda request: request.deadline)
            if first.deadline <= time.monotonic():
                raise _late({_local(first.worker): [first]}, first.timeout)
            if len(waiting.requests()) < len(pairs):
                break
            waiting.listen(first.deadline)
        return [request for worker, request in pairs if worker.has_reply(request.id)]

    def stop(self, workers: Sequence[Worker], *, timeout: float = 5.0) -> None:
        """End workers; see `launcher.Launcher.stop`."""
        chosen = [_local(worker) for worker in workers]
        _stop(chosen, timeout)
        self._workers[:] = [worker for worker in self._workers if worker not in chosen]

    def close(self, *, timeout: float = 5.0) -> None:
        """End every worker that was started; see `launcher.Launcher.stop`."""
        self.stop(list(self._workers), timeout=timeout)

    def _spawn(self, spec: WorkerSpec) -> LocalWorker:
        parent_end, child_end = socket.socketpair()
        log = self._open_log(spec)
        command = [sys.executable, "-u", "-P", "-c", _BOOT]
        arguments = [spec.label, json.dumps(sys.path), str(child_end.fileno()), str(os.getpid())]
        process = _popen(command + arguments, env={**os.environ, **spec.env_vars}, output=log, fd=child_end.fileno())
        child_end.close()
        worker = LocalWorker(spec, process, Channel(parent_end, blocking=False), log)
        self._workers.append(worker)
        return worker

    def _open_log(self, spec: WorkerSpec) -> IO[bytes]:
        if self._log_dir is None:
            return tempfile.TemporaryFile()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return open(self._log_dir / f"{spec.role}-{spec.rank}.log", "a+b", buffering=0)


def _popen(command: list[str], *, env: dict[str, str], output: IO[bytes], fd: int) -> subprocess.Popen[bytes]:
    """Start a process from a thread that stays: the kernel kills it when the *thread* that started it ends."""

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            pass_fds=[fd],
            process_group=0,
        )

    if threading.current_thread() is threading.main_thread():
        return start()
    return _lasting_thread().submit(start).result()


@cache
def _lasting_thread() -> ThreadPoolExecutor:
    """A thread that lives as long as the program."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="embodyrl-spawn")


def _local(worker: Worker) -> LocalWorker:
    if not isinstance(worker, LocalWorker):
        raise TypeError(f"{worker!r} was not started by a LocalLauncher")
    return worker


class _Waiting:
    """Requests that have no reply yet.

    Raises:
        WorkerError: one of their workers is known to have ended.
    """

    def __init__(self, pairs: Sequence[tuple[LocalWorker, Request]]) -> None:
        self.missing: dict[LocalWorker, list[Request]] = {}
        for worker, request in pairs:
            if not worker.has_reply(request.id):
                worker.raise_if_ended()
                self.missing.setdefault(worker, []).append(request)
        self._poll = select.poll()
        self._owners = {fd: worker for worker in self.missing for fd in worker.poll_fds()}
        for fd in self._owners:
            self._poll.register(fd, select.POLLIN)

    def requests(self) -> list[Request]:
        """All of them."""
        return [request for requests in self.missing.values() for request in requests]

    def listen(self, deadline: float) -> bool:
        """Wait until something happens, and take note of it; returns False if nothing has by `deadline`.

        Raises:
            RemoteError: a method raised.
            WorkerDied: a worker's process ended.
        """
        events = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
        for worker in dict.fromkeys(self._owners[fd] for fd, _ in events):
            self.missing[worker] = _collect(worker, self.missing[worker])
            if not self.missing[worker]:
                del self.missing[worker]
                for fd in worker.poll_fds():
                    self._poll.unregister(fd)
        return bool(events)


def _collect(worker: LocalWorker, requests: list[Request]) -> list[Request]:
    """Read what the worker said; returns the requests that are still unanswered."""
    worker.pump()
    for request in requests:
        if worker.has_failed(request.id):
            worker.take_reply(request)
    unanswered = [request for request in requests if not worker.has_reply(request.id)]
    if unanswered:
        worker.raise_if_dead()
    return unanswered


def _late(missing: dict[LocalWorker, list[Request]], timeout: float) -> WorkerError:
    """Kill the workers that did not answer; returns the error that names the first of them."""
    for worker in missing:
        worker.ask_for_stacks()
    time.sleep(_STACKS_S)
    errors = [worker.timed_out(requests[0].method, timeout) for worker, requests in missing.items()]
    return errors[0]


def _stop(workers: Sequence[LocalWorker], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for worker in workers:
        worker.ask_to_close()
    for worker in workers:
        worker.join(deadline)


def _stop_in_owner(owner: int, workers: list[LocalWorker]) -> None:
    """End what is left when the launcher is dropped or the program ends - but not in a forked copy of the program."""
    if os.getpid() == owner:
        _stop(workers, 5.0)


def _open_pidfd(pid: int) -> int | None:
    """A file descriptor that becomes readable when the process ends.

    None where the kernel has no such thing; then the end of the control line says it.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _describe_exit(code: int | None) -> str:
    """An exit status in words."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory? `dmesg` tells)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
