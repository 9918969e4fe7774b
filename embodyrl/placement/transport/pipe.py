"""The pipe between a parent and one worker process: framed messages, beside a doorbell.

A frame is its length (4 bytes) and its bytes. Frames travel through a pair of pipes, which cost half of what a socket
costs per message. A socket hands over the pipes first, and file descriptors later. The parent's end never blocks
without a deadline; the worker's end blocks until something arrives.

A message is the bytes of a call or of its reply. A call without arguments that returns None pickles nothing and is a
dozen bytes.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from embodyrl.placement.transport.doorbell import Doorbell

_LENGTH = struct.Struct("<I")
_READ = 4096
_MAX_READ = 1 << 20


class Pipe:
    """One end of it, with the `doorbell`.

    Args:
        sock: a connected stream socket; the pipe owns it from now on.
        blocking: True for the worker's end, whose reads and writes wait as long as it takes; False for the parent's
            end, which makes the pipes.

    Raises:
        EOFError: the worker's end got no pipes, because the parent is gone.
    """

    def __init__(self, sock: socket.socket, *, blocking: bool) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self.at_end = False
        """True once the other side has closed its end. Frames that arrived before may still be read."""
        if blocking:
            self._reader, self._writer, *bells = self.take_fds(4)
            self.doorbell = Doorbell(*bells)
        else:
            sock.setblocking(False)
            self.doorbell = Doorbell.create()
            self._reader, self._writer = self._hand_over()
        os.set_blocking(self._reader, blocking)
        os.set_blocking(self._writer, blocking)
        self._poll = select.poll()
        self._poll.register(self.doorbell.bell, select.POLLIN)
        self._poll.register(self._reader, select.POLLIN)

    def _hand_over(self) -> tuple[int, int]:
        """Make the pipes and send the other side its ends and the bells; returns our ends, to read and to write."""
        # Their ends are closed here in any case: an open copy would hide that the worker has gone.
        (our_reader, their_writer), (their_reader, our_writer) = os.pipe(), os.pipe()
        try:
            self._send_fds([their_reader, their_writer, *self.doorbell])
        finally:
            os.close(their_reader)
            os.close(their_writer)
        return our_reader, our_writer

    def fileno(self) -> int:
        """Return the file descriptor to wait on for frames."""
        return self._reader

    def send(self, message: bytes, *, fds: Sequence[int] = (), timeout: float | None = None) -> None:
        """Send one frame.

        Args:
            message: its bytes.
            fds: file descriptors that travel with it; the receiver gets its own copies from `take_fds`.
            timeout: longest time that it may take [s]; None: any.

        Raises:
            TimeoutError: time is up. The line is then unusable, since half a frame may be under way.
            OSError: the other side is gone.
        """
        # Nearly every frame fits into the pipe at once: one system call, and no poll.
        if fds:
            self._send_fds(fds)
        frame = _LENGTH.pack(len(message)) + message
        sent = self._write(frame)
        if sent < len(frame):
            self._send_rest(memoryview(frame)[sent:], None if timeout is None else time.monotonic() + timeout)

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return os.write(self._writer, data)
        except BlockingIOError:
            return 0

    def _send_rest(self, rest: memoryview, deadline: float | None) -> None:
        """Send the rest of a frame that did not fit into the pipe.

        It reads meanwhile: if both sides fill their pipes without reading, neither can ever continue.
        """
        while rest:
            poll = select.poll()
            poll.register(self._writer, select.POLLOUT)
            if not self.at_end:
                poll.register(self._reader, select.POLLIN)
            ready = poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3)
            if not ready:
                raise TimeoutError("the other side does not read its messages")
            if any(fd == self._reader for fd, _ in ready):
                self.fill()
            rest = rest[self._write(rest) :]

    def _send_fds(self, fds: Sequence[int]) -> None:
        socket.send_fds(self._socket, [b"\0"], list(fds))

    def fill(self) -> bool:
        """Read once what has arrived; returns whether there may be more. Sets `at_end` if the other side closed."""
        size = max(_READ, self._missing()) if self._buffer else _READ
        try:
            data = os.read(self._reader, size)
        except BlockingIOError:
            return False
        self._buffer += data
        self.at_end = not data
        return len(data) == size

    def _missing(self) -> int:
        """Return how many bytes of the next frame are missing; 0 while its length is unknown."""
        if len(self._buffer) < _LENGTH.size:
            return 0
        return min(_LENGTH.size + int(_LENGTH.unpack_from(self._buffer)[0]) - len(self._buffer), _MAX_READ)

    def next_frame(self) -> bytes | None:
        """Return the next complete frame that has been read, or None."""
        buffer = self._buffer
        if len(buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + int(_LENGTH.unpack_from(buffer)[0])
        if len(buffer) < end:
            return None
        frame = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        return frame

    def listen(self) -> int | bytes:
        """Return the number of the next notification or the next frame; waits as long as it takes (blocking end only).

        Raises:
            EOFError: the other side has closed its end.
        """
        while not self._buffer or (frame := self.next_frame()) is None:
            if self.at_end:
                raise EOFError("the other side has closed the line")
            # The bell first: it rings only while nothing is under way, so frames that wait beside it are newer.
            for fd, _ in self._poll.poll():
                if fd == self.doorbell.bell:
                    return os.eventfd_read(fd)
            self.fill()
        return frame

    def take_fds(self, count: int) -> list[int]:
        """Receive the file descriptors of one `send` (blocking end only); the caller owns them.

        Raises:
            EOFError: the other side has closed its end.
        """
        if count == 0:
            return []
        _, fds, _, _ = socket.recv_fds(self._socket, 1, count, socket.MSG_CMSG_CLOEXEC)
        if len(fds) != count:
            raise EOFError("the other side has closed the line")
        return fds

    def close(self) -> None:
        """Close this end."""
        for fd in (self._reader, self._writer, *self.doorbell):
            os.close(fd)
        self._socket.close()


_CALL = struct.Struct("<QBB")
_REPLY = struct.Struct("<QB")
_NOTHING, _VALUE, _FAILURE = 0, 1, 2


class Call(NamedTuple):
    """A request as the worker receives it."""

    request: int
    """Number that its reply carries; the reply to a request that was given up is dropped."""
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
    """Encode a call: number, number of file descriptors, method, and the pickled arguments if there are any."""
    name = call.method.encode()
    head = _CALL.pack(call.request, call.num_fds, len(name)) + name
    return head + pickle.dumps(call.args, pickle.HIGHEST_PROTOCOL) if call.args else head


def decode_call(frame: bytes) -> Call:
    """Decode a call, the inverse of `encode_call`. The frame comes from the parent process, which is trusted."""
    request, num_fds, length = _CALL.unpack_from(frame)
    end = _CALL.size + length
    return Call(
        request, num_fds, frame[_CALL.size : end].decode(), pickle.loads(frame[end:]) if len(frame) > end else ()
    )


def encode_reply(request: int, value: object) -> bytes:
    """Encode the reply to `request`; `value` is the result or a `Failure`."""
    if value is None:
        return _REPLY.pack(request, _NOTHING)
    if isinstance(value, Failure):
        parts = (value.type_name, value.message, value.traceback, value.is_user_error)
        return _REPLY.pack(request, _FAILURE) + pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)
    return _REPLY.pack(request, _VALUE) + pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def decode_reply(frame: bytes) -> tuple[int, Any]:
    """Decode a reply into `(request, result or Failure)`. The frame comes from a worker that this process started,
    which is trusted."""
    request, status = _REPLY.unpack_from(frame)
    if status == _NOTHING:
        return request, None
    body = pickle.loads(frame[_REPLY.size :])
    if status == _VALUE:
        return request, body
    type_name, message, traceback, is_user_error = body
    return request, Failure(type_name=type_name, message=message, traceback=traceback, is_user_error=is_user_error)
