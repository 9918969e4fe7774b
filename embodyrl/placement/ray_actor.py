"""What runs in actors and tasks of Ray: an actor for each worker, and the look at a machine. Imports no torch.

An actor starts its worker as a `LocalLauncher` does anywhere, so that logs, stacks, deadlines and the words of errors
are the same. It forwards small calls as bytes: only the worker and the first rank know what they are about.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from embodyrl.placement.child import STACKS_SIGNAL
from embodyrl.placement.launcher import RemoteError, Worker, WorkerDied, WorkerError, WorkerTimeout
from embodyrl.placement.local import LocalLauncher, LocalWorker
from embodyrl.placement.plan import Inventory, WorkerSpec, inventory
from embodyrl.placement.process import STACKS_S
from embodyrl.version import __version__

CUDA = "CUDA_VISIBLE_DEVICES"
_SET_BY_RAY = ("OMP_NUM_THREADS",)
"""Variables with which Ray limits its own processes."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call ended."""

    value: Any = None
    error: str | None = None
    """Name of the class of a `WorkerError`."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments."""

    def get(self) -> Any:
        """Return the value.

        Raises:
            WorkerError: the call failed.
        """
        if self.error is None:
            return self.value
        kinds = {kind.__name__: kind for kind in (RemoteError, WorkerDied, WorkerTimeout)}
        raise kinds[self.error](**self.fields)


@dataclass(frozen=True)
class Look:
    """What is to be known of a machine."""

    version: str
    """Of embodyrl."""
    inventory: Inventory


def look() -> Look:
    """Look at the machine on which this task runs."""
    os.environ.pop(CUDA, None)  # Ray hides GPUs from tasks that ask for none
    return Look(__version__, inventory())


class Boxed:
    """Wraps an object in its worker: arguments and results of its methods are pickled there, where its classes are."""

    def __init__(self, payload: bytes) -> None:
        factory, args = pickle.loads(payload)
        self._service = factory(*args)

    def __getattr__(self, name: str) -> Callable[[bytes], bytes]:
        method = getattr(self._service, name)
        return lambda args: pickle.dumps(method(*pickle.loads(args)), pickle.HIGHEST_PROTOCOL)

    def close(self) -> None:
        """Close the object, if it can be."""
        if hasattr(self._service, "close"):
            self._service.close()


class RayActor:
    """Keeps a worker on its machine; Ray calls its methods, `watch` and `stacks` beside the others.

    Args:
        variables: of the environment of the first rank, for the worker.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._assigned = os.environ.get(CUDA, "")
        if not self._assigned:  # it asked for none: its simulators may have some
            os.environ.pop(CUDA, None)
        for name in _SET_BY_RAY:
            os.environ.pop(name, None)
        os.environ.update(variables)
        # Workers die with the thread that started them, so this one lives as long as the actor.
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._launcher: LocalLauncher | None = None
        self._worker: Worker | None = None

    def gpus(self) -> str:
        """Return the GPUs that Ray has assigned; empty: none."""
        return self._assigned

    def start(
        self, spec: WorkerSpec, payload: bytes, plugins: Sequence[str], plugin_path: str | None, timeout: float
    ) -> Outcome:
        """Start the worker; the value is its process id. `payload` is a pickle of `(factory, args)`."""
        if self._assigned:
            spec = replace(spec, env_vars={name: value for name, value in spec.env_vars.items() if name != CUDA})

        def work() -> int:
            self._launcher = LocalLauncher(plugins=plugins, plugin_path=plugin_path)
            [self._worker] = self._launcher.start([spec], Boxed, [(payload,)], timeout=timeout)
            return self._worker.pid

        return self._do(work)

    def call(self, method: str, args: bytes, timeout: float) -> Outcome:
        """Call a method of the worker; the value is a pickle of its result."""

        def work() -> bytes:
            assert self._worker is not None and self._launcher is not None
            request = self._worker.request(method, args, timeout=timeout)
            [result] = self._launcher.gather([request], timeout=timeout)
            return bytes(result)

        return self._do(work)

    def post_mortem(self) -> Outcome:
        """Return how the worker ended; the value is None if it lives."""
        return self._do(lambda: None if self._worker is None else self._worker.raise_if_dead())

    def watch(self) -> None:
        """Wait for the end of the worker's process."""
        assert self._worker is not None
        with contextlib.suppress(ProcessLookupError):  # it has ended
            end = os.pidfd_open(self._worker.pid)
            try:
                poll = select.poll()
                poll.register(end, select.POLLIN)
                poll.poll()
            finally:
                os.close(end)

    def stacks(self) -> str:
        """Make a worker that hangs write the stacks of its threads; returns the end of its output."""
        assert isinstance(self._worker, LocalWorker)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._worker.pid, STACKS_SIGNAL)
            time.sleep(STACKS_S)
        return self._worker.output()

    def stop(self, timeout: float) -> None:
        """End the worker: ask it to, wait, then kill."""
        if self._launcher is not None:
            self._thread.submit(self._launcher.close, timeout=timeout).result()

    def _do(self, work: Callable[[], Any]) -> Outcome:
        try:
            return Outcome(value=self._thread.submit(work).result())
        except WorkerError as error:
            fields: dict[str, Any] = {"message": str(error), "role": error.role, "rank": error.rank, "pid": error.pid}
            if isinstance(error, RemoteError):
                names = ("type_name", "remote_message", "remote_traceback", "is_user_error")
                fields |= {name: getattr(error, name) for name in names}
            return Outcome(error=type(error).__name__, fields=fields)
