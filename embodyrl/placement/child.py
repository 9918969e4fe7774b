"""The inside of processes that a launcher starts: workers, and zygotes that fork workers from themselves.

A worker starts, serves calls one by one, and ends on request or when the parent is gone.

A zygote has imported a simulator's packages. A worker that is forked from it has nothing left to import, and shares
the memory of these packages. That is safe only while the zygote is a single thread that has opened neither a graphics
nor a compute device, so it checks itself and refuses otherwise. Workers stay its zombies until the parent has asked for
their status; until then no other process can get their ids.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import itertools
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from embodyrl.errors import PluginError, RunError, UserError, is_debugging
from embodyrl.placement.signals import STOPPING, leave_to_parent
from embodyrl.placement.startup_lock import use_startup_lock
from embodyrl.placement.topology import bind
from embodyrl.placement.transport.pipe import Call, Failure, Pipe, decode_call, encode_reply

STACKS_SIGNAL = signal.SIGUSR2
"""Signal on which a worker writes the stacks of all its threads to its log, even while native code hangs. It must not
be one of `signals.STOPPING`, whose handlers a forked worker sets anew."""

_PR_SET_PDEATHSIG = 1
_PACKAGE = Path(__file__).parents[1]
_LEADING_TO_SIMULATORS = tuple(str(_PACKAGE / name) for name in ("placement/", "envs/manager/", "envs/base.py"))
"""Files whose frames come before those of a simulator."""


def main(fd: int, parent: int) -> None:
    """Run a worker.

    Args:
        fd: this worker's end of the control line.
        parent: process id of the parent; the worker dies with it.
    """
    prepare_process(parent)
    os.set_inheritable(fd, False)
    try:
        serve(Pipe(socket.socket(fileno=fd), blocking=True))
    except (EOFError, OSError) as error:
        # Usually the parent has ended; the text is for the case that it has not.
        sys.exit(
            f"the line to the program is gone ({error}): the program has ended, or something in this process closes or "
            f"uses file descriptors that are not its own"
        )


def prepare_process(parent: int) -> None:
    """Prepare a process that the launcher starts: it dies with `parent`, leaves signals to it, and can show stacks."""
    die_with_parent(parent)
    leave_to_parent()
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, and end now if it already has."""
    follow_parent(parent, signal.SIGKILL)


def follow_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends, and end now if it already
    has."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # A parent that ended before prctl took effect sends nothing; then another process has adopted this one.
    if os.getppid() != parent:
        os._exit(1)


def take_place() -> None:
    """Make this process, which `process.spawn` has started, a program of its own, with the words behind `[parent,
    *cpus]` as its command line: on these CPUs, if there are any, and asked to stop when the parent ends, also if that
    is killed."""
    place, *words = sys.argv[3:]
    sys.argv[1:] = words
    parent, *cpus = json.loads(place)
    follow_parent(parent, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    if cpus:
        os.sched_setaffinity(0, cpus)


def serve(pipe: Pipe) -> None:
    """Answer calls and notifications until `close`. The first call must be `start`.

    Raises:
        EOFError: the parent closed the line.
    """
    service: Any = None
    while True:
        message = pipe.listen()
        if isinstance(message, int):
            answer_notification(service, message, pipe)
            continue
        call = decode_call(message)
        try:
            value = None
            if call.method == "start":
                service = start(*call.args, *pipe.take_fds(call.num_fds))
            elif call.method != "close":
                value = invoke(service, call, pipe)
            elif hasattr(service, "close"):
                service.close()
            reply = encode_reply(call.request, value)
        except BaseException as error:  # also a simulator's SystemExit: the parent decides what follows
            reply = encode_reply(call.request, describe(error))
        pipe.send(reply)
        if call.method == "close":
            return


def answer_notification(service: Any, number: int, pipe: Pipe) -> None:
    """Call `on_notify`, then answer the notification; an error goes through the pipe."""
    try:
        service.on_notify()
    except BaseException as error:
        pipe.send(encode_reply(number, describe(error)))
    else:
        os.eventfd_write(pipe.doorbell.answers, number)


def start(
    cpus: tuple[int, ...],
    memory_node: int | None,
    plugin_path: str | None,
    plugins: Sequence[str],
    payload: bytes,
    startup_lock: int,
) -> object:
    """Prepare the process and build the object whose methods are called.

    Args:
        cpus: CPUs to run on; empty: as inherited.
        memory_node: NUMA node to take memory from; None: as inherited.
        plugin_path: folder with plug-ins, or None.
        plugins: modules to import before anything else, as the parent did; they may define what `payload` refers to.
        payload: pickle of `(factory, args)`.
        startup_lock: file descriptor for `startup_lock.use_startup_lock`.

    Raises:
        PluginError: a plug-in cannot be imported here.
    """
    bind(cpus, memory_node)
    use_startup_lock(startup_lock)
    if plugin_path is not None and plugin_path not in sys.path:
        sys.path.append(plugin_path)
    for name in plugins:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise PluginError(f"plug-in {name!r} cannot be imported in a worker process: {error!r}") from error
    factory, args = pickle.loads(payload)
    return factory(*args)


def invoke(service: object, call: Call, pipe: Pipe) -> object:
    """Call a public method of the service by name."""
    fds = pipe.take_fds(call.num_fds)
    if call.method.startswith("_"):
        raise AttributeError(f"{call.method!r} is not a public method")
    return getattr(service, call.method)(*call.args, *fds)


def describe(error: BaseException) -> Failure:
    """Describe an exception as text, since its class need not exist in the parent."""
    return Failure(
        type_name=type(error).__qualname__,
        message="; ".join([str(error), *getattr(error, "__notes__", [])]),
        traceback="" if isinstance(error, RunError) else "".join(_formatted(error)),
        is_user_error=isinstance(error, UserError),
    )


def _formatted(error: BaseException) -> Iterable[str]:
    """Return the lines of a traceback from the first frame of a simulator on, without the notes, which the message has;
    `EMBODYRL_DEBUG=1` keeps the frames that led there."""
    shown = traceback.TracebackException.from_exception(error)
    shown.__notes__ = None
    frames = list(itertools.dropwhile(lambda frame: frame.filename.startswith(_LEADING_TO_SIMULATORS), shown.stack))
    if frames and not is_debugging():
        shown.stack = traceback.StackSummary.from_list(frames)
    return shown.format()


MAX_MESSAGE = 1 << 17
_DEVICES = ("/dev/nvidia", "/dev/dri", "/dev/kfd")


def run_zygote(fd: int, parent: int, modules: Sequence[str]) -> None:
    """Run a zygote, and any worker that is forked from it.

    Args:
        fd: this process's end of the line to the parent, a SOCK_SEQPACKET socket. It sends `{"refused": reason | null}`
            once, then answers requests one by one.
        parent: process id of the parent; the zygote dies with it, and the workers with the zygote.
        modules: to import; see `preload`.
    """
    prepare_process(parent)
    os.set_inheritable(fd, False)
    line, zygote = socket.socket(fileno=fd), os.getpid()
    refused = preload(modules)
    _reply(line, {"refused": refused, "number": 0})
    if refused is not None:
        return
    try:
        worker_fd = serve_forks(line)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    # A forked worker: it has returned from every frame of the zygote but this one, so it ends like any other program.
    main(worker_fd, zygote)


def preload(modules: Sequence[str]) -> str | None:
    """Import packages; returns the reason why this process must not be forked, or None if it may.

    Args:
        modules: `module`, or `module:function` where a function must be called to load everything.
    """
    gc.disable()  # nothing that is imported is garbage
    for name in modules:
        module, _, function = name.partition(":")
        try:
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
        except Exception as error:
            return f"{name} could not be imported ({error!r})"
    # Objects that exist now are never collected: the collector would write to all of their pages, and unshare them.
    gc.collect()
    gc.freeze()
    gc.enable()
    return _unsafe(modules)


def _unsafe(modules: Sequence[str]) -> str | None:
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"importing {', '.join(modules)} started {threads - 1} threads"
    devices = sorted(name for name in _open_files() if name.startswith(_DEVICES))
    return f"importing {', '.join(modules)} opened {devices[0]}" if devices else None


def _open_files() -> list[str]:
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            names.append(os.readlink(link))
    return names


def serve_forks(line: socket.socket) -> int:
    """Answer requests. Returns in a forked worker only: its end of the control line.

    `{"fork": variables}` comes with the worker's end of its control line and with its log, and is answered by
    `{"pid": id}`; a variable that is null is unset. `{"reap": id}` is answered by `{"status": status}`, which is null
    if the worker has not ended. Every request has a number, which its answer has as well.

    Raises:
        EOFError: the parent has closed the line.
    """
    while True:
        data, fds, _, _ = socket.recv_fds(line, MAX_MESSAGE, 2, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise EOFError
        request = json.loads(data)
        if "reap" in request:
            pid, status = os.waitpid(request["reap"], os.WNOHANG)
            ended = os.waitstatus_to_exitcode(status) if pid else None
            _reply(line, {"status": ended, "number": request["number"]})
            continue
        pid = os.fork()
        if pid == 0:
            return _become_worker(line, request["fork"], *fds)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(PermissionError, ProcessLookupError):  # the worker does the same; one of us is first
            os.setpgid(pid, pid)
        _reply(line, {"pid": pid, "number": request["number"]})


def _become_worker(line: socket.socket, variables: dict[str, str | None], worker_fd: int, log: int) -> int:
    os.setpgid(0, 0)
    line.close()
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _draw_afresh()
    return worker_fd


def _draw_afresh() -> None:
    """Give numpy's global generator a state of this process's own, as in a fresh interpreter.

    Python's own does so itself, and torch's starts from the same state in every interpreter. No result depends on any
    of them, since episodes have seeds of their own.
    """
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _reply(line: socket.socket, message: dict[str, Any]) -> None:
    line.send(json.dumps(message).encode())
