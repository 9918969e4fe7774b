"""Workers as processes of this machine: fresh interpreters, or forks of a zygote that has imported their packages.

Each has its own process group and its own log, whose end is quoted when it dies.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from embodyrl.placement.channel import Channel
from embodyrl.placement.launcher import Request, Worker, WorkerDied
from embodyrl.placement.plan import WorkerSpec
from embodyrl.placement.process import Process, Zygote, ZygoteFailed, ZygoteRefused, spawn
from embodyrl.placement.startup_lock import make_startup_lock
from embodyrl.placement.worker import Ears, LocalWorker, late

_MAIN = "from embodyrl.placement.child import main; main(int(sys.argv[3]), int(sys.argv[4]))"

_logger = logging.getLogger(__name__)


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
        self._ears = Ears[LocalWorker]()
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
        pairs = [(_local(request.worker), request) for request in requests]
        try:
            deadline = time.monotonic() + timeout
            while missing := _unanswered(pairs):
                # All replies are needed, so sleep until the last worker has answered: most others have by then. Waking
                # up for each answer would cost a CPU that the simulators could use.
                if not self._listen(missing, [next(reversed(missing))], deadline):
                    raise late(missing, timeout)
            return [worker.take_reply(request) for worker, request in pairs]
        except BaseException:
            for worker, request in pairs:
                worker.forget(request.id)
            raise

    def wait_any(self, requests: Sequence[Request]) -> list[Request]:
        """Wait for the first reply; see `launcher.Launcher.wait_any`."""
        pairs = [(_local(request.worker), request) for request in requests]
        # Read what is there without waiting: replies that arrived before the deadline are in time, however late we are.
        self._listen(_unanswered(pairs), [], 0.0)
        while missing := _unanswered(pairs):
            waiting = [request for unanswered in missing.values() for request in unanswered]
            first = min(waiting, key=lambda request: request.deadline)
            if first.deadline <= time.monotonic():
                raise late({_local(first.worker): [first]}, first.timeout)
            if len(waiting) < len(requests):
                break
            self._listen(missing, list(missing), first.deadline)
        return [request for worker, request in pairs if worker.has_reply(request.id)]

    def _listen(
        self, missing: dict[LocalWorker, list[Request]], wake_for: Sequence[LocalWorker], deadline: float
    ) -> bool:
        """Wait until a worker sends a message, ends, or, if it is one of `wake_for`, answers a ring.

        All replies that have arrived by then are filed.

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
        # A worker of another call that dies must not fail this one: its error waits for its own next request.
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


def _local(worker: Worker) -> LocalWorker:
    if not isinstance(worker, LocalWorker):
        raise TypeError(f"{worker!r} was not started by a LocalLauncher")
    return worker


def _unanswered(pairs: Sequence[tuple[LocalWorker, Request]]) -> dict[LocalWorker, list[Request]]:
    """Return the requests that have no reply yet, by worker.

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
    """Read a worker's messages. Raises if a method raised, or if it ended without answering all of these requests."""
    # Messages first: a worker that raised and then ended is reported by its exception, not by its exit code.
    worker.pump()
    for request in requests:
        if worker.has_failed(request.id):
            worker.take_reply(request)
    if not all(worker.has_reply(request.id) for request in requests):
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
