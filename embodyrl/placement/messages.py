"""Bytes of a call and of its reply.

A call without arguments that returns None - every simulator step - pickles nothing and is a dozen bytes.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

_CALL = struct.Struct("<QBB")
_REPLY = struct.Struct("<QB")
_NOTHING, _VALUE, _FAILURE = 0, 1, 2


class Call(NamedTuple):
    """A request as the worker sees it."""

    request: int
    """Number that its reply carries; a reply to a request nobody waits for any more is dropped."""
    num_fds: int
    """File descriptors that travel with it; they become the last arguments."""
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception that was raised in the worker, as text."""

    type_name: str
    message: str
    traceback: str
    is_user_error: bool


def encode_call(call: Call) -> bytes:
    """Bytes of a call: number, number of file descriptors, method, and the pickled arguments if there are any."""
    name = call.method.encode()
    head = _CALL.pack(call.request, call.num_fds, len(name)) + name
    return head + pickle.dumps(call.args, pickle.HIGHEST_PROTOCOL) if call.args else head


def decode_call(frame: bytes) -> Call:
    """The inverse of `encode_call`. The frame comes from the parent process, which is trusted."""
    request, num_fds, length = _CALL.unpack_from(frame)
    end = _CALL.size + length
    return Call(
        request, num_fds, frame[_CALL.size : end].decode(), pickle.loads(frame[end:]) if len(frame) > end else ()
    )


def encode_reply(request: int, value: object) -> bytes:
    """Bytes of the reply to `request`; `value` is the result or a `Failure`."""
    if value is None:
        return _REPLY.pack(request, _NOTHING)
    if isinstance(value, Failure):
        parts = (value.type_name, value.message, value.traceback, value.is_user_error)
        return _REPLY.pack(request, _FAILURE) + pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)
    return _REPLY.pack(request, _VALUE) + pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def decode_reply(frame: bytes) -> tuple[int, Any]:
    """`(request, result or Failure)`. The frame comes from a worker this process started, which is trusted."""
    request, status = _REPLY.unpack_from(frame)
    if status == _NOTHING:
        return request, None
    body = pickle.loads(frame[_REPLY.size :])
    if status == _VALUE:
        return request, body
    type_name, message, traceback, is_user_error = body
    return request, Failure(type_name=type_name, message=message, traceback=traceback, is_user_error=is_user_error)
