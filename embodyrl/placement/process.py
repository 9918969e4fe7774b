"""Processes as their launcher handles them: spawn, fork from a zygote, wait for the end, exit status, kill."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import IO, Any

from embodyrl.placement.child import MAX_MESSAGE, STACKS_SIGNAL
from embodyrl.placement.signals import kept_waiting

EXIT_S = 2.0
"""Longest time until a process that was killed, or has closed its line, has ended [s]."""
STACKS_S = 0.3
"""Time that a hung process has to write its stacks before it is killed [s]."""


class Process:
    """One process, in a process group of its own.

    Args:
        pid: its id; no other process can get it until `kill` or `poll` has reaped this one.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_fd = open_pidfd(pid)
        """File descriptor that becomes readable when the process ends; None where the kernel does not support it."""
        self.status: int | None = None
        """Exit code, or minus the number of the signal that killed it; None until it is reaped, or if it is unknown."""
        self._is_reaped = False

    def has_exited(self, timeout: float) -> bool:
        """Return whether the process has ended, waiting up to `timeout` [s]. It is not reaped."""
        if self._is_reaped:
            return True
        deadline = time.monotonic() + timeout
        while not self._is_zombie():
            rest = deadline - time.monotonic()
            if rest <= 0.0:
                return False
            self._sleep_until_exit(rest)
        return True

    def kill(self) -> None:
        """End the process and its group at once, reap it and release its resources. May be called again."""
        # Reaped only after the signal: until then the id cannot belong to another process, so the signal cannot
        # hit a stranger.
        if self._is_reaped:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.has_exited(EXIT_S)
        self._forget()

    def poll(self) -> bool:
        """Return whether the process has ended, and then reap it and release its resources. Others of its group go
        on."""
        if self.has_exited(0.0) and not self._is_reaped:
            self._forget()
        return self._is_reaped

    def _forget(self) -> None:
        try:
            self.status = self._reap()
        finally:  # also if a signal's exception ends the waiting
            self._is_reaped = True
            if self.exit_fd is not None:
                os.close(self.exit_fd)

    def how_it_ended(self) -> str:
        """Describe how it ended, in text; to be called after `kill`."""
        return describe_exit(self.status)

    def _is_zombie(self) -> bool:
        """Return whether it has ended and waits to be reaped."""
        raise NotImplementedError

    def _reap(self) -> int | None:
        """Let the kernel forget it; returns its status."""
        raise NotImplementedError

    def _sleep_until_exit(self, timeout: float) -> bool:
        if self.exit_fd is None:
            time.sleep(min(timeout, 0.01))
            return False
        poll = select.poll()
        poll.register(self.exit_fd, select.POLLIN)
        return bool(poll.poll(timeout * 1e3))


class SpawnedProcess(Process):
    """A fresh interpreter, started by this process."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        super().__init__(popen.pid)
        self._popen = popen

    def _is_zombie(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _reap(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(EXIT_S)
        return self._popen.returncode


def spawn(
    code: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    output: IO[bytes],
    errors: IO[bytes] | None = None,
    fd: int | None = None,
) -> SpawnedProcess:
    """Start an interpreter that runs `code`, with this program's module path.

    The user's main script is not imported a second time. The process has a group of its own, so that Ctrl-C reaches
    only the parent, but no session of its own: Linux divides CPU time by session, and handing the CPU back and forth
    between sessions doubles the wall time of a short step. Signals that ask to stop wait until `code` has left them to
    the parent.

    Args:
        code: runs once the module path is set; finds `arguments` in `sys.argv[3:]`.
        arguments: the first is the process' name for people.
        env: its environment.
        output: file for its output.
        errors: file for what it writes to stderr; None: the same.
        fd: file descriptor that it inherits besides the standard ones, if any.
    """
    boot = f"import json, sys; sys.path[:] = json.loads(sys.argv[2])\n{code}"
    label, *rest = arguments
    command = [sys.executable, "-u", "-P", "-c", boot, label, json.dumps(sys.path), *rest]

    def start() -> subprocess.Popen[bytes]:
        with kept_waiting():
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output if errors is None else errors,
                env=env,
                pass_fds=[] if fd is None else [fd],
                process_group=0,
            )

    # From a thread that stays: the kernel kills the process when the *thread* that started it ends.
    if threading.current_thread() is threading.main_thread():
        return SpawnedProcess(start())
    return SpawnedProcess(_lasting_thread().submit(start).result())


@cache
def _lasting_thread() -> ThreadPoolExecutor:
    """Return a thread that lives as long as the program."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="embodyrl-spawn")


class ProbeFailed(Exception):
    """Raised when a probe failed; the text describes how."""


class Probe:
    """Python code that runs in another process, started at once.

    Args:
        code: prints its result as JSON on the last line.
        arguments: it finds them in `sys.argv[3:]`.
        env_vars: environment variables to set; None as a value removes one.
    """

    def __init__(self, code: str, *arguments: str, env_vars: Mapping[str, str | None] | None = None) -> None:
        wanted = {**os.environ, **(env_vars or {})}
        env = {name: value for name, value in wanted.items() if value is not None}
        with contextlib.ExitStack() as files:
            self._output, self._errors = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            code = f"import signal; signal.pthread_sigmask(signal.SIG_SETMASK, ())\n{code}"
            self._process = spawn(code, ["probe", *arguments], env=env, output=self._output, errors=self._errors)
            self._files = files.pop_all()

    def result(self, deadline: float) -> Any:
        """Wait for the result and return it.

        Args:
            deadline: time at which the process is killed, on the clock of `time.monotonic()` [s].

        Raises:
            ProbeFailed: it crashed, raised, printed nothing, or was too slow.
        """
        with self._files:
            try:
                if not self._process.has_exited(deadline - time.monotonic()):
                    raise ProbeFailed("hangs: no answer in time")
            finally:
                self.close()
            output, errors = _lines(self._output), _lines(self._errors)
        code = self._process.status or 0
        if code < 0:
            raise ProbeFailed(f"crashes ({signal_name(-code)})")
        if code > 0 or not output:
            raise ProbeFailed(errors[-1] if errors else f"exits with code {code}")
        return json.loads(output[-1])

    def close(self) -> None:
        """Kill the process, if it still runs, and all processes that it started."""
        self._process.kill()


def _lines(file: IO[bytes]) -> list[str]:
    """Return the lines of a file that are not empty."""
    file.seek(0)
    return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def open_pidfd(pid: int) -> int | None:
    """Return a file descriptor that becomes readable when the process ends.

    None where the kernel does not support it; then the end of the control line shows that the process has ended.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def end_of(log: IO[bytes], num_bytes: int = 4096) -> str:
    """Return the end of a process's log as a paragraph; empty if there is none."""
    if log.closed:
        return ""
    size = os.fstat(log.fileno()).st_size
    tail = os.pread(log.fileno(), num_bytes, max(0, size - num_bytes)).decode(errors="replace").strip()
    name = f" ({log.name})" if isinstance(log.name, str) else ""
    return f"\n--- end of its output{name} ---\n{tail}" if tail else ""


def signal_name(number: int) -> str:
    """Return the name of a signal: `SIGKILL`, or `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(status: int | None) -> str:
    """Describe an exit status in text."""
    if status is None:
        return "ended"
    if status >= 0:
        return f"exited with code {status}"
    name = signal_name(-status)
    hint = " (out of memory? `dmesg` tells)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


_MAIN = (
    "from embodyrl.placement.child import run_zygote; "
    "run_zygote(int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))"
)


class ZygoteRefused(Exception):
    """Raised when a zygote finds that it must not be forked; the text is the reason."""


class ZygoteFailed(Exception):
    """Raised when a zygote died or does not answer; the text describes how, and quotes the end of its output.

    Attributes:
        pid: the zygote's process id.
    """

    def __init__(self, message: str, pid: int) -> None:
        super().__init__(message)
        self.pid = pid


class Zygote:
    """A process that forks workers from itself.

    Args:
        modules: that it imports first; see `child.preload`.
        env: its environment; workers differ from it only in the variables that `fork` changes.
        log: file for its output; the zygote owns it from now on.
        timeout: longest time until it has imported everything [s].

    Raises:
        ZygoteRefused: it must not be forked.
        ZygoteFailed: it died or hangs.
    """

    def __init__(self, modules: Sequence[str], *, env: Mapping[str, str], log: IO[bytes], timeout: float) -> None:
        self._env = dict(env)
        self._log = log
        self._asked = 0
        """Number of the newest request; the zygote says by itself, as number 0, whether it may be forked."""
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
            log: file for its output.
            timeout: longest time until it exists [s].

        Raises:
            ZygoteFailed: the zygote died or hangs.
        """
        changes: dict[str, str | None] = {name: value for name, value in env.items() if self._env.get(name) != value}
        changes.update(dict.fromkeys(self._env.keys() - env.keys()))
        reply = self._ask({"fork": changes}, timeout, fds=[line.fileno(), log.fileno()])
        return ForkedProcess(int(reply["pid"]), self)

    def reap(self, pid: int) -> int | None:
        """Return the status of a worker that has ended, None if it is unknown. From now on another process may get its
        id."""
        try:
            status: int | None = self._ask({"reap": pid}, EXIT_S)["status"]
        except ZygoteFailed:
            return None
        return status

    def how_it_ended(self) -> str | None:
        """Describe how the zygote ended, in text; None while it lives."""
        if not self._process.has_exited(0.0):
            return None
        self._process.kill()
        return self._process.how_it_ended()

    def close(self) -> None:
        """End it, and with it every worker that is left. May be called again."""
        self._line.close()
        self._process.kill()
        self._log.close()

    def _ask(self, message: Mapping[str, Any], timeout: float, fds: Sequence[int] = ()) -> dict[str, Any]:
        self._asked += 1
        data = json.dumps({**message, "number": self._asked}).encode()
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
        """Return the reply to the newest request. One to an earlier request is passed over: a signal may have raised
        an exception while it was awaited."""
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        deadline = time.monotonic() + timeout
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            data = b""
            with contextlib.suppress(ConnectionResetError):
                data = self._line.recv(MAX_MESSAGE)
            if not data:
                raise ZygoteFailed(self._describe_death(), self.pid)
            reply: dict[str, Any] = json.loads(data)
            if reply["number"] == self._asked:
                return reply
        raise ZygoteFailed(self._describe_hang(timeout), self.pid)

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
        """Describe how it ended, in text; to be called after `kill`."""
        fate = self._zygote.how_it_ended()
        if self.status is not None or fate is None:
            return describe_exit(self.status)
        return f"died with the process that it was forked from (pid {self._zygote.pid}), which {fate}"

    def _is_zombie(self) -> bool:
        return self._sleep_until_exit(0.0)

    def _reap(self) -> int | None:
        return self._zygote.reap(self.pid)
