"""Workers on the machines of a Ray cluster. Ray starts, watches and ends processes; it carries no data."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from embodyrl.placement.cluster import RayCluster, first_line
from embodyrl.placement.launcher import MachineLost, Request, Worker, WorkerDied, WorkerError, WorkerTimeout
from embodyrl.placement.plan import WorkerSpec
from embodyrl.placement.ray_actor import Outcome

GRACE_S = 10.0
"""Time that Ray may take to forward a call and its result [s]."""


class RayWorker:
    """A worker of a cluster. See `launcher.Worker`."""

    def __init__(self, launcher: RayLauncher, spec: WorkerSpec, actor: Any, pid: int) -> None:
        self._launcher = launcher
        self._spec = spec
        self.actor = actor
        self._pid = pid
        self.watch = actor.watch.remote()
        self.pending: dict[int, RayRequest] = {}
        self.end: WorkerError | None = None
        self._count = 0
        self._last: RayRequest | None = None

    @property
    def spec(self) -> WorkerSpec:
        """Its place in the plan."""
        return self._spec

    @property
    def pid(self) -> int:
        """Its process id on its machine."""
        return self._pid

    def __str__(self) -> str:
        return f"{self._spec.label} (pid {self._pid})"

    @property
    def is_idle(self) -> bool:
        """True if it has answered every request."""
        refs = [request.ref for request in self.pending.values()]
        return self._launcher.ready(refs, len(refs)) == len(refs)

    def request(self, method: str, *args: object, fds: Sequence[int] = (), timeout: float = 60.0) -> Request:
        """Request a call; see `launcher.Worker.request`.

        Raises:
            TypeError: file descriptors were given.
        """
        if fds:
            raise TypeError(f"{self} is not on this machine: it cannot be given file descriptors")
        if self.end is not None:
            raise self.end
        start = time.monotonic()
        if self._last is not None and self._last.id in self.pending:
            start = max(start, self._last.deadline)
        ref = self.actor.call.remote(method, pickle.dumps(args, pickle.HIGHEST_PROTOCOL), timeout)
        self._count += 1
        request = RayRequest(self, self._count, method, timeout, start + timeout, ref=ref)
        self.pending[request.id] = self._last = request
        return request

    def notify(self, method: str, *, timeout: float = 60.0) -> Request:
        """Request `on_notify`; see `launcher.Worker.notify`."""
        if not self.is_idle:
            raise RuntimeError(f"{self} is busy: a notification would overtake it")
        return self.request("on_notify", timeout=timeout)

    def raise_if_dead(self) -> None:
        """Check the process without waiting; see `launcher.Worker`."""
        if self.end is not None:
            raise self.end
        if self._launcher.ready([self.watch], 1):
            self._launcher.explain_end(self)

    def forget(self, request: RayRequest) -> None:
        """Drop the reply to this request when it arrives."""
        self.pending.pop(request.id, None)


@dataclass(eq=False, slots=True)
class RayRequest(Request):
    """A call to a `RayWorker`."""

    worker: RayWorker
    ref: Any = None
    error: WorkerError | None = None
    """With which it failed, instead of a reply."""

    def result(self) -> Any:
        """Return the reply.

        Raises:
            WorkerError: the call failed.
        """
        if self.error is not None:
            raise self.error
        return self.reply


class RayLauncher:
    """Runs workers on the machines of a cluster, each kept by an actor. See `launcher.Launcher`.

    Args:
        cluster: which has been joined; places that were reserved are used.
        plugins: modules that every worker imports before anything else.
        plugin_path: folder with such modules, besides what is installed.
    """

    def __init__(self, cluster: RayCluster, *, plugins: Sequence[str] = (), plugin_path: str | None = None) -> None:
        self._cluster = cluster
        self._ray = cluster.ray
        self._plugins = list(plugins)
        self._plugin_path = plugin_path
        self._workers: list[RayWorker] = []

    def start(
        self,
        specs: Sequence[WorkerSpec],
        factory: Callable[..., object],
        args: Sequence[tuple[Any, ...]],
        *,
        timeout: float,
    ) -> list[Worker]:
        """Start workers; see `launcher.Launcher.start`."""
        deadline = time.monotonic() + timeout
        actors = [self._cluster.actor(spec.role, spec.rank, spec.machine) for spec in specs]
        try:
            starting = []
            for spec, actor, arguments in zip(specs, actors, args, strict=True):
                payload = pickle.dumps((factory, arguments), pickle.HIGHEST_PROTOCOL)
                starting.append(actor.start.remote(spec, payload, self._plugins, self._plugin_path, timeout))
            started = []
            for spec, actor, pending in zip(specs, actors, starting, strict=True):
                pid = self._started(spec, pending, max(0.0, deadline - time.monotonic()) + GRACE_S)
                started.append(RayWorker(self, spec, actor, pid))
        except BaseException:
            for actor in actors:
                self._ray.kill(actor)
            raise
        self._workers += started
        return list(started)

    def _started(self, spec: WorkerSpec, pending: Any, timeout_s: float) -> int:
        """Return the process id of a worker that starts."""
        try:
            outcome: Outcome = self._ray.get(pending, timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            text = f"{spec.label} was not started: Ray started no process for it within {timeout_s:g} s"
            raise WorkerTimeout(text, role=spec.role, rank=spec.rank, pid=0) from None
        except self._ray.exceptions.RayError as error:
            raise self._lost(spec, 0, "its start", error) from error
        return int(outcome.get())

    def gather(self, requests: Sequence[Request], *, timeout: float) -> list[Any]:
        """Wait for results; see `launcher.Launcher.gather`."""
        chosen = _own_requests(requests)
        deadline = time.monotonic() + timeout
        try:
            waiting = [request for request in chosen if request.id in request.worker.pending]
            while waiting:
                # An actor whose own deadline comes first tells more about a worker that hangs.
                grace = GRACE_S if any(request.deadline <= deadline for request in waiting) else 0.0
                left = deadline - time.monotonic() + grace
                done = self._wait([request.ref for request in waiting], left)
                if not done:
                    raise self._late(waiting, timeout)
                for request in [request for request in waiting if request.ref in done]:
                    self._file(request)
                    waiting.remove(request)
            return [request.result() for request in chosen]
        except BaseException:
            for request in chosen:
                request.worker.forget(request)
            raise

    def wait_any(self, requests: Sequence[Request]) -> list[Request]:
        """Wait for the first reply; see `launcher.Launcher.wait_any`."""
        chosen = _own_requests(requests)
        under_way = [request for request in chosen if request.id in request.worker.pending]
        if len(under_way) == len(chosen):
            first = min(under_way, key=lambda request: request.deadline)
            if not self._wait([request.ref for request in under_way], first.deadline - time.monotonic() + GRACE_S):
                raise self._late([first], first.timeout)
        ready = {request.ref for request in under_way if self.ready([request.ref], 1)}
        for request in under_way:
            if request.ref in ready:
                self._file(request)
        return [request for request in chosen if request.id not in request.worker.pending]

    def ready(self, refs: Sequence[Any], count: int) -> int:
        """Return how many of some calls have ended, without waiting."""
        return len(self._ray.wait(list(refs), num_returns=count, timeout=0)[0]) if refs else 0

    def _wait(self, refs: Sequence[Any], timeout_s: float) -> set[Any]:
        """Wait until one of some calls has ended; returns those that have."""
        forever = timeout_s == float("inf")
        return set(self._ray.wait(list(refs), num_returns=1, timeout=None if forever else max(0.0, timeout_s))[0])

    def _file(self, request: RayRequest) -> None:
        """Take the result of a call that has ended, or its error.

        Raises:
            WorkerError: it failed.
        """
        worker = request.worker
        worker.forget(request)
        try:
            outcome: Outcome = self._ray.get(request.ref, timeout=GRACE_S)
        except self._ray.exceptions.RayError as error:
            if worker.end is None:  # else it was killed, for a reason that is known
                worker.end = self._lost(worker.spec, worker.pid, repr(request.method), error)
            request.error = worker.end
            raise request.error from error
        try:
            request.reply = pickle.loads(outcome.get())
        except WorkerError as error:
            request.error = error
            if isinstance(error, WorkerDied | WorkerTimeout):
                worker.end = error
            raise

    def explain_end(self, worker: RayWorker) -> None:
        """Raise the error that describes how a worker ended."""
        try:
            outcome: Outcome = self._ray.get(worker.actor.post_mortem.remote(), timeout=GRACE_S)
        except self._ray.exceptions.GetTimeoutError:
            text = f"{worker} has ended, and its Ray actor does not say how"
            worker.end = WorkerDied(text, role=worker.spec.role, rank=worker.spec.rank, pid=worker.pid)
            raise worker.end from None
        except self._ray.exceptions.RayError as error:
            worker.end = self._lost(worker.spec, worker.pid, "its work", error)
            raise worker.end from error
        try:
            outcome.get()
        except WorkerError as error:
            worker.end = error
            raise

    def _lost(self, spec: WorkerSpec, pid: int, during: str, error: Exception) -> WorkerDied:
        """Return the error for an actor that Ray has lost."""
        who = spec.label + (f" (pid {pid})" if pid else "")
        if self._cluster.is_up(spec.machine):
            text = f"{who} ended during {during}, because the Ray process that kept it ended: {first_line(error)}"
            return WorkerDied(text, role=spec.role, rank=spec.rank, pid=pid)
        roles = [worker.spec.title for worker in self._workers if worker.spec.machine == spec.machine] or [spec.title]
        text = f"machine {spec.machine} is lost, with {', '.join(roles)}: Ray there does not answer any more"
        return MachineLost(text, machine=spec.machine, role=spec.role, rank=spec.rank, pid=pid)

    def _late(self, requests: Sequence[RayRequest], timeout: float) -> WorkerError:
        """Kill the workers that did not answer; returns an error about the first of them."""
        for request in requests:
            worker = request.worker
            output = ""
            try:
                output = self._ray.get(worker.actor.stacks.remote(), timeout=GRACE_S)
            except self._ray.exceptions.RayError as error:
                worker.end = self._lost(worker.spec, worker.pid, repr(request.method), error)
            text = f"{worker} did not answer {request.method!r} within {timeout:g} s and was killed{output}"
            spec = worker.spec
            worker.end = worker.end or WorkerTimeout(text, role=spec.role, rank=spec.rank, pid=worker.pid)
            self._ray.kill(worker.actor)
        ended = requests[0].worker.end
        assert ended is not None
        return ended

    def stop(self, workers: Sequence[Worker], *, timeout: float = 5.0) -> None:
        """End workers; see `launcher.Launcher.stop`."""
        chosen = [worker for worker in workers if isinstance(worker, RayWorker) and worker in self._workers]
        self._workers = [worker for worker in self._workers if worker not in chosen]
        stopping = [worker.actor.stop.remote(timeout) for worker in chosen if worker.end is None]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=timeout + GRACE_S)
        for worker in chosen:
            self._ray.kill(worker.actor)
            spec = worker.spec
            worker.end = worker.end or WorkerDied(
                f"{worker} has been closed", role=spec.role, rank=spec.rank, pid=worker.pid
            )

    def close(self, *, timeout: float = 5.0) -> None:
        """End every worker that was started."""
        self.stop(list(self._workers), timeout=timeout)


def _own_requests(requests: Sequence[Request]) -> list[RayRequest]:
    own = [request for request in requests if isinstance(request, RayRequest)]
    if len(own) < len(requests):
        raise TypeError("some requests are not for workers of a RayLauncher")
    return own
