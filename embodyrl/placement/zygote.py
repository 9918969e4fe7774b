"""The inside of a zygote: a process that has imported a simulator's packages and forks workers from itself.

A worker that is forked has nothing left to import, and shares the memory of what was imported. That is safe only while
the zygote is a single thread that has opened neither a graphics nor a compute device, so it looks at itself and refuses
otherwise. Workers stay its zombies until the parent has asked for their status; until then their ids are their own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodyrl.placement.child import main as run_worker
from embodyrl.placement.child import prepare_process

MAX_MESSAGE = 1 << 17
_DEVICES = ("/dev/nvidia", "/dev/dri", "/dev/kfd")


def main(fd: int, parent: int, modules: Sequence[str]) -> None:
    """Run a zygote, and any worker that is forked from it.

    Args:
        fd: this process's end of the line to the parent, a SOCK_SEQPACKET socket. It says `{"refused": reason | null}`
            once, then answers requests one by one.
        parent: process id of the parent; the zygote dies with it, and the workers with the zygote.
        modules: what to import; see `preload`.
    """
    prepare_process(parent)
    os.set_inheritable(fd, False)
    line, zygote = socket.socket(fileno=fd), os.getpid()
    refused = preload(modules)
    _send(line, {"refused": refused})
    if refused is not None:
        return
    try:
        worker_fd = serve(line)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    # A forked worker: it has left every frame of the zygote but this one, so it ends like any other program.
    run_worker(worker_fd, zygote)


def preload(modules: Sequence[str]) -> str | None:
    """Import packages; returns why this process must not be forked, or None if it may.

    Args:
        modules: `module`, or `module:function` where a function must be called to load everything.
    """
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


def serve(line: socket.socket) -> int:
    """Answer requests. Returns in a forked worker only: its end of the control line.

    `{"fork": variables}` comes with the worker's end of its control line and with its log, and is answered by
    `{"pid": id}`; a variable that is null is unset. `{"reap": id}` is answered by `{"status": status}`, which is null
    if the worker has not ended.

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
            _send(line, {"status": os.waitstatus_to_exitcode(status) if pid else None})
            continue
        pid = os.fork()
        if pid == 0:
            return _become_worker(line, request["fork"], *fds)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(PermissionError, ProcessLookupError):  # the worker does the same; one of us is first
            os.setpgid(pid, pid)
        _send(line, {"pid": pid})


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

    Python's own does so itself, and torch's starts from the same state in every interpreter. Nothing that counts is
    drawn from any of them: episodes bring their seeds along.
    """
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _send(line: socket.socket, message: dict[str, Any]) -> None:
    line.send(json.dumps(message).encode())
