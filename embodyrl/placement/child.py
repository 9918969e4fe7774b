"""The inside of a worker process: start, serve calls one by one, end when told or when the parent is gone."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from embodyrl.errors import PluginError, UserError
from embodyrl.placement.binding import bind
from embodyrl.placement.channel import Channel
from embodyrl.placement.messages import Call, Failure, decode_call, encode_reply
from embodyrl.placement.signals import leave_to_parent
from embodyrl.placement.turns import use_turns

STACKS_SIGNAL = signal.SIGUSR2
"""Signal on which a worker writes the stacks of all its threads to its log, even while native code is hanging. None of
those that ask a program to stop (`signals.STOPPING`), whose handlers a forked worker sets anew."""

_PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int) -> None:
    """Run a worker.

    Args:
        fd: this worker's end of the control line.
        parent: process id of the parent; the worker dies with it.
    """
    prepare_process(parent)
    os.set_inheritable(fd, False)
    try:
        serve(Channel(socket.socket(fileno=fd), blocking=True))
    except (EOFError, OSError) as error:
        # Usually the parent has ended, and nobody reads this.
        sys.exit(
            f"the line to the program is gone ({error}): the program has ended, or something in this process closes or "
            f"uses file descriptors that are not its own"
        )


def prepare_process(parent: int) -> None:
    """What every process that the launcher starts does first: die with `parent`, leave signals to it, show stacks."""
    die_with_parent(parent)
    leave_to_parent()
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, and end now if it already has."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def serve(channel: Channel) -> None:
    """Answer calls and rings until `close`. The first call must be `start`.

    Raises:
        EOFError: the parent closed the line.
    """
    service: Any = None
    while True:
        message = channel.listen()
        if isinstance(message, int):
            answer_ring(service, message, channel)
            continue
        call = decode_call(message)
        try:
            value = None
            if call.method == "start":
                service = start(*call.args, *channel.take_fds(call.num_fds))
            elif call.method != "close":
                value = invoke(service, call, channel)
            elif hasattr(service, "close"):
                service.close()
            reply = encode_reply(call.request, value)
        except BaseException as error:  # the simulator's SystemExit is the parent's business, too
            reply = encode_reply(call.request, describe(error))
        channel.send(reply)
        if call.method == "close":
            return


def answer_ring(service: Any, number: int, channel: Channel) -> None:
    """Do what the doorbell stands for, and say that it is done; an error goes through the pipe."""
    try:
        service.on_ring()
    except BaseException as error:
        channel.send(encode_reply(number, describe(error)))
    else:
        channel.answer(number)


def start(
    cpus: tuple[int, ...],
    memory_node: int | None,
    plugin_path: str | None,
    plugins: Sequence[str],
    payload: bytes,
    turns: int,
) -> object:
    """Prepare the process and build the object whose methods are called.

    Args:
        cpus: CPUs to run on; empty: as inherited.
        memory_node: NUMA node to take memory from; None: as inherited.
        plugin_path: folder in which plug-ins may be, or None.
        plugins: modules to import before anything else, as the parent did; they may define what `payload` refers to.
        payload: pickle of `(factory, args)`.
        turns: file descriptor for `turns.use_turns`.

    Raises:
        PluginError: a plug-in cannot be imported here.
    """
    bind(cpus, memory_node)
    use_turns(turns)
    if plugin_path is not None and plugin_path not in sys.path:
        sys.path.append(plugin_path)
    for name in plugins:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise PluginError(f"plug-in {name!r} cannot be imported in a worker process: {error!r}") from error
    factory, args = pickle.loads(payload)
    return factory(*args)


def invoke(service: object, call: Call, channel: Channel) -> object:
    """Call a public method of the service by name."""
    fds = channel.take_fds(call.num_fds)
    if call.method.startswith("_"):
        raise AttributeError(f"{call.method!r} is not a public method")
    return getattr(service, call.method)(*call.args, *fds)


def describe(error: BaseException) -> Failure:
    """An exception as text, since its class need not exist in the parent."""
    return Failure(
        type_name=type(error).__qualname__,
        message="; ".join([str(error), *getattr(error, "__notes__", [])]),
        traceback="".join(traceback.format_exception(error)),
        is_user_error=isinstance(error, UserError),
    )
