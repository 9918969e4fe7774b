"""The parent's side of a zygote (see `zygote`): start one, have it fork workers, learn how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from embodyrl.placement.child import STACKS_SIGNAL
from embodyrl.placement.process import EXIT_S, STACKS_S, Process, describe_exit, end_of, spawn
from embodyrl.placement.zygote import MAX_MESSAGE

_MAIN = "from embodyrl.placement.zygote import main; main(int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))"


class ZygoteRefused(Exception):
    """Raised when a zygote finds that it must not be forked; the text says why."""


class ZygoteFailed(Exception):
    """Raised when a zygote died or does not answer; the text says how, and quotes the end of its output.

    Attributes:
        pid: the zygote's process id.
    """

    def __init__(self, message: str, pid: int) -> None:
        super().__init__(message)
        self.pid = pid


class Zygote:
    """A process that forks workers from itself.

    Args:
        modules: what it imports first; see `zygote.preload`.
        env: its environment; workers differ from it only in the variables that `fork` is told.
        log: where its output goes; the zygote owns it from now on.
        timeout: longest time until it has imported everything [s].

    Raises:
        ZygoteRefused: it must not be forked.
        ZygoteFailed: it died or hangs.
    """

    def __init__(self, modules: Sequence[str], *, env: Mapping[str, str], log: IO[bytes], timeout: float) -> None:
        self._env = dict(env)
        self._log = log
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = ["zygote", str(theirs.fileno()), str(os.getpid()), json.dumps(list(modules))]
        self._process = spawn(_MAIN, arguments, env=env, output=log, fd=theirs.fileno())
        theirs.close()
        try:
            refused = self._receive(timeout)["refused"]
        except BaseException:
            self.close()
            raise
        if refused is not None:
            self.close()
            raise ZygoteRefused(refused)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fork(self, env: Mapping[str, str], *, line: socket.socket, log: IO[bytes], timeout: float) -> ForkedProcess:
        """Fork a worker.

        Args:
            env: the worker's environment.
            line: the worker's end of its control line.
            log: where its output goes.
            timeout: longest time until it exists [s].

        Raises:
            ZygoteFailed: the zygote died or hangs.
        """
        changes: dict[str, str | None] = {name: value for name, value in env.items() if self._env.get(name) != value}
        changes.update(dict.fromkeys(self._env.keys() - env.keys()))
        reply = self._ask({"fork": changes}, timeout, fds=[line.fileno(), log.fileno()])
        return ForkedProcess(int(reply["pid"]), self)

    def reap(self, pid: int) -> int | None:
        """The status of a worker that has ended; from now on its id may be another process's. None: nobody knows."""
        try:
            status: int | None = self._ask({"reap": pid}, EXIT_S)["status"]
        except ZygoteFailed:
            return None
        return status

    def how_it_ended(self) -> str | None:
        """What became of the zygote, in words; None while it lives."""
        if not self._process.has_exited(0.0):
            return None
        self._process.kill()
        return self._process.how_it_ended()

    def close(self) -> None:
        """End it, and with it every worker that is left. Harmless when repeated."""
        self._line.close()
        self._process.kill()
        self._log.close()

    def _ask(self, message: Mapping[str, Any], timeout: float, fds: Sequence[int] = ()) -> dict[str, Any]:
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise ZygoteFailed(f"the environment has changed by {len(data)} bytes since the start", self.pid)
        try:
            if fds:
                socket.send_fds(self._line, [data], list(fds))
            else:
                self._line.send(data)
        except OSError:
            raise ZygoteFailed(self._describe_death(), self.pid) from None
        return self._receive(timeout)

    def _receive(self, timeout: float) -> dict[str, Any]:
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        if not poll.poll(timeout * 1e3):
            raise ZygoteFailed(self._describe_hang(timeout), self.pid)
        with contextlib.suppress(ConnectionResetError):
            if data := self._line.recv(MAX_MESSAGE):
                return dict(json.loads(data))
        raise ZygoteFailed(self._describe_death(), self.pid)

    def _describe_death(self) -> str:
        exited, output = self._process.has_exited(EXIT_S), end_of(self._log)
        self._process.kill()
        how = self._process.how_it_ended() if exited else "closed its line without ending, and was killed"
        return f"the process that workers are forked from (pid {self.pid}) {how}{output}"

    def _describe_hang(self, timeout: float) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACKS_SIGNAL)
        time.sleep(STACKS_S)
        output = end_of(self._log)
        self._process.kill()
        return (
            f"the process that workers are forked from (pid {self.pid}) hung for {timeout:g} s and was killed{output}"
        )


class ForkedProcess(Process):
    """A worker that a zygote has forked."""

    def __init__(self, pid: int, zygote: Zygote) -> None:
        super().__init__(pid)
        self._zygote = zygote

    def how_it_ended(self) -> str:
        """What became of it, in words; after `kill`."""
        fate = self._zygote.how_it_ended()
        if self.status is not None or fate is None:
            return describe_exit(self.status)
        return f"died with the process that it was forked from (pid {self._zygote.pid}), which {fate}"

    def _is_zombie(self) -> bool:
        return self._sleep_until_exit(0.0)

    def _reap(self) -> int | None:
        return self._zygote.reap(self.pid)
